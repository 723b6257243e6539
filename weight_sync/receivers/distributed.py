"""Receives one bucket over a process group, in one of four forms:

    null                a broadcast per tensor, in list order
    flattened_bucket    one broadcast: all tensors end to end
    pieces              the same bytes, a broadcast for every few tensors (`cut_pieces` with `PIECE_BYTES`): while a
                        piece is checked and written the next ones come, into others of three areas
    packed              the same, in vLLM's buffers (`cut_packed` with the size that the call names)

Messages of one call are started ahead of the one that is waited for (`_received`).  Over NCCL they are started in
two batches, of `WINDOW_BYTES` together.  NCCL ends them in their order, so one wait for the last of a batch is enough.
Over gloo each needs a `ReceiveArea` in which no other message is on its way, so as many are started as there are areas.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from weight_sync.bucket import cut_packed, cut_pieces
from weight_sync.errors import ContentError, TransportError, UnknownGroupError, WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.base import BucketSource, KnownCall, Receiver
from weight_sync.receivers.receive_area import Announced, Message, ReceiveArea, is_marked
from weight_sync.stored_tensors import aligned
from weight_sync.tensor_meta import BucketLayout, Lists, PackedBucket, TensorMeta, parse_metas

FLATTENED_BUCKET = "flattened_bucket"
PIECES = "pieces"
PACKED = "packed"
PIECE_BYTES = 16 << 20
"""Few enough to stay in a processor's cache from one pass to the next."""
NUM_AREAS = 3
"""One that is checked, one that fills, one that is ready for the next: with two, either side waits for the other."""
WINDOW_BYTES = 256 << 20
"""Bounds the messages without marks that are on their way at once; larger messages are up to `NUM_BATCHES`."""
WINDOW_MESSAGES = 256
"""A message is a kernel.  CUDA queues about a thousand, and a call that finds the queue full waits without an end."""
NUM_BATCHES = 2
"""In a window: one that is waited for, and one that comes next."""


class RankShare(NamedTuple):
    """The tensors of a call that are rank `rank`'s, of `ranks`: `counts` of them for each rank, in their order."""

    rank: int
    ranks: int
    counts: tuple[int, ...]

    def of(self, metas: Sequence[TensorMeta]) -> Sequence[TensorMeta]:
        """Return this rank's tensors.  Raises `WeightRequestError` where the counts do not fit them."""
        if len(self.counts) != self.ranks or sum(self.counts) != len(metas):
            raise WeightRequestError(
                f"tensors_per_rank has {len(self.counts)} counts of {sum(self.counts)} tensors, "
                f"and the call {len(metas)} tensors for {self.ranks} ranks"
            )
        start = sum(self.counts[: self.rank])
        return metas[start : start + self.counts[self.rank]]


_DRAIN_S = 5.0


