"""`ShadowStaging`: a full second copy of what a refresh touches, in the layout in which it will serve.

    write      each tensor is written into the shadow of its storage, as it would be into the model
    prepare    what was not sent is filled in, so that the shadow is the whole new content
    commit     live and shadow are swapped, and again in `undo`

They are swapped page by page where the system can move pages (`pages`), which takes milliseconds whatever the size.
What is left, edges, small storages and other devices, is exchanged by exclusive or:

    prepare    shadow ^= live     during running steps
    commit     live ^= shadow     one pass, as long as a copy
    undo       live ^= shadow     again; a sum of the old words, taken in `prepare`, proves that they are back

Where the weights lie on a device, tensors are folded as they are written: shadow = new ^ live, and 0 where nothing was
sent.  So `prepare` has only to take the sum, and where the shadow lies in host memory each byte crosses the bus twice,
out at the write and back at the commit.  Nothing else changes the weights while an update is open.

Only `commit` stalls the steps.  Memory: the bytes of every storage that the refresh touches (a full refresh: the
model's, padding and replicas included), in host memory or on the weights' device.  On a device folding takes nothing
for a planned bucket, and as much as the tensor for one that comes by itself.

What is written and exchanged is given to a `DeviceQueue`.  On a GPU the exchange of `device` moves three bytes of its
memory for each byte of weights (two read, one written), that of `host` one over the bus.  It cannot be
fewer: until the vote the memory of two copies must yield the old content and the new, so a commit has to read what it
overwrites.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import torch

from weight_sync.errors import StagingError
from weight_sync.exchanges import fold, word_sums
from weight_sync.fingerprint_words import SIGNED
from weight_sync.held_memory import Areas
from weight_sync.homes import Homes, address_of, bytes_of
from weight_sync.pages import PageTrader, tradable_spans
from weight_sync.plan import BucketPlan
from weight_sync.staging import Accept, Content, DeviceQueue, QueuedStaging
from weight_sync.tensor_meta import LogicalWeights, Part, Place

_PART_BYTES = 32 << 20  # what is copied at a time from one device to another
_TOGETHER_BYTES = 4 << 20  # what is exchanged by one call, unless it is one part


class ShadowStaging(QueuedStaging):
    """Staging in host memory (`mode="host"`) or on the device of the weights (`"device"`), in areas of `memory`."""

    def __init__(
        self,
        weights: LogicalWeights,
        mode: Literal["host", "device"] = "host",
        memory: Areas | None = None,
        queue: DeviceQueue | None = None,
        homes: Homes | None = None,
    ) -> None:
        super().__init__(weights, queue, memory, homes)
        self.mode = mode
        self._shadows: dict[int, _Shadow] = {}
        self._written: set[str] = set()  # one by one
        self._plans: list[BucketPlan] = []  # whose tensors were written
        self._prepared = False
        self._trader: PageTrader | None = None
        # Live memory and its shadow, part by part: what the commit will trade and exchange, and what it has.
        self._to_trade: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._to_exchange: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._traded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._exchanged: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._old_sums: list[int] = []  # of the words of the live parts to exchange, before the commit

    @property
    def dirty(self) -> bool:
        return bool(self._exchanged or self._traded) or self._is_lost

    @property
    def num_bytes(self) -> int:
        return sum(shadow.live.numel() for shadow in self._shadows.values())

    def write(self, name: str, content: Content) -> None:
        for place in self._homes.places(name):
            target = self._place_in_shadow(place)
            if self._folds_early(place.storage):
                self._queue.put(functools.partial(_write_folded, content, place, target))
            else:
                self._queue.put(functools.partial(_write, content, target))
        self._written.add(name)

    def write_spans(self, plan: BucketPlan, content: torch.Tensor, accept: Accept) -> None:
        shadows = list(map(self._shadow_of, plan.storages, plan.keys))
        live = [shadow.live for shadow in shadows] if any(shadow.is_folded for shadow in shadows) else None
        self._plans.append(plan)
        source, areas = self._spans.bring(content), [shadow.staged for shadow in shadows]
        self._spans.find(lambda: plan.take(source, areas, live=live), accept)

    def read(self, name: str) -> Sequence[Part]:
        self._queue.fence()
        return [Part(place.region, self._content(place)) for place in self._homes.places(name)]

    def prepare(self) -> None:
        self._fill({key for key, shadow in self._shadows.items() if not shadow.is_copy})
        self._queue.fence()
        shadows = list(self._shadows.values())
        spans = tradable_spans([(shadow.live, shadow.staged) for shadow in shadows])
        for shadow, tradable in zip(shadows, spans, strict=True):
            shadow.divide(tradable)
            self._to_trade += shadow.traded
        for is_folded in (False, True):
            parts = (part for shadow in shadows if shadow.is_folded is is_folded for part in shadow.parts)
            self._to_exchange += (together := list(_together(parts)))
            for live, staged in () if is_folded else together:
                self._queue.put(functools.partial(_fold, staged, live))
        self._old_sums = self._live_sums()
        self._queue.fence()
        if self._to_trade:
            self._trader = PageTrader(max(live.numel() for live, _ in self._to_trade))
        self._prepared = True

    def commit(self) -> None:
        assert self._prepared
        self._queue.fence_device()  # steps in flight read the old content
        for live, staged in self._to_trade:
            assert self._trader is not None
            self._trader.trade(live, staged)
            self._traded.append((live, staged))
        for parts in self._to_exchange:
            self._queue.put(functools.partial(self.exchange, *parts))
            self._exchanged.append(parts)
        self._queue.fence()

    @staticmethod
    def exchange(live: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
        """Compute `live ^= staged` of parts, int64 or uint8 [n] each.

        A call that raises has not begun; `undo` finds out if it has.
        """
        _fold(live, staged)

    def undo(self) -> None:
        self._queue.fence_device()
        for parts in reversed(self._exchanged):
            self._queue.put(functools.partial(self.exchange, *parts))
        self._queue.fence()
        while self._traded and self._trader is not None:
            self._trader.trade(*self._traded[-1])
            self._traded.pop()
        if self._trader is not None and self._trader.lost is not None:
            raise StagingError(self._trader.lost)
        if self._prepared and self._live_sums() != self._old_sums:
            raise StagingError("the checksum of the restored weights differs from the checksum before the update")
        self.close()

    def close(self) -> None:
        if self._is_lost:
            self._memory.close()
        self._shadows.clear()
        self._memory.end()
        for pairs in (self._to_trade, self._to_exchange, self._traded, self._exchanged):
            pairs.clear()
        self._written.clear()
        self._plans.clear()
        self._prepared = False
        if self._trader is not None:
            self._trader.close()
            self._trader = None

    @property
    def _is_lost(self) -> bool:
        return self._trader is not None and self._trader.lost is not None

    def _folds_early(self, storage: torch.Tensor) -> bool:
        """Return whether tensors are folded as they are written.  On a CPU pages may be traded, and `prepare` folds."""
        return storage.device.type != "cpu"

    def _content(self, place: Place) -> torch.Tensor:
        if self._folds_early(place.storage):
            old, folded = place.storage, self._place_in_shadow(place).storage
            new = _words(folded).to(old.device) ^ _words(old)
            return place.rebind(new.view(old.dtype)).read()
        if not self._prepared:
            return self._place_in_shadow(place).read()
        content = self._shadows[address_of(place.storage)].new_content()
        return place.rebind(_viewed_like(place.storage, content)).read()

    def _place_in_shadow(self, place: Place) -> Place:
        """Return the same place in the shadow of its storage."""
        return place.rebind(_viewed_like(place.storage, self._shadow_of(place.storage).staged))

    def _shadow_of(self, storage: torch.Tensor, key: int | None = None) -> _Shadow:
        """Return the shadow of a storage, whose address is `key`; None: not known."""
        key = address_of(storage) if key is None else key
        shadow = self._shadows.get(key)
        if shadow is None:
            known = self._memory.known_to((self._homes, self.mode))
            shadow = known.get(key)
            if shadow is None:
                shadow = known[key] = self._new_shadow(storage)
            shadow.begin()
            self._shadows[key] = shadow
        return shadow

    def _new_shadow(self, storage: torch.Tensor) -> _Shadow:
        live, device = bytes_of(storage), torch.device("cpu") if self.mode == "host" else storage.device
        area = self._memory.take(live.data_ptr(), live.numel(), device, like=live)
        return _Shadow(live, area, copy=self._homes.has_gaps(storage), folded=self._folds_early(storage))

    def _fill(self, keys: set[int]) -> None:
        """Copy the rest of these storages' content into their shadows."""
        for name in self._missing() if keys else ():
            for place in self._homes.places(name):
                if address_of(place.storage) in keys:
                    target = self._place_in_shadow(place)
                    if self._folds_early(place.storage):
                        self._queue.put(_words(target.storage).zero_)
                    else:
                        self._queue.put(functools.partial(target.restore, place.saved()))

    def _missing(self) -> Collection[str]:
        """Return the names of the tensors that were not written."""
        names = self._weights.metas().keys()
        if not self._written and sum(len(plan.names) for plan in self._plans) == len(names):
            return ()  # no two plans have all of the same tensor
        return names - self._written.union(*(plan.all_names for plan in self._plans))

    def _live_sums(self) -> list[int]:
        """Return the sum of the live words of each part to exchange; read from the device once."""
        sums = [word_sums(live) if len(live) > 1 else live[0].sum().view(1) for live, _ in self._to_exchange]
        return torch.cat(sums).tolist() if sums else []


