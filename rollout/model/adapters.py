"""`AdapterTable`: sole owner of the adapters that a model serves: their slots, names and versions.

    slot 0..S-1   one version of an adapter, in every layer that adapters may change
    slot -1       no adapter

    poet@3   newest: serves requests that name `poet`            stays
    poet@2   older, of requests that began with it               stays until they have ended
    poet@1   older, of no request                                stays until a load needs its slot
    poet@0   evicted                                             a request that names it is refused

A version is one content for ever: a name that comes back after its unload goes on counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch

from rollout.adapters.peft_folder import Adapter
from rollout.core.adapter_names import adapter_ref, fault_of_name
from rollout.core.errors import AdapterError, Conflict, FatalError, NotFound
from rollout.core.messages.req_output import AdapterCard, AdapterLabel
from rollout.layers.lora import SlotSizes
from rollout.model.adapter_places import AdapterPlaces, Write, is_dense
from rollout.model.decoder import DecoderForCausalLM

_NO_SIZES = SlotSizes(0, 0)


class ServedAdapter(NamedTuple):
    """A version of an adapter in its slot."""

    label: AdapterLabel
    slot: int


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that this rank can serve: what is to be written into a slot."""

    name: str
    content: Adapter
    pinned: bool
    writes: Sequence[Write]