class DistributedSource(BucketSource):
    """One bucket that rank 0 of a group broadcasts: `lists()` are the names, dtypes, shapes and boxes of the call.

    `key`: names the lists, such as a digest; they are read only if it is new.  None: they are read.  `share`: the ones
    that come to this rank, in a group of its own; None: all.
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
        share: RankShare | None = None,
    ) -> None:
        self._lists = lists
        self._share = share
        self.is_per_rank = share is not None
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
            key = (type(self), self._key, self._load_format, self._packed_bytes, self._in_turns, max_bytes)
            call = self._known_calls.get(key, lambda: self._read(max_bytes))
        self._messages, self.layouts = call.messages, call.layouts
        self._groups.get(self._group_name)
        return call.metas

    def _read(self, max_bytes: int) -> KnownCall:
        """Return the call, as its lists describe it.  Raises `WeightRequestError`."""
        metas: Sequence[TensorMeta] = parse_metas(*self._lists())
        metas = metas if self._share is None else self._share.of(metas)
        total = sum(meta.nbytes for meta in metas)
        if total > max_bytes:
            raise WeightRequestError(f"the bucket has {total} bytes; one call may have at most {max_bytes}")
        messages = announced(metas, self._load_format, self._packed_bytes)
        return KnownCall(metas, self._layouts_of(messages), messages)

    def _layouts_of(self, messages: Sequence[Announced]) -> list[BucketLayout]:
        return layouts_of(messages, in_turns=self._in_turns)

    def receive(self) -> Iterator[PackedBucket]:
        """Yield the tensors, in one or more parts.  Raises as `receive_distributed`."""
        group = self._groups.get(self._group_name)
        self._is_begun = True
        complete = False
        try:
            yield from self._parts(group)
            complete = True
        finally:
            if not complete:
                self._memory.close()  # a broadcast that was given up may still write into it
            if group.broken:
                self._groups.destroy(self._group_name)

    def _parts(self, group: GroupHandle) -> Iterator[PackedBucket]:
        return receive_distributed(group, self._messages, self.layouts, self._device, self._timeout_s, self._memory)

    def refuse(self, reason: str) -> None:
        """Refuse the call.  If it was never received, its broadcast may be on its way all the same, and would be taken
        for what the next call announces: the group is left, which ends the wait of a sender in it at once.
        """
        if not self._is_begun:
            with suppress(UnknownGroupError):
                self._groups.destroy(self._group_name)


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
    for content, layout in zip(received_in_turns(group, messages, device, deadline, memory), layouts):
        yield PackedBucket(layout, content)


def received_in_turns(
    group: GroupHandle, messages: Sequence[Announced], device: torch.device | str, deadline: float, memory: Areas
) -> Iterator[torch.Tensor]:
    """Yield the content of message by message, the caller's until the next one is asked for, as `receive_distributed`.

    Raises as that.
    """
    largest = max((message.num_bytes for message in messages), default=0)
    areas = [ReceiveArea(group, largest, device, memory, number) for number in range(min(NUM_AREAS, len(messages)))]
    batches = [[_Start(areas[number % NUM_AREAS], 0, message)] for number, message in enumerate(messages)]
    return _received(group, batches, NUM_AREAS, deadline)


def _all_at_once(
    group: GroupHandle,
    messages: Sequence[Announced],
    device: torch.device | str,
    deadline: float,
    memory: Areas,
) -> torch.Tensor:
    """Receive all into one area.  With marks one after the other: they lie where the next message comes."""
    offsets = _starts(messages)
    area = ReceiveArea(group, offsets[-1], device, memory)
    starts = [_Start(area, offset, message) for offset, message in zip(offsets, messages)]
    batches, ahead = ([[start] for start in starts], 1) if is_marked(group) else (_batches(starts), NUM_BATCHES)
    for _ in _received(group, batches, ahead, deadline):
        pass
    return area.content


class _Start(NamedTuple):
    """A message that will come into `area`, at byte `offset`."""

    area: ReceiveArea
    offset: int
    message: Announced


def _batches(starts: Sequence[_Start]) -> list[list[_Start]]:
    """Return the messages in runs of which `NUM_BATCHES` fill the window; a larger message is a run of its own."""
    batches: list[list[_Start]] = []
    room = 0
    for start in starts:
        num_bytes = start.message.num_bytes
        if not batches or num_bytes > room or len(batches[-1]) == WINDOW_MESSAGES // NUM_BATCHES:
            batches.append([])
            room = WINDOW_BYTES // NUM_BATCHES
        batches[-1].append(start)
        room -= num_bytes
    return batches


def _received(
    group: GroupHandle, batches: Sequence[Sequence[_Start]], ahead: int, deadline: float
) -> Iterator[torch.Tensor]:
    """Receive batch after batch, with up to `ahead` of them on their way; yield the content of each one's last message.

    After a wrong message the rest is received and not yielded, and the error raised at the end.
    """
    drain = _Drain(deadline)
    waiting, coming = iter(batches), deque[Message]()
    for _ in batches:
        with drain.keep_going():
            for batch in itertools.islice(waiting, ahead - len(coming)):
                coming.append([area.start(at, message, drain.deadline) for area, at, message in batch][-1])
            content = coming.popleft().finish(drain.deadline)
        if drain.wrong is None:
            yield content
        elif group.broken:
            break
    drain.settle()


def _starts(messages: Sequence[Announced]) -> list[int]:
    """Return where each message begins in the area of all, and where the area ends."""
    return [0, *itertools.accumulate(aligned(message.num_bytes) for message in messages)]


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
