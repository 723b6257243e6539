"""Tensors from a checkpoint folder on disk.

Everything that can be known without the content is checked first: the index, every header, names, shapes, dtypes, and
that nothing is missing.  A folder that `/pull_weights` keeps is locked against a pull meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from weight_sync.checkpoint_folder import CheckpointFolder, open_checkpoint_folder
from weight_sync.delta.durable import locked
from weight_sync.delta.local_state import LOCK_FILE, SYNC_FOLDER, LocalVersion, require_settled
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.fp8_wire import whole_metas, with_other_halves
from weight_sync.ledger import WeightLedger
from weight_sync.receivers.base import BucketSource
from weight_sync.splitting import split_wire
from weight_sync.tensor_meta import LogicalWeights, TensorMeta


class DiskSource(BucketSource):
    """The checkpoint in `path`.

    `complete`: it must hold every tensor of the model, once.  `names`: take only these, and other halves of FP8 pairs.

    Tensors are delivered as they are, and floating-point ones cast to the model's dtype, as at start.  `timeout_s`: how
    long to wait for a pull into the folder.  `version`: of a folder that `/pull_weights` keeps, what must be in it.
    """

    casts = True

    def __init__(
        self,
        path: Path,
        weights: LogicalWeights,
        *,
        complete: bool,
        timeout_s: float,
        names: Collection[str] | None = None,
        version: int | None = None,
    ) -> None:
        self._path = path
        self._names, self._version = names, version
        self._weights = weights
        self._complete = complete
        self._timeout_s = timeout_s
        self._folder: CheckpointFolder | None = None
        self._lock = ExitStack()
        self.local_version: LocalVersion | None = None  # of a folder that `/pull_weights` keeps, once announced

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return every tensor of the folder of which the model keeps something.

        Raises `WeightRequestError` and its kinds, `TransactionStateError` (a pull is under way, or was cut off),
        `TransportError`.
        """
        try:
            self._hold()
            self._folder = open_checkpoint_folder(self._path)
            if self._names is not None:
                self._folder = self._folder.only(with_other_halves(self._names))
            metas, total = check_against_model(self._weights, self._folder.metas, complete=self._complete)
            self._folder = self._folder.only({meta.name for meta in metas})
            if total > max_bytes:
                raise WeightRequestError(f"{self._path} has {total} bytes of tensors; at most {max_bytes} are taken")
        except BaseException:
            self._lock.close()
            raise
        return metas

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        """Yield a bucket a tensor.  Raises `ContentError` (a file became shorter, or changed), `TransportError`."""
        assert self._folder is not None, "announce comes first"
        with self._lock:
            for named in self._folder.read():
                yield [named]

    def close(self) -> None:
        """Unlock the folder where its content was not received."""
        self._lock.close()

    def _hold(self) -> None:
        lock = self._path / SYNC_FOLDER / LOCK_FILE
        if not lock.exists():
            return
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
    types), `CoverageError` (repeated, half a pair or, if `complete`, missing).
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
