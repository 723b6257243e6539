"""`ReceiveArea`: memory into which the messages of a group come, and what tells how long a message was.

gloo does not compare the two ends of a broadcast.  A message shorter than the receiver's buffer counts as received
and leaves the rest of the buffer untouched; a longer one ends the receiving process.  So with gloo every message is
received into a larger area, and marks show afterwards how long it was:

    |<------------- announced ------------->|<----------------- slack ----------------->|
    |                            canary 16 B| 0xFF x 4096 |    (memory never touched)    |
         still there: the message was short   changed: the message was long

The slack is address space, not memory, until a message runs into it.  It must be small where a member passes messages
on, as gloo passes on whole receive areas.  Members of a group of 4 or more do, all but the last, so there messages are
probed: one member that gets its own from rank 0 and passes nothing on receives first, with all the slack, and tells the
others, which have not begun, whether it was long.  If it was, all leave the group: none of them could pass it on.

A message that is longer than the announced and the slack ends the process, and with it the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weight_sync.bucket import check_alignment
from weight_sync.errors import ContentError
from weight_sync.held_memory import Areas
from weight_sync.process_group import GroupHandle
from weight_sync.tensor_meta import TensorMeta

_SLACK = 512 << 20  # as much as trainers put into a bucket, should one arrive where a single tensor was announced
_LARGEST_FLAT_WORLD = 3  # in larger ones gloo has members pass messages on
_MARK_BYTES = 4096
_CANARY_BYTES = 16


@dataclass(frozen=True)
class Announced:
    """Tensors end to end, in one broadcast; `what` it is in errors.  Raises `WeightRequestError`."""

    what: str
    metas: Sequence[TensorMeta]
    num_bytes: int

    @classmethod
    def of(cls, what: str, metas: Sequence[TensorMeta]) -> Announced:
        return cls(what, metas, check_alignment(metas))


class ReceiveArea:
    """Memory for messages, in order.  The part that is not yet received serves as slack."""

    def __init__(
        self, group: GroupHandle, total: int, device: torch.device | str, memory: Areas, number: int = 0
    ) -> None:
        self._group = group
        self._marked = is_marked(group)
        self._probing_member = _probing_member(group.world_size) if self._marked else None
        self._has_slack = self._probing_member in (None, group.rank)
        slack = 0
        if self._marked:
            slack = max(_SLACK, total) if self._has_slack else _MARK_BYTES
        self._bytes = memory.take(number, total + slack, "cpu" if self._marked else device)
        self._total = total

    @property
    def content(self) -> torch.Tensor:
        """The bytes of all messages, uint8 [total]."""
        return self._bytes[: self._total]

    def start(self, offset: int, message: Announced, deadline: float) -> Message:
        """Take the message without waiting for it; its area must not be used until it is finished.

        Raises `TransportError`, and `ContentError` for one that another member found too long.
        """
        what = message.what
        end = offset + message.num_bytes
        content = self._bytes[offset:end]
        if not self._marked:
            work = self._group.start_broadcast(content, _left(deadline))
            return Message(self._group, work, content, what, None, None)
        canary, mark = self._set_marks(offset, end, _last_of(message.metas))
        limit = None
        if not self._has_slack:
            assert self._probing_member is not None
            limit = end + _MARK_BYTES
            if self._group.receive_number(self._probing_member, deadline):
                self._group.broken = True
                raise _too_long(what, content)
        work = self._group.start_broadcast(self._bytes[offset:limit], _left(deadline))
        return Message(self._group, work, content, what, canary, mark, reports=self._probing_member == self._group.rank)

    def _set_marks(self, offset: int, end: int, last: TensorMeta | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        mark = self._bytes[end : end + _MARK_BYTES]
        mark.fill_(0xFF)
        canary = _canary(last)
        if canary is not None:
            tail = self._bytes[max(offset, end - _CANARY_BYTES) : end]
            tail.fill_(0xFF)
            tail[-canary.numel() :] = canary
        return canary, mark


@dataclass(frozen=True)
class Message:
    """On its way into `content`, with marks at its end.  `reports`: to the other receivers, whether it was too long."""

    group: GroupHandle
    work: dist.Work
    content: torch.Tensor
    what: str
    canary: torch.Tensor | None
    mark: torch.Tensor | None
    reports: bool = False

    def finish(self, deadline: float) -> torch.Tensor:
        """Return the message's bytes, uint8 [n].  Raises `TransportError`, `ContentError`.

        Without marks the messages that were started before it have come as well.
        """
        self.group.finish(self.work, deadline)
        is_long = self.mark is not None and bool((self.mark != 0xFF).any())
        if self.reports:
            for member in range(1, self.group.world_size):
                if member != self.group.rank:
                    self.group.send_number(member, int(is_long), deadline)
            self.group.broken = self.group.broken or is_long
        if is_long:
            raise _too_long(self.what, self.content)
        if self.canary is not None and torch.equal(self.content[-self.canary.numel() :], self.canary):
            raise ContentError(f"{self.what}: the message is shorter than the {self.content.numel()} bytes announced")
        return self.content


def is_marked(group: GroupHandle) -> bool:
    """Return whether the group's messages have marks: NCCL needs equal counts on both ends."""
    return group.backend == "gloo"


def _probing_member(world_size: int) -> int | None:
    """Return the member that receives first; None where no member passes messages on.

    gloo's member v passes on to v + 2**k, for every 2**k > v: the highest power of two passes on to none, and gets its
    own from rank 0.
    """
    return None if world_size <= _LARGEST_FLAT_WORLD else 1 << ((world_size - 1).bit_length() - 1)


def _too_long(what: str, content: torch.Tensor) -> ContentError:
    return ContentError(f"{what}: the message is longer than the {content.numel()} bytes announced")


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _last_of(metas: Sequence[TensorMeta]) -> TensorMeta | None:
    """Return the last tensor that has bytes: marks are judged by it."""
    return next((meta for meta in reversed(metas) if meta.nbytes), None)


def _canary(last: TensorMeta | None) -> torch.Tensor | None:
    """Return bytes at the end of a message that no right message ends in; None where there are none.

    All bits set is NaN in every float type, and NaN is refused anyway, so one element is enough.  Integers have no such
    value: 16 random bytes, if there are as many.
    """
    if last is None or last.nbytes == 0:
        return None
    if last.dtype.is_floating_point:
        return torch.full((last.dtype.itemsize,), 0xFF, dtype=torch.uint8)
    if last.nbytes < _CANARY_BYTES:
        return None
    return torch.frombuffer(bytearray(os.urandom(_CANARY_BYTES)), dtype=torch.uint8)
