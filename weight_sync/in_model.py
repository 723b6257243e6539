"""Staging for machines without memory for a second copy: tensors are written into the model as they come.

No step may run from the first write to the end of the transaction.  A planned bucket is read twice: it is checked
whole, and then written.

    JournalStaging    the old content of a storage goes to a file before it is first written to; `undo` writes it back
    InPlaceStaging    nothing is kept; `undo` raises once a write has begun, of a tensor or of a part of one

    ApartStaging      the same ways into storages that nothing reads before the commit: steps run on
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from weight_sync.errors import StagingError
from weight_sync.held_memory import Areas
from weight_sync.homes import Homes, address_of, bytes_of
from weight_sync.plan import BucketPlan
from weight_sync.staging import Accept, Content, DeviceQueue, DirectSink, QueuedStaging
from weight_sync.tensor_meta import LogicalWeights, Part
from weight_sync.unnamed_file import Entry, UnnamedFile

_PART_BYTES = 64 << 20
"""The part of a storage that is journaled at a time."""


class _InModelStaging(QueuedStaging, DirectSink):
    """The base of these stagings: a commit has nothing left to do but to wait."""

    _is_begun = False

    def write(self, name: str, content: Content) -> None:
        self._begin()
        self._before([place.storage for place in self._homes.places(name)], [name])
        self._queue.put(lambda: super(_InModelStaging, self).write(name, content))

    def write_spans(self, plan: BucketPlan, content: torch.Tensor, accept: Accept) -> None:
        storages, source = [bytes_of(storage) for storage in plan.storages], self._spans.bring(content)
        self._spans.find(lambda: plan.take(source, storages, writes=False), accept)
        self._begin()
        self._before(plan.storages, plan.all_names)
        self._queue.put(functools.partial(plan.take, source, storages, checks=False))

    def read(self, name: str) -> Sequence[Part]:
        self._queue.fence()
        return super().read(name)

    def prepare(self) -> None:
        """Do nothing: nothing can be done ahead."""

    def commit(self) -> None:
        """Wait for the device: everything is in place then."""
        self._queue.fence_device()

    def close(self) -> None:
        self._memory.end()

    def _begin(self) -> None:
        if not self._is_begun:
            self._queue.fence_device()  # the last step has read the old content
            self._is_begun = True

    def _before(self, storages: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Prepare for writes of these tensors, or of parts of them, into these storages."""


class InPlaceStaging(_InModelStaging):
    """Writes straight through.

    A write counts from its beginning, of a whole tensor or of a part.  It counts also on a rank that holds none of what
    came: the other ranks have overwritten theirs.
    """

    num_bytes = 0

    _has_written = False

    @property
    def dirty(self) -> bool:
        return self._has_written

    def undo(self) -> None:
        if self._has_written:
            raise StagingError("tensors were overwritten in place")
        self.close()

    def close(self) -> None:
        super().close()
        self._has_written = False

    def _before(self, storages: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._has_written |= bool(storages or names)


class Apart(NamedTuple):
    """The way of content that lies apart from the model to the place where it will serve.

    `ready()`, on the I/O thread of each rank, raises what keeps the content from serving.  `write()`, on the thread of
    steps, puts it where nothing reads it until the owner of that place publishes it, after the commit.
    `undo()` puts back what was there before a `write`, also before one that raised, and lets go of the content.
    """

    ready: Callable[[], None]
    write: Callable[[], None]
    undo: Callable[[], None]


class ApartStaging(_InModelStaging):
    """Writes into storages that nothing reads before the commit: until then there is nothing to undo."""

    num_bytes, dirty = 0, False

    def __init__(self, weights: LogicalWeights, apart: Apart, homes: Homes | None = None) -> None:
        super().__init__(weights, homes=homes)
        self._apart = apart

    def prepare(self) -> None:
        self._apart.ready()

    def commit(self) -> None:
        self._apart.write()

    def undo(self) -> None:
        self.close()
        self._apart.undo()


class JournalStaging(_InModelStaging):
    """`directory`: where the unnamed file lies, None for the system's temporary directory.  It grows to the size of the
    storages that are written to; a directory in memory (tmpfs) saves nothing.

    A tensor is not written where the old content of its storage cannot be kept, as the disk is full: `StagingError`.
    """

    def __init__(
        self,
        weights: LogicalWeights,
        directory: str | None = None,
        queue: DeviceQueue | None = None,
        memory: Areas | None = None,
        homes: Homes | None = None,
    ) -> None:
        super().__init__(weights, queue, memory, homes)
        self._directory = directory
        self._file: UnnamedFile | None = None
        self._kept: dict[int, list[tuple[torch.Tensor, Entry]]] = {}  # by storage: parts of it, and their old bytes

    @property
    def dirty(self) -> bool:
        return self._file is not None

    @property
    def num_bytes(self) -> int:
        return 0 if self._file is None else self._file.num_bytes

    def undo(self) -> None:
        self._queue.fence_device()
        for part, entry in (kept for parts in self._kept.values() for kept in parts):
            old = torch.empty(part.numel(), dtype=torch.uint8)
            try:
                assert self._file is not None
                self._file.read(entry, old.numpy().data)
            except OSError as error:
                raise StagingError(f"the journal cannot be read: {error}") from error
            part.copy_(old)
        self._queue.fence_device()
        self.close()

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()
        self._file, self._kept = None, {}

    def _before(self, storages: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Keep the old content of storages that were not written to.  Raises `StagingError` where the disk refuses."""
        for storage in storages:
            if address_of(storage) not in self._kept:
                try:
                    self._keep(bytes_of(storage))
                except OSError as error:
                    what, size = ", ".join(names[:1]), storage.untyped_storage().nbytes()
                    raise StagingError(
                        f"the storage of {what} ({size} bytes) cannot be written to the journal: {error}"
                    ) from error

    def _keep(self, live: torch.Tensor) -> None:
        if self._file is None:
            self._file = self._create()
        kept = self._kept.setdefault(live.data_ptr(), [])
        for part in live.split(_PART_BYTES):
            kept.append((part, self._file.append(part.cpu().numpy().data)))

    def _create(self) -> UnnamedFile:
        try:
            return UnnamedFile("lockstep-journal-", self._directory)
        except OSError as error:
            where = self._directory or tempfile.gettempdir()
            raise StagingError(f"the journal in {where} cannot be created: {error}") from error
