"""`WeightUpdate`: one weight version on its way to a fleet, as a context manager.

with sender.update("7") as update:        begin on all engines
    update.send(named_tensors)            any number of buckets
                                          verify on all, commit on all; on any error: abort, never end
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from weight_sync.bucket import pack
from weight_sync.errors import TransactionStateError
from weight_sync.sender.fleet import Fleet
from weight_sync.sender.link import Bucket, split_pieces
from weight_sync.sender.report import EngineReport
from weight_sync.tensor_meta import TensorMeta

Progress = Callable[[int, int], None]


class WeightUpdate:
    """`fields`: of begin, `update_id` among them.  `num_bytes`: how many will be sent, for `progress(done, total)`.

    None: not known.
    """

    def __init__(
        self,
        fleet: Fleet,
        device: torch.device,
        fields: dict[str, Any],
        num_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._fleet = fleet
        self._device = device
        self._fields = fields
        self._num_bytes = num_bytes
        self._progress = progress
        self._pending: Bucket | None = None
        self._is_open = False
        self.bytes_sent = 0
        self.buckets_sent = 0

    @property
    def engines(self) -> dict[str, EngineReport]:
        """By engine name; final after the block."""
        return self._fleet.reports

    def __enter__(self) -> WeightUpdate:
        self._is_open = True
        try:
            self._fleet.begin(**self._fields)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave(error)
            return
        try:
            pending, self._pending = self._pending, None
            self._finish(pending)
            self._fleet.end()
        except BaseException as failure:
            self._leave(failure)
            raise
        self._leave(None)  # engines that were left out hold their transaction still

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send one bucket of tensors in the engine's dtype, on any device.  A copy is sent: they may change afterwards.

        Returns when the bucket before is there, with this one on its way.  Raises `EngineError`, `WeightRequestError`.
        """
        named = [(name, tensor.detach()) for name, tensor in named_tensors]
        named.sort(key=lambda item: -item[1].dtype.itemsize)  # so that it can be packed
        metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        self.send_bucket(Bucket(metas, split_pieces(metas, pack(named).to(self._device))))

    def send_bucket(self, bucket: Bucket) -> None:
        """As `send`; what `bucket.pieces` hold must not change until the next call returns."""
        if not self._is_open:
            raise TransactionStateError("the weight update is over, or was never entered")
        self._fleet.await_begun()
        self._fleet.start(bucket, self._fields["weight_version"])  # it waits there for the end of the one before
        before, self._pending = self._pending, bucket
        self._finish(before)

    def _finish(self, bucket: Bucket | None) -> None:
        """The oldest on its way."""
        if bucket is None:
            return
        self._fleet.finish()
        self.bytes_sent += bucket.num_bytes
        self.buckets_sent += 1
        if self._progress is not None:
            self._progress(self.bytes_sent, self.bytes_sent if self._num_bytes is None else self._num_bytes)

    def _leave(self, error: BaseException | None) -> None:
        self._is_open = False
        self._fleet.abort(error)
