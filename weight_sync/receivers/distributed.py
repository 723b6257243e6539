"""Receives one bucket over a process group, in one of four forms:

    null                a broadcast per tensor, in list order
    flattened_bucket    one broadcast: all tensors end to end
    pieces              the same bytes, a broadcast for every few tensors (`cut_pieces` with `PIECE_BYTES`): while a
                        piece is checked and written the next ones come, into others of three areas
    packed              the same, in vLLM's buffers (`cut_packed` with the size that the call names)

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

import itertools
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weight_sync.bucket import check_alignment, cut_packed, cut_pieces
from weight_sync.bucket_layout import BucketLayout, PackedBucket
from weight_sync.errors import ContentError, TransportError, UnknownGroupError, WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.base import BucketSource, KnownCall, Receiver
from weight_sync.tensor_meta import TensorMeta, parse_metas

FLATTENED_BUCKET = "flattened_bucket"
PIECES = "pieces"
PACKED = "packed"
PIECE_BYTES = 16 << 20
"""Few enough to stay in a processor's cache from one pass to the next."""
NUM_AREAS = 3
"""One that is checked, one that fills, one that is ready for the next: with two, either side waits for the other."""

Lists = tuple[Sequence[str], Sequence[str], Sequence[Sequence[int]]]

_SLACK = 512 << 20  # as much as trainers put into a bucket, should one arrive where a single tensor was announced
_LARGEST_FLAT_WORLD = 3  # in larger ones gloo has members pass messages on
_MARK_BYTES = 4096
_CANARY_BYTES = 16
_ALIGNMENT = 64
_DRAIN_S = 5.0


class DistributedSource(BucketSource):
    """One bucket that rank 0 of a group broadcasts: `lists()` are the names, dtypes and shapes of the call.

    `key`: names the lists, such as a digest; they are read only if it is new.  None: they are read.
    A group that broke, or is out of step with its sender, is left.  `packed_bytes`: of the buffers of the form
    `packed`.
    """

    must_drain = True

    def __init__(
        self,
        lists: Callable[[], Lists],
        group_name: str,
        receiver: Receiver,
        load_format: str | None = None,
        packed_bytes: int | None = None,
        key: Hashable = None,
    ) -> None:
        self._lists = lists
        self._key = key
        self._load_format = load_format
        self._packed_bytes = packed_bytes
        self._group_name, self._groups = group_name, receiver.groups
        self._device, self._timeout_s = receiver.device, receiver.timeout_s
        self._memory = Areas() if receiver.memory is None else receiver.memory
        self._in_turns = load_format in (PIECES, PACKED) and not receiver.whole
        self._known_calls = receiver.known_calls
        self._messages: Sequence[Announced] = ()
        self._is_begun = False

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return the call's tensors.  Raises `WeightRequestError`, `UnknownGroupError`."""
        if self._key is None:
            call = self._read(max_bytes)
        else:
            key = (self._key, self._load_format, self._packed_bytes, self._in_turns, max_bytes)
            call = self._known_calls.get(key, lambda: self._read(max_bytes))
        self._messages, self.layouts = call.messages, call.layouts
        self._groups.get(self._group_name)
        return call.metas

    def _read(self, max_bytes: int) -> KnownCall:
        metas = parse_metas(*self._lists())
        total = sum(meta.nbytes for meta in metas)
        if total > max_bytes:
            raise WeightRequestError(f"the bucket has {total} bytes; one call may have at most {max_bytes}")
        messages = announced(metas, self._load_format, self._packed_bytes)
        return KnownCall(metas, layouts_of(messages, in_turns=self._in_turns), messages)

    def receive(self) -> Iterator[PackedBucket]:
        """Yield the tensors, in one or more parts.  Raises as `receive_distributed`."""
        group = self._groups.get(self._group_name)
        self._is_begun = True
        complete = False
        try:
            yield from receive_distributed(
                group, self._messages, self.layouts, self._device, self._timeout_s, self._memory
            )
            complete = True
        finally:
            if not complete:
                self._memory.close()  # a broadcast that was given up may still write into it
            if group.broken:
                self._groups.destroy(self._group_name)

    def refuse(self, reason: str) -> None:
        """Refuse the call.  If it was never received, its broadcast may be on its way all the same, and would be taken
        for what the next call announces: the group is left, which ends the wait of a sender in it at once.
        """
        if not self._is_begun:
            with suppress(UnknownGroupError):
                self._groups.destroy(self._group_name)


