"""Receives one bucket that lies in memory of its sender, which this process maps: `pieces`, end to end from byte 0 on.

    the sender    packs piece n, and broadcasts a notice of it         packs piece n + 1 ...
    this rank                  takes the notice, and reads piece n where it lies ...

No notice comes of pieces that are there when the bucket is announced.

Nothing is copied on the way: a piece is written from the sender's memory to where its tensors live, in one pass.  A
notice has 24 bytes, and names the memory.  It comes over the group of both, which has the deadlines, and tells when
either side is lost.

The sender must leave the memory alone until the call was answered.  The engine cannot forbid it to write: it trusts the
content as it trusts that of a broadcast, and it trusts no size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.base import Receiver
from weight_sync.receivers.distributed import PIECES, DistributedSource, received_in_turns
from weight_sync.receivers.receive_area import Announced
from weight_sync.sealed_memory import MemoryAddress
from weight_sync.tensor_meta import BucketLayout, Lists, PackedBucket, TensorMeta

_NOTICE = [TensorMeta("notice", torch.int64, (3,))]


def notice_of(address: MemoryAddress, start: int, num_bytes: int) -> torch.Tensor:
    """Return the notice that a piece is in this memory, uint8 [24].

    Two senders may use one group name, one after the other: no notice stands for memory of another sender.
    """
    return torch.tensor([address.inode, start, num_bytes], dtype=torch.int64).view(torch.uint8)


class MemorySource(DistributedSource):
    """One bucket at `address`, whose notices rank 0 of a group broadcasts: see `DistributedSource`.

    `filled`: the bytes of the first pieces, of which none comes.
    """

    def __init__(
        self,
        address: MemoryAddress,
        lists: Callable[[], Lists],
        group_name: str,
        receiver: Receiver,
        key: Hashable = None,
        filled: int = 0,
    ) -> None:
        super().__init__(lists, group_name, receiver, PIECES, key=key)
        self._filled, self._num_filled = filled, 0
        # Before its tensors are known: of a bucket that fills its memory no notice comes.
        self._awaits_notices = filled < address.num_bytes
        self._address = address
        self._content = torch.empty(0, dtype=torch.uint8)

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return the call's tensors, with the memory mapped.  Raises `WeightRequestError`, `UnknownGroupError`."""
        metas = super().announce(max_bytes)
        self._awaits_notices = True  # unless the numbers of the call agree
        total = sum(message.num_bytes for message in self._messages)
        if total > self._address.num_bytes:
            raise WeightRequestError(f"the bucket has {total} bytes, and its memory {self._address.num_bytes}")
        group = self._groups.get(self._group_name)
        if group.backend != "gloo":
            raise WeightRequestError(f"the group is one of {group.backend}; notices of memory come over gloo")
        starts = list(itertools.accumulate((message.num_bytes for message in self._messages), initial=0))
        if self._filled not in starts:
            raise WeightRequestError(f"of the bucket's {total} bytes {self._filled} are filled, where no piece ends")
        self._num_filled = sum(start < self._filled for start in starts)
        self._awaits_notices = self._num_filled < len(self._messages)
        if total:
            self._content = group.memories.content(self._address)[:total]
        return metas

    def _layouts_of(self, messages: Sequence[Announced]) -> list[BucketLayout]:
        if self._in_turns:
            return super()._layouts_of(messages)
        metas = [meta for message in messages for meta in message.metas]
        *offsets, total = itertools.accumulate((meta.nbytes for meta in metas), initial=0)
        return [BucketLayout(metas, offsets, total)]

    def refuse(self, reason: str) -> None:
        """Refuse the call.  The group is left if notices of it may be on their way, and were not taken."""
        if self._awaits_notices:
            super().refuse(reason)

    def _parts(self, group: GroupHandle) -> Iterator[PackedBucket]:
        """Yield each piece once it is there; all of them together if nothing may come before the rest."""
        awaited = [Announced.of(f"the notice of {piece.what}", _NOTICE) for piece in self._messages[self._num_filled :]]
        deadline = time.monotonic() + self._timeout_s
        notices = received_in_turns(group, awaited, "cpu", deadline, self._memory)
        stops = itertools.accumulate(piece.num_bytes for piece in self._messages)
        for number, (piece, stop) in enumerate(zip(self._messages, stops)):
            start = stop - piece.num_bytes
            if number >= self._num_filled:
                _check(next(notices), piece, start, self._address, group)
            if self._in_turns:
                yield PackedBucket(self.layouts[number], self._content[start:stop])
        if self._messages and not self._in_turns:
            yield PackedBucket(self.layouts[0], self._content)


def _check(notice: torch.Tensor, piece: Announced, start: int, address: MemoryAddress, group: GroupHandle) -> None:
    """Raise `ContentError` for a notice of anything else than this piece, after which the group is of no use."""
    if not torch.equal(notice, notice_of(address, start, piece.num_bytes)):
        group.broken = True  # what comes next is not what is waited for
        inode, *stated = notice.view(torch.int64).tolist()
        came = f"{stated}" if inode == address.inode else f"{stated} of other memory"
        raise ContentError(
            f"{piece.what}: a notice of {piece.num_bytes} bytes from {start} on was announced, and {came} came"
        )
