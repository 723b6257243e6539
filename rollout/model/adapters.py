"""`AdapterTable`: sole owner of the adapters that a model serves: their slots, names and versions.

    slot 0..S-1   one version of an adapter, in every layer that adapters may change
    slot -1       no adapter

    poet@3   newest: serves requests that name `poet`            stays
    poet@2   older, of requests that began with it               stays until they have ended
    poet@1   older, of no request                                stays until a load needs its slot
    poet@0   evicted                                             a request that names it is refused
    clerk@0  unloaded while requests use it (`retire`)           stays until they have ended; nothing can name it

A version is one content for ever: a name that comes back after its unload goes on counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch

from rollout.adapters.peft_folder import Adapter
from rollout.core.adapter_names import adapter_ref, awaited_adapter, fault_of_name
from rollout.core.errors import AdapterError, Conflict, FatalError, NotFound
from rollout.core.messages.req_output import AdapterCard, AdapterLabel
from rollout.layers.lora import SlotSizes
from rollout.model.adapter_places import AdapterPlaces, SlotContent, Write, is_dense
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


@dataclass(frozen=True)
class PlannedVersion:
    """The next version of an adapter, and the slot that it will have.  Valid until the next step."""

    prepared: PreparedAdapter
    label: AdapterLabel
    slot: int


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
        self._retired: dict[int, AdapterLabel] = {}  # by slot: unloaded, and may be in use
        self._num_versions: dict[str, int] = {}  # of each name, ever
        self._users: Callable[[], Iterable[ServedAdapter | None]] = tuple
        self._registered: Sequence[str] = ()
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

    @property
    def awaited(self) -> list[str]:
        """The registered names that are not served: their first weights have not come."""
        return [name for name in self._registered if name not in self._newest]

    def register(self, names: Sequence[str]) -> None:
        """Take note of the names whose tensors updates may bring.  All ranks do, between two steps."""
        self._registered = names
        self._on_change(self.cards)

    def serves(self, name: str) -> bool:
        """Return whether a request may name this adapter."""
        return name in self._newest

    def find(self, name: str) -> ServedAdapter:
        """Return the newest version of an adapter, or for NAME@3 that version.  Raises `NotFound`."""
        wanted, version = adapter_ref(name)
        if wanted in self.awaited:
            raise NotFound(awaited_adapter(name))
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
        (planned,) = self.plan([prepared])
        try:
            self.write(planned)
        except Exception as error:
            name = prepared.name
            raise FatalError(f"the adapter {name!r} could not be written; other ranks may have it: {error}") from error
        return self.publish(planned)

    def plan(self, adapters: Sequence[PreparedAdapter]) -> list[PlannedVersion]:
        """Return the next version of each adapter, and its slot.  Changes nothing, so that nothing is to be given back.

        Called as `load` is, and raises as `load`; the slots are free until the next step.  Names differ.
        """
        labels = [AdapterLabel(it.name, self._num_versions.get(it.name, 0), it.content.digest) for it in adapters]
        stated = [(label, prepared.pinned) for label, prepared in zip(labels, adapters, strict=True)]
        mark = int.from_bytes(blake2b(repr(stated).encode(), digest_size=7).digest(), "little")
        told = self._world.gather_ints([mark, *self._slots_in_use()])
        if len({other for other, *_ in told}) > 1:
            names = ", ".join(repr(prepared.name) for prepared in adapters)
            raise AdapterError(f"the ranks read other contents of the adapter {names}: copy one to all machines")
        slots = self._slots_for([it.name for it in adapters], [sum(each) for each in list(zip(*told))[1:]])
        return [PlannedVersion(*one) for one in zip(adapters, labels, slots, strict=True)]

    def require_room(self, names: Sequence[str]) -> None:
        """Raise the `AdapterError` of `load` if these adapters had no slots even while no request held any."""
        self._slots_for(names, [0] * self._sizes.slots)

    def content(self, planned: PlannedVersion) -> SlotContent | None:
        """Return a copy of the older version in the slot of a planned one; None for a free slot."""
        return self._places.content(planned.slot) if planned.slot in self._cards else None

    def write(self, planned: PlannedVersion) -> None:
        """Write a planned version into its slot, where nothing reads it before `publish`."""
        self._places.write(planned.slot, planned.prepared.writes)

    def write_back(self, planned: PlannedVersion, content: SlotContent | None) -> None:
        """Put back the `content` that the slot had before a `write`."""
        if content is not None:
            self._places.restore(planned.slot, content)

    def publish(self, planned: PlannedVersion) -> ServedAdapter:
        """Have requests that are admitted from now on served by a version that is written.  Raises nothing."""
        label, slot, prepared = planned.label, planned.slot, planned.prepared
        self._cards.pop(slot, None)  # a load comes last, also in the slot of an earlier one
        self._retired.pop(slot, None)
        self._cards[slot] = AdapterCard(label, prepared.content.source, pinned=prepared.pinned)
        self._newest[label.name] = slot
        self._num_versions[label.name] = label.version + 1
        self._on_change(self.cards)
        return ServedAdapter(label, slot)

    def unload(self, name: str, *, retire: bool = False) -> bool:
        """Remove all versions of an adapter.  Returns False for a name that is not served.

        Called as `load` is.  Raises `Conflict`, and changes nothing, while requests use one of its versions.  With
        `retire` such versions keep their slots until these requests have ended, and no other request can name them.
        """
        if name not in self._newest:
            return False
        in_use = [sum(each) for each in zip(*self._world.gather_ints(self._slots_in_use()))]
        slots = [slot for slot, card in self._cards.items() if card.label.name == name]
        if any(in_use[slot] for slot in slots) and not retire:
            raise Conflict(f"the adapter {name!r} is in use: unload it once its requests have ended, or abort them")
        for slot in slots:
            self._retired[slot] = self._cards.pop(slot).label
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

    def _slots_for(self, names: Sequence[str], in_use: Sequence[int]) -> list[int]:
        """Return a slot for the next version of each name: a free one, or that of the oldest version nothing needs.

        The newest version of a name is needed no more, as it is about to be an older one, but comes last.  Raises
        `AdapterError`.
        """
        newest, found = dict(self._newest), list[int]()
        unneeded = [slot for slot, card in self._cards.items() if not (in_use[slot] or card.pinned)]
        retired = {slot for slot in self._retired if in_use[slot]}
        free = [slot for slot in range(self._sizes.slots) if slot not in self._cards and slot not in retired]
        for name in names:
            older = [slot for slot in unneeded if slot not in newest.values()]
            slots = (*free, *older, *(slot for slot in unneeded if slot == newest.get(name)))
            slot = next((slot for slot in slots if slot not in found), None)
            if slot is None:
                held = self._held_by(in_use)
                raise AdapterError(f"all {self._sizes.slots} slots are taken (--max-loras-per-batch): {held}")
            newest[name] = slot
            found.append(slot)
        return found

    def _held_by(self, in_use: Sequence[int]) -> str:
        """Return what holds each slot, and why it stays."""
        held = []
        for slot, card in self._cards.items():
            reasons = ["newest"] * (slot in self._newest.values()) + ["in use"] * bool(in_use[slot])
            reasons += ["pinned"] * card.pinned
            held.append(f"{card.label.name}@{card.label.version} ({', '.join(reasons)})")
        for slot, label in self._retired.items():
            held += [f"{label.name}@{label.version} (unloaded, in use)"] * bool(in_use[slot])
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
