"""Staging for machines without memory for a second copy: tensors are written into the model as they come.

No step may run from the first write to the end of the transaction.

    JournalStaging    the old content of a tensor goes to a file before it is overwritten; `undo` writes it back
    InPlaceStaging    nothing is kept; `undo` after a write raises
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import NoReturn

import torch

from weight_sync.device_queue import DeviceQueue, HostQueue
from weight_sync.errors import StagingError
from weight_sync.plan import BucketPlan
from weight_sync.staging import Content, DirectSink
from weight_sync.tensor_meta import LogicalWeights, Part, tensor_bytes
from weight_sync.unnamed_file import Entry, UnnamedFile


class _InModelStaging(DirectSink):
    """The base of both stagings: a commit has nothing left to do but to wait.

    Tensors come one by one, so that each is checked before it is written.
    """

    takes_spans = False

    def __init__(self, weights: LogicalWeights, queue: DeviceQueue | None = None) -> None:
        super().__init__(weights)
        self._queue = queue or HostQueue()
        self._is_begun = False

    def write(self, name: str, content: Content) -> None:
        if not self._is_begun:
            self._queue.fence_device()  # the last step has read the old content
            self._is_begun = True
        self._queue.put(lambda: super(_InModelStaging, self).write(name, content))

    def settle(self) -> None:
        self._queue.fence()

    def read(self, name: str) -> Sequence[Part]:
        self._queue.fence()
        return super().read(name)

    def write_spans(self, plan: BucketPlan, content: torch.Tensor) -> NoReturn:
        """Refuse: see `takes_spans`."""
        raise AssertionError("tensors come one by one")

    def prepare(self) -> None:
        """Do nothing: nothing can be done ahead."""

    def commit(self) -> None:
        """Wait for the device: everything is in place then."""
        self._queue.fence_device()


class InPlaceStaging(_InModelStaging):
    """Writes straight through."""

    num_bytes = 0

    def __init__(self, weights: LogicalWeights, queue: DeviceQueue | None = None) -> None:
        super().__init__(weights, queue)
        self._num_written = 0

    @property
    def dirty(self) -> bool:
        return self._num_written > 0

    def write(self, name: str, content: Content) -> None:
        self._num_written += 1
        super().write(name, content)

    def undo(self) -> None:
        if self._num_written:
            raise StagingError(f"{self._num_written} tensors were overwritten in place")

    def close(self) -> None:
        self._num_written = 0


class JournalStaging(_InModelStaging):
    """`directory`: where the unnamed file lies, None for the system's temporary directory.  It grows to the size of
    what is overwritten; a directory in memory (tmpfs) saves nothing.

    A tensor whose old content cannot be kept, because the disk is full, is not written: `StagingError`.
    """

    def __init__(self, weights: LogicalWeights, directory: str | None = None, queue: DeviceQueue | None = None) -> None:
        super().__init__(weights, queue)
        self._directory = directory
        self._file: UnnamedFile | None = None
        self._entries: list[tuple[str, torch.dtype, tuple[int, ...], Entry]] = []  # name, dtype, shape

    @property
    def dirty(self) -> bool:
        return self._file is not None

    @property
    def num_bytes(self) -> int:
        return 0 if self._file is None else self._file.num_bytes

    def write(self, name: str, content: Content) -> None:
        self._queue.fence()  # the same tensor may have come before, under another name
        for place in self._weights.places(name)[:1]:  # the others hold the same
            self._keep(name, place.read())
        super().write(name, content)

    def undo(self) -> None:
        self._queue.fence_device()
        for name, dtype, shape, entry in reversed(self._entries):
            tensor = torch.empty(shape, dtype=dtype)
            try:
                assert self._file is not None
                self._file.read(entry, tensor_bytes(tensor).numpy().data)
            except OSError as error:
                raise StagingError(f"the journal of {name} cannot be read: {error}") from error
            self._weights.restore(name, tensor)
        self._queue.fence_device()
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._entries = None, []

    def _keep(self, name: str, old: torch.Tensor) -> None:
        """Write a tensor's old content to the journal.  Raises `StagingError` where the disk refuses."""
        content = tensor_bytes(old).numpy()
        try:
            self._file = self._file or UnnamedFile("lockstep-journal-", self._directory)
        except OSError as error:
            where = self._directory or tempfile.gettempdir()
            raise StagingError(f"the journal in {where} cannot be created: {error}") from error
        try:
            entry = self._file.append(content.data)
        except OSError as error:
            raise StagingError(f"{name} ({content.nbytes} bytes) cannot be written to the journal: {error}") from error
        self._entries.append((name, old.dtype, tuple(old.shape), entry))
