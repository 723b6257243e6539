"""Tensors from a checkpoint folder on disk.

    headers -> known by their digest, or parsed and checked -> content, read in parts of a file, each a `PackedBucket`

Everything that can be known without the content is checked first: the index, every header, names, shapes, dtypes, and
that nothing is missing.  A folder that `/pull_weights` keeps is locked against a pull meanwhile.

Files are read, not mapped: a mapped file that another process truncates kills the reader.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from weight_sync.checkpoint_folder import CheckpointFolder, RawFolder, files_in_index, read_folder
from weight_sync.delta.durable import locked
from weight_sync.delta.local_state import LOCK_FILE, SYNC_FOLDER, LocalVersion, require_settled
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.known_calls import KnownCalls
from weight_sync.ledger import WeightLedger
from weight_sync.paired_wire import keeps, whole_metas, with_other_parts
from weight_sync.receivers.base import BucketSource, KnownCall
from weight_sync.safetensors_file import FileTensor, SafetensorsFile, open_regular, read_into
from weight_sync.splitting import split_wire
from weight_sync.stored_tensors import PART_BYTES
from weight_sync.tensor_meta import BucketLayout, LogicalWeights, PackedBucket, TensorMeta


class FilePart(NamedTuple):
    """Neighbours in file number `file`, from byte `start` on."""

    file: int
    start: int


class DiskSource(BucketSource):
    """The checkpoint in `path`.

    `complete`: it must hold every tensor of the model, once.  `names`: take only these, and other parts of their
    weights.

    Tensors are delivered as they are, and floating-point ones cast to the model's dtype, as at start.  `timeout_s`: how
    long to wait for a pull into the folder.  `version`: of a folder that `/pull_weights` keeps, what must be in it.
    `known_calls`: of the same weights; a folder whose headers are known is not parsed.  `file`: take the
    tensors of this file alone.  `further`: weights with other names, of which the folder may have tensors.
    """

    casts = True

    def __init__(
        self,
        path: Path,
        weights: LogicalWeights,
        *,
        complete: bool,
        timeout_s: float,
        known_calls: KnownCalls[KnownCall],
        names: Collection[str] | None = None,
        version: int | None = None,
        file: str | None = None,
        further: LogicalWeights | None = None,
    ) -> None:
        self._path, self._file = path, file
        self._names, self._version = names, version
        self._weights = weights
        self._further = further
        self._complete = complete
        self._timeout_s = timeout_s
        self._known_calls = known_calls
        self._folder: RawFolder | None = None
        self._parts: Sequence[FilePart] = ()
        self._lock = ExitStack()
        self.local_version: LocalVersion | None = None  # of a folder that `/pull_weights` keeps, once announced

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return every tensor of the folder of which the model keeps something.

        Raises `WeightRequestError` and its kinds, `TransactionStateError` (a pull is under way, or was cut off),
        `TransportError`.
        """
        try:
            self._hold()
            folder = self._folder = read_folder(self._path, self._files_in_index, self._file)
            names = None if self._names is None else frozenset(self._names)
            key = ("folder", folder.digest, self._complete, names, max_bytes, self._file, self._further)
            call = self._known_calls.get(key, lambda: self._parse(folder.parse(), max_bytes))
        except BaseException:
            self._lock.close()
            raise
        self._parts, self.layouts = call.messages, call.layouts
        return call.metas

    def _files_in_index(self, index: bytes) -> Sequence[str]:
        """Return the files that an index lists; one that is known is not parsed."""
        key = ("index", hashlib.sha256(index).digest())
        call = self._known_calls.get(key, lambda: KnownCall((), (), files_in_index(self._path, index)))
        return call.messages

    def _parse(self, folder: CheckpointFolder, max_bytes: int) -> KnownCall:
        metas, wanted = folder.metas, None if self._names is None else with_other_parts(self._names)
        theirs = [] if self._further is None else [meta for meta in metas if keeps(self._further, meta)]
        others = {meta.name for meta in theirs}
        metas = [meta for meta in metas if meta.name not in others and (wanted is None or meta.name in wanted)]
        kept, total = check_against_model(self._weights, metas, complete=self._complete)
        if self._further is not None:
            more, more_bytes = check_against_model(self._further, theirs, complete=False)
            kept, total = [*kept, *more], total + more_bytes
        if total > max_bytes:
            raise WeightRequestError(f"{self._path} has {total} bytes of tensors; at most {max_bytes} are taken")
        names = {meta.name for meta in kept}
        found = [(number, part) for number, file in enumerate(folder.files) for part in _parts_of(file, names)]
        parts = [FilePart(number, part[0].start) for number, part in found]
        return KnownCall(kept, [_layout_of(part) for _, part in found], parts)

    def receive(self) -> Iterator[PackedBucket]:
        """Yield the parts of the files.  Raises `ContentError` (a file became shorter or changed), `TransportError`."""
        assert self._folder is not None, "announce comes first"
        memory = Areas()
        largest = max((layout.num_bytes for layout in self.layouts), default=0)
        in_files = itertools.groupby(zip(self._parts, self.layouts, strict=True), lambda found: found[0].file)
        with self._lock:
            area = memory.take(0, largest, "cpu")
            for number, parts in in_files:
                path = self._folder.headers[number].path
                with open_regular(path) as file:
                    for part, layout in parts:
                        content = area[: layout.num_bytes]
                        read_into(file, path, part.start, content)
                        yield PackedBucket(layout, content)
            self._folder.require_unchanged()

    def close(self) -> None:
        """Unlock the folder where its content was not received."""
        self._lock.close()

    def _hold(self) -> None:
        lock = self._path / SYNC_FOLDER / LOCK_FILE
        if lock.exists():
            try:
                self._lock.enter_context(locked(lock, shared=True, timeout_s=self._timeout_s))
            except OSError as error:
                raise TransportError(f"{lock} cannot be locked: {error.strerror}") from None
            self.local_version = require_settled(self._path)
        found = None if self.local_version is None else self.local_version.version
        if self._version not in (None, found):
            raise TransactionStateError(
                f"{self._path} is at version {found}, not {self._version}, because another pull changed it"
            )