@dataclass(frozen=True)
class Announced:
    """Tensors end to end, in one broadcast; `what` it is in errors.  Raises `WeightRequestError`."""

    what: str
    metas: Sequence[TensorMeta]
    num_bytes: int

    @classmethod
    def of(cls, what: str, metas: Sequence[TensorMeta]) -> Announced:
        return cls(what, metas, check_alignment(metas))


def announced(metas: Sequence[TensorMeta], load_format: str | None, packed_bytes: int | None = None) -> list[Announced]:
    """Return the broadcasts of one bucket.  Raises `WeightRequestError` for one that cannot be received."""
    if load_format is None:
        return [Announced.of(meta.name, [meta]) for meta in metas]
    if load_format == FLATTENED_BUCKET:
        return [Announced.of("the bucket", metas)]
    if load_format == PIECES:
        return [Announced.of(f"piece {n}", piece) for n, piece in enumerate(cut_pieces(metas, PIECE_BYTES))]
    if load_format == PACKED and packed_bytes is not None:
        return [Announced.of(f"buffer {n}", buffer) for n, buffer in enumerate(cut_packed(metas, packed_bytes))]
    known = f"null, {FLATTENED_BUCKET!r}, {PIECES!r}, {PACKED!r} with packed_buffer_size_bytes"
    raise WeightRequestError(f"unknown load_format {load_format!r}; known: {known}")


def layouts_of(messages: Sequence[Announced], *, in_turns: bool) -> list[BucketLayout]:
    """Return the layouts of the buckets as which the messages will be delivered: one for each, or one of all."""
    dense = [[*itertools.accumulate((meta.nbytes for meta in message.metas), initial=0)] for message in messages]
    if in_turns:
        return [
            BucketLayout(message.metas, offsets[:-1], message.num_bytes)
            for message, offsets in zip(messages, dense, strict=True)
        ]
    starts = _starts(messages)
    metas = [meta for message in messages for meta in message.metas]
    return [BucketLayout(metas, [start + at for start, row in zip(starts, dense) for at in row[:-1]], starts[-1])]


def receive_distributed(
    group: GroupHandle,
    messages: Sequence[Announced],
    layouts: Sequence[BucketLayout],
    device: torch.device | str,
    timeout_s: float,
    memory: Areas | None = None,
) -> Iterator[PackedBucket]:
    """Take part in the broadcasts of one bucket, and yield them in parts of `layouts`: one for each, or one of all.

    The content is a view of `memory`, on the CPU with gloo and on `device` with NCCL, and the caller's until the next
    part is asked for.  `timeout_s` is the deadline of the whole bucket.  A caller that cannot use a part must ask for
    the others nevertheless, or the sender waits.  Raises `ContentError` when a message was shorter or longer than
    announced (the group stays usable), `TransportError` when a broadcast failed or was late (the group is broken).
    """
    deadline = time.monotonic() + timeout_s
    memory = Areas() if memory is None else memory
    if not messages:
        return
    if len(layouts) == len(messages) > 1:
        yield from _in_turns(group, messages, layouts, device, deadline, memory)
    else:
        yield PackedBucket(layouts[0], _all_at_once(group, messages, device, deadline, memory))