class AdapterTable:
    """The adapters of `model`, in at most `sizes.slots` slots of rank `sizes.rank`.

    `reserved`: the names of the model, which no adapter can have.  `wanted(module)`: whether it has memory in slots.
    Every rank of every engine has a table, and all make the same changes in the same order, each between two steps.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        sizes: SlotSizes = _NO_SIZES,
        reserved: Sequence[str] = (),
        wanted: Callable[[str], bool] = is_dense,
    ) -> None:
        self._sizes, self._reserved = sizes, reserved
        self._world = model.parallel.world
        self._places = AdapterPlaces(model, sizes, wanted)
        self._cards: dict[int, AdapterCard] = {}  # by slot, in the order of the loads
        self._newest: dict[str, int] = {}  # the slot of the version that serves a name
        self._num_versions: dict[str, int] = {}  # of each name, ever
        self._users: Callable[[], Iterable[ServedAdapter | None]] = tuple
        self._on_change: Callable[[list[AdapterCard]], None] = lambda _: None

    def connect(
        self,
        users: Callable[[], Iterable[ServedAdapter | None]],
        on_change: Callable[[list[AdapterCard]], None],
    ) -> None:
        """Set the function that returns what each unfinished request holds, and the one to tell of changes.

        Nothing else records which slots are in use, so that no count of them can be wrong.
        """
        self._users, self._on_change = users, on_change

    @property
    def cards(self) -> list[AdapterCard]:
        """The versions in memory, oldest load first."""
        return list(self._cards.values())

    @property
    def labels(self) -> list[AdapterLabel]:
        return [card.label for card in self._cards.values()]

    @property
    def sources(self) -> dict[str, str | None]:
        """The source of the newest version of each adapter, by name."""
        return {name: self._cards[slot].source for name, slot in self._newest.items()}

    @property
    def max_rank(self) -> int | None:
        """The greatest rank of an adapter; None without slots."""
        return self._sizes.rank or None

    @property
    def max_bytes(self) -> int:
        """The bytes of the largest adapter that a slot can hold."""
        return self._places.max_bytes

    @property
    def places(self) -> AdapterPlaces:
        """The modules that adapters may change."""
        return self._places

    def serves(self, name: str) -> bool:
        """Return whether a request may name this adapter."""
        return name in self._newest

    def find(self, name: str) -> ServedAdapter:
        """Return the newest version of an adapter, or for NAME@3 that version.  Raises `NotFound`."""
        wanted, version = adapter_ref(name)
        if wanted not in self._newest:
            raise NotFound(unknown_adapter(name, list(self._newest)))
        newest = self._newest[wanted]
        if version is None:
            return ServedAdapter(self._cards[newest].label, newest)
        for slot, card in self._cards.items():
            if (card.label.name, card.label.version) == (wanted, version):
                return ServedAdapter(card.label, slot)
        there = ", ".join(str(card.label.version) for card in self._cards.values() if card.label.name == wanted)
        raise NotFound(f"there is no version {version} of the adapter {wanted!r}; this server has {there}")

    def require_name(self, name: str) -> None:
        """Raise `AdapterError` if this server has no slots, or for a name that no adapter can have."""
        fault = fault_of_name(name)
        if not self._sizes.slots:
            raise AdapterError("this server has no slots for adapters: start it with --enable-lora")
        if fault is not None or name in self._reserved:
            raise AdapterError(fault or f"{name!r} is the name of the model")

    def prepare(self, name: str, adapter: Adapter, *, pinned: bool = False) -> PreparedAdapter:
        """Check an adapter, and convert it for this rank.  Changes nothing, and may be called on any thread.

        Raises `AdapterError` as `require_name`, and for what `AdapterPlaces.prepared` refuses.
        """
        self.require_name(name)
        return PreparedAdapter(name, adapter, pinned, self._places.prepared(adapter))

    def check(self, name: str, adapter: Adapter) -> None:
        """Raise the `AdapterError` that `load` would, as far as this rank can tell."""
        self._slot_for(self.prepare(name, adapter).name, self._slots_in_use())

    def load(self, name: str, adapter: Adapter, *, pinned: bool = False) -> ServedAdapter:
        """Put an adapter into a slot, as the next version of its name, for requests that are admitted from now on.

        Called by all ranks of all engines between two steps.  Raises `AdapterError` on all of them, and changes
        nothing, where one of them refuses it (`prepare`), where they have other contents, and where each slot holds a
        version that is the newest of its name, in use or pinned.
        """
        prepared, error = None, None
        try:
            prepared = self.prepare(name, adapter, pinned=pinned)
        except AdapterError as raised:
            error = raised
        if not self._world.all_agree(error is None) or prepared is None:
            raise error or AdapterError(f"another rank cannot serve the adapter {name!r}")
        return self.put(prepared)

    def put(self, prepared: PreparedAdapter) -> ServedAdapter:
        """Load an adapter that every rank has prepared.  See `load`."""
        name, digest = prepared.name, prepared.content.digest
        label = AdapterLabel(name, self._num_versions.get(name, 0), digest)
        mark = int.from_bytes(blake2b(repr((label, prepared.pinned)).encode(), digest_size=7).digest(), "little")
        told = self._world.gather_ints([mark, *self._slots_in_use()])
        if len({other for other, *_ in told}) > 1:
            raise AdapterError(f"the ranks read other contents of the adapter {name!r}: copy one to all machines")
        slot = self._slot_for(name, [sum(each) for each in list(zip(*told))[1:]])
        self._cards.pop(slot, None)
        try:
            self._places.write(slot, prepared.writes)
        except Exception as error:
            raise FatalError(f"the adapter {name!r} could not be written; other ranks may have it: {error}") from error
        self._cards[slot] = AdapterCard(label, prepared.content.source, pinned=prepared.pinned)
        self._newest[name] = slot
        self._num_versions[name] = label.version + 1
        self._on_change(self.cards)
        return ServedAdapter(label, slot)

    def unload(self, name: str) -> bool:
        """Remove all versions of an adapter.  Returns False for a name that is not served.

        Called as `load` is.  Raises `Conflict`, and changes nothing, while requests use one of its versions.
        """
        if name not in self._newest:
            return False
        in_use = [sum(each) for each in zip(*self._world.gather_ints(self._slots_in_use()))]
        slots = [slot for slot, card in self._cards.items() if card.label.name == name]
        if any(in_use[slot] for slot in slots):
            raise Conflict(f"the adapter {name!r} is in use: unload it once its requests have ended, or abort them")
        for slot in slots:
            del self._cards[slot]
        del self._newest[name]
        self._on_change(self.cards)
        return True

    def _slots_in_use(self) -> list[int]:
        """Return how many requests of this rank hold each slot [S]."""
        counts = [0] * self._sizes.slots
        for served in self._users():
            if served is not None:
                counts[served.slot] += 1
        return counts

    def _slot_for(self, name: str, in_use: Sequence[int]) -> int:
        """Return a free slot, or that of the oldest version that nothing needs.  Raises `AdapterError`.

        The newest version of this name is needed no more, as it is about to be an older one, but comes last.
        """
        free = next((slot for slot in range(self._sizes.slots) if slot not in self._cards), None)
        if free is not None:
            return free
        unneeded = [slot for slot, card in self._cards.items() if not (in_use[slot] or card.pinned)]
        mine = self._newest.get(name)
        older = [slot for slot in unneeded if slot not in self._newest.values()]
        for slot in (*older, *(each for each in unneeded if each == mine)):
            return slot
        raise AdapterError(f"all {self._sizes.slots} slots are taken (--max-loras-per-batch): {self._held_by(in_use)}")

    def _held_by(self, in_use: Sequence[int]) -> str:
        """Return what holds each slot, and why it stays."""
        held = []
        for slot, card in self._cards.items():
            reasons = ["newest"] * (slot in self._newest.values()) + ["in use"] * bool(in_use[slot])
            reasons += ["pinned"] * card.pinned
            held.append(f"{card.label.name}@{card.label.version} ({', '.join(reasons)})")
        return "; ".join(held)


def unknown_adapter(name: str, known: Sequence[str]) -> str:
    """Return the message on the name of an adapter that is not served."""
    return f"there is no adapter {name[:200]!r}; this server has {', '.join(known) or 'none'}"


def slots_of_tokens(requests: Sequence[tuple[int, int]]) -> torch.Tensor | None:
    """Return the slot of each token [T] int64, of (slot, number of tokens) of each request; None if all are -1."""
    if all(slot < 0 for slot, _ in requests):
        return None
    slots, counts = torch.tensor(requests, dtype=torch.int64).unbind(1)
    return slots.repeat_interleave(counts)