def check_against_model(
    weights: LogicalWeights, metas: Sequence[TensorMeta], *, complete: bool = True
) -> tuple[list[TensorMeta], int]:
    """Return the tensors of which the model keeps something, if all fit it; and how many bytes it will hold of them.

    Raises `UnknownTensorError`, `ShapeMismatchError`, `DtypeMismatchError` (a cast that is not between floating-point
    types), `CoverageError` (repeated, a part missing or, if `complete`, missing).
    """
    values, ledger, num_bytes = whole_metas(weights, metas), WeightLedger(weights.metas()), 0
    ignored = set()
    for meta, pieces in zip(values, split_wire(weights, values, cast=True), strict=True):
        if not pieces:
            ignored.add(meta.name)
        for piece in pieces:
            ledger.record(meta.name, piece.name)
            num_bytes += weights.metas()[piece.name].nbytes
    if complete:
        ledger.settle()
    return [meta for meta in metas if meta.name not in ignored], num_bytes


def _parts_of(file: SafetensorsFile, names: Collection[str]) -> Iterator[list[FileTensor]]:
    """Yield the tensors of these names in parts: neighbours of at most `PART_BYTES`, or one tensor."""
    part: list[FileTensor] = []
    for tensor in file.tensors:
        if tensor.meta.name not in names:
            continue
        if part and not (tensor.start == part[-1].end and tensor.end - part[0].start <= PART_BYTES):
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part


def _layout_of(part: Sequence[FileTensor]) -> BucketLayout:
    start = part[0].start
    return BucketLayout(
        [tensor.meta for tensor in part], [tensor.start - start for tensor in part], part[-1].end - start
    )