def _in_turns(
    group: GroupHandle,
    messages: Sequence[Announced],
    layouts: Sequence[BucketLayout],
    device: torch.device | str,
    deadline: float,
    memory: Areas,
) -> Iterator[PackedBucket]:
    """Yield message by message, with the next ones on their way."""
    drain = _Drain(deadline)
    coming: list[_Message] = []
    largest = max((message.num_bytes for message in messages), default=0)
    for number, layout in enumerate(layouts):
        for following in range(len(coming), min(number + NUM_AREAS, len(messages))):
            area = _ReceiveArea(group, largest, device, memory, following % NUM_AREAS)
            coming.append(area.start(0, messages[following], drain.deadline))
        with drain.keep_going():
            content = coming[number].finish(drain.deadline)
        if drain.wrong is None:
            yield PackedBucket(layout, content)
    drain.settle()


def _all_at_once(
    group: GroupHandle,
    messages: Sequence[Announced],
    device: torch.device | str,
    deadline: float,
    memory: Areas,
) -> torch.Tensor:
    """Receive one after the other into one area: more would save no time, as nothing is done between."""
    starts = _starts(messages)
    area = _ReceiveArea(group, starts[-1], device, memory)
    drain = _Drain(deadline)
    for offset, message in zip(starts, messages):
        with drain.keep_going():
            area.start(offset, message, drain.deadline).finish(drain.deadline)
    drain.settle()
    return area.content


def _starts(messages: Sequence[Announced]) -> list[int]:
    """Return where each message begins in the area of all, and where the area ends."""
    return [0, *itertools.accumulate(_aligned(message.num_bytes) for message in messages)]


class _Drain:
    """After a wrong message, drain the rest with a short timeout: the sender may wait in it, or there may be none.

    `wrong`: the first error.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.wrong: ContentError | None = None

    @contextmanager
    def keep_going(self) -> Iterator[None]:
        """Remember a `ContentError`.  A `TransportError` after one raises the one."""
        try:
            yield
        except ContentError as error:
            self.wrong = self.wrong or error
        except TransportError as error:
            if self.wrong is None:
                raise
            raise self.wrong from error
        if self.wrong is not None:
            self.deadline = min(self.deadline, time.monotonic() + _DRAIN_S)

    def settle(self) -> None:
        if self.wrong is not None:
            raise self.wrong


class _ReceiveArea:
    """Memory for messages, in order.  The part that is not yet received serves as slack."""

    def __init__(
        self, group: GroupHandle, total: int, device: torch.device | str, memory: Areas, number: int = 0
    ) -> None:
        self._group = group
        self._marked = group.backend == "gloo"  # NCCL needs equal counts on both ends
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

    def start(self, offset: int, message: Announced, deadline: float) -> _Message:
        """Take the message without waiting for it; its area must not be used until it is finished.

        Raises `TransportError`, and `ContentError` for one that another member found too long.
        """
        what = message.what
        end = offset + message.num_bytes
        content = self._bytes[offset:end]
        if not self._marked:
            work = self._group.start_broadcast(content, _left(deadline))
            return _Message(self._group, work, content, what, None, None)
        canary, mark = self._set_marks(offset, end, _last_of(message.metas))
        limit = None
        if not self._has_slack:
            assert self._probing_member is not None
            limit = end + _MARK_BYTES
            if self._group.receive_number(self._probing_member, deadline):
                self._group.broken = True
                raise _too_long(what, content)
        work = self._group.start_broadcast(self._bytes[offset:limit], _left(deadline))
        return _Message(
            self._group, work, content, what, canary, mark, reports=self._probing_member == self._group.rank
        )

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
class _Message:
    """On its way into `content`, with marks at its end.  `reports`: to the other receivers, whether it was too long."""

    group: GroupHandle
    work: dist.Work
    content: torch.Tensor
    what: str
    canary: torch.Tensor | None
    mark: torch.Tensor | None
    reports: bool = False

    def finish(self, deadline: float) -> torch.Tensor:
        """Return the message's bytes, uint8 [n].  Raises `TransportError`, `ContentError`."""
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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
