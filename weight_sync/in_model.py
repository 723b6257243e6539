"""Staging for machines without memory for a second copy: tensors are written into the model as they come.

No step may run from the first write to the end of the transaction.

    JournalStaging    the old content of a tensor goes to a file before it is overwritten; `undo` writes it back
    InPlaceStaging    nothing is kept; `undo` after a write raises
"""

from __future__ import annotations

import tempfile
import zlib
from dataclasses import dataclass

import torch

from weight_sync.errors import StagingError
from weight_sync.staging import Content, DirectSink
from weight_sync.tensor_meta import LogicalWeights, tensor_bytes


class InPlaceStaging(DirectSink):
    """Writes straight through."""

    num_bytes = 0

    def __init__(self, weights: LogicalWeights) -> None:
        super().__init__(weights)
        self._num_written = 0

    @property
    def dirty(self) -> bool:
        return self._num_written > 0

    def write(self, name: str, content: Content) -> None:
        self._num_written += 1
        super().write(name, content)

    def prepare(self) -> None:
        """Nothing can be done ahead."""

    def commit(self) -> None:
        """Everything is in place."""

    def undo(self) -> None:
        if self._num_written:
            raise StagingError(f"{self._num_written} tensors were overwritten in place")

    def close(self) -> None:
        self._num_written = 0


class JournalStaging(DirectSink):
    """`directory`: where the unlinked file lies, None for the system's temporary directory.  It grows to the size of
    what is overwritten; a directory in memory (tmpfs) saves nothing.

    A tensor whose old content cannot be kept, because the disk is full, is not written: `StagingError`.
    """

    def __init__(self, weights: LogicalWeights, directory: str | None = None) -> None:
        super().__init__(weights)
        self._directory = directory
        self._journal: Journal | None = None

    @property
    def dirty(self) -> bool:
        return self._journal is not None

    @property
    def num_bytes(self) -> int:
        return 0 if self._journal is None else self._journal.num_bytes

    def write(self, name: str, content: Content) -> None:
        if self._journal is None:
            self._journal = Journal(self._directory)
        for place in self._weights.places(name)[:1]:  # the others hold the same
            self._journal.append(name, place.read())
        super().write(name, content)

    def prepare(self) -> None:
        """Nothing can be done ahead."""

    def commit(self) -> None:
        """Everything is in place."""

    def undo(self) -> None:
        if self._journal is None:
            return
        for entry in reversed(self._journal.entries):
            self._weights.put_back(entry.name, self._journal.read(entry))
        self.close()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


@dataclass(frozen=True)
class JournalEntry:
    """Where the old content of a tensor lies in the file; `checksum` is the CRC-32 of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int


class Journal:
    """Old content, as plain bytes in a file without a name.  Raises `StagingError` for whatever the disk refuses."""

    def __init__(self, directory: str | None) -> None:
        self.entries: list[JournalEntry] = []
        self.num_bytes = 0
        try:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 (closed by `close`)
                prefix="lockstep-journal-", dir=directory, buffering=0
            )
        except OSError as error:
            raise StagingError(f"no journal can be made in {directory or tempfile.gettempdir()}: {error}") from error

    def append(self, name: str, tensor: torch.Tensor) -> None:
        content = tensor_bytes(tensor).numpy()
        view = content.data
        try:
            self._file.seek(self.num_bytes)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise StagingError(f"the journal cannot take {name} ({content.nbytes} bytes): {error}") from error
        entry = JournalEntry(
            name, tensor.dtype, tuple(tensor.shape), self.num_bytes, content.nbytes, zlib.crc32(content.data)
        )
        self.entries.append(entry)
        self.num_bytes += content.nbytes

    def read(self, entry: JournalEntry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        content = tensor_bytes(tensor).numpy()
        view = content.data
        try:
            self._file.seek(entry.offset)
            while view:
                count = self._file.readinto(view)
                if not count:
                    raise StagingError(f"the journal is shorter than its entry for {entry.name}")
                view = view[count:]
        except OSError as error:
            raise StagingError(f"the journal of {entry.name} cannot be read: {error}") from error
        if zlib.crc32(content.data) != entry.checksum:
            raise StagingError(f"the journal of {entry.name} is damaged")
        return tensor

    def close(self) -> None:
        self._file.close()
