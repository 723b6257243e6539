"""`SharedChannel`: one inbox and one clock for all ranks of an engine.

    main ---> tp rank 0 --- one broadcast a tick: time, what it serves, messages ---> the other ranks

What arrives is acted upon by all ranks in the same tick and in the same order; whatever depends on time goes by `now`.
A rank that serves anything else than rank 0 ends the engine before it acts on anything.
Only the first attention-TP rank of each data-parallel rank answers.

Knows how messages are shared.  Does not know what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import torch

from rollout.core.errors import FatalError
from rollout.core.io_struct import SchedulerInput, SchedulerOutput
from rollout.distributed.parallel import Parallel
from rollout.scheduler.channel import RawChannel, decode

_HEADER = struct.Struct("<dQq")  # the time, the mark of what is served, the bytes that follow
_INLINE_BYTES = 4096  # messages up to this size travel with the header


class SharedChannel:
    """Over the channel of this rank's own process, from which only rank 0 receives.

    `serves()`: the mark of the serving epoch, below 2^64.
    """

    def __init__(self, inner: RawChannel, parallel: Parallel, serves: Callable[[], int]) -> None:
        self._inner = inner
        self._serves = serves
        self._rank = parallel.position.world_rank
        self._tp = parallel.tp
        self._speaks = parallel.position.is_dp_leader
        self._owns_inbox = parallel.position.is_tp_leader
        self._buffer = torch.zeros(_HEADER.size + _INLINE_BYTES, dtype=torch.uint8)
        self._now = inner.now

    @property
    def now(self) -> float:
        return self._now

    def receive(self, timeout_ms: int) -> list[SchedulerInput]:
        """Waits on rank 0 for a message, on the others for rank 0.

        Raises `RankLostError`, and `FatalError` where this rank and rank 0 serve different epochs.
        """
        body = b""
        if self._owns_inbox:
            messages = self._inner.receive_raw(timeout_ms)
            body = msgspec.msgpack.encode(messages) if messages else b""
            self._write(_HEADER.pack(self._inner.now, self._serves(), len(body)) + body[:_INLINE_BYTES])
        self._tp.broadcast(self._buffer)
        header = self._buffer[: _HEADER.size].numpy().tobytes()
        self._now, served, size = _HEADER.unpack(header)
        if served != self._serves():
            raise FatalError(
                f"rank {self._rank} serves other weights, or experts in other places, than the first rank of its engine"
            )
        if size == 0:
            return []
        if size > _INLINE_BYTES:
            body = self._share_long(body, size)
        else:
            body = self._buffer[_HEADER.size : _HEADER.size + size].numpy().tobytes()
        return [decode(data) for data in msgspec.msgpack.decode(body, type=list[bytes])]

    def send(self, message: SchedulerOutput) -> None:
        if self._speaks:
            self._inner.send(message)

    def wake(self) -> None:
        self._inner.wake()

    def _write(self, data: bytes) -> None:
        self._buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _share_long(self, body: bytes, size: int) -> bytes:
        whole = torch.empty(size, dtype=torch.uint8)
        if self._owns_inbox:
            whole.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        self._tp.broadcast(whole)
        return whole.numpy().tobytes()