class _Shadow:
    """The second copy of one storage's bytes, for one update after another.

    `copy`: starts from the live content, for storages with more in them than tensors.  `folded`: what is written is
    folded already, and what is not is 0.  `traded`, `parts`: both sides of each traded span, uint8, and of the rest,
    int64, or uint8 for the bytes left at its end.
    """

    def __init__(self, live: torch.Tensor, staged: torch.Tensor, *, copy: bool, folded: bool) -> None:
        self.live, self.staged = live, staged
        self.is_copy = copy
        self.is_folded = folded
        self.traded: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self.parts: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._tradable: list[range] | None = None  # before `divide`

    def begin(self) -> None:
        """Begin an update."""
        if self.is_copy and self.is_folded:
            self.staged.zero_()
        elif self.is_copy:
            self.staged.copy_(self.live)

    def divide(self, tradable: list[range]) -> None:
        """Set which offsets will be traded, ascending; `parts` are the rest.  Views from the update before stay."""
        if tradable != self._tradable:
            self._tradable = tradable
            self.traded = [(self.live[at.start : at.stop], self.staged[at.start : at.stop]) for at in tradable]
            self.parts = list(self._parts())

    def new_content(self) -> torch.Tensor:
        """Return a copy of what the storage will hold, uint8, once the rest is folded in `prepare`."""
        content = self.staged.clone()
        for at in self._rest():
            content[at.start : at.stop] ^= self.live[at.start : at.stop]
        return content

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield both sides of the rest, in parts only if a copy of each is needed."""
        for at in self._rest():
            end = at.start + len(at) // 8 * 8
            step = max(len(at), 1) if self.live.device == self.staged.device else _PART_BYTES
            for start in range(at.start, end, step):
                stop = min(start + step, end)
                yield self.live[start:stop].view(torch.int64), self.staged[start:stop].view(torch.int64)
            if end < at.stop:
                yield self.live[end : at.stop], self.staged[end : at.stop]

    def _rest(self) -> Iterator[range]:
        """Yield the offsets between the traded spans."""
        start = 0
        for span in (*(self._tradable or ()), range(self.live.numel(), self.live.numel())):
            if start < span.start:
                yield range(start, span.start)
            start = span.stop


def _together(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield what is exchanged by one call: parts of a CPU up to `_TOGETHER_BYTES`, or one part."""
    lives, others, room = list[torch.Tensor](), list[torch.Tensor](), 0
    for live, staged in parts:
        if lives and (live.nbytes > room or not live.is_cpu):
            yield lives, others
            lives, others = [], []
        room = (room if lives else _TOGETHER_BYTES) - live.nbytes
        lives.append(live)
        others.append(staged)
    if lives:
        yield lives, others


def _fold(into: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    """Compute `into ^= other` of parts; on several threads if there is one."""
    if len(into) == 1:
        into[0].bitwise_xor_(other[0].to(into[0].device, non_blocking=True))
    else:
        fold(into, other)


def _write(content: Content, target: Place) -> None:
    if isinstance(content, Part):
        target.restore(content.content)
    else:
        target.write(content)


def _write_folded(content: Content, live: Place, target: Place) -> None:
    """Write into `target` the exclusive or of what `live` would hold and what it holds, computed where it lies.

    On a device no two places share a storage, so that all of it is folded.
    """
    new = live.rebind(live.storage.clone())
    _write(content, new)
    folded = _words(new.storage)
    folded.bitwise_xor_(_words(live.storage))
    _words(target.storage).copy_(folded)


def _words(content: torch.Tensor) -> torch.Tensor:
    """Return a view of the bits, in integers of the same size."""
    return content.view(SIGNED[content.itemsize])


def _viewed_like(storage: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return `storage`, with its whole storage's bytes replaced by `content`, uint8."""
    return content.view(storage.dtype).as_strided(storage.size(), storage.stride(), storage.storage_offset())
