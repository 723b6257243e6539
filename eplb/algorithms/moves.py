"""Finds moves that may relieve a layer whose load is stuck over the cap, the most promising first.

    stuck ranks    all at the cap or over it; all that they could pass on goes to another one of them
    other ranks    in groups that are linked by experts; load that reaches a rank can pass on inside its group

A copy takes an expert of the stuck ranks to another rank, in place of a replica there.  What it brings away is
estimated: no more than the stuck group is over the cap, than the expert has, than the rank can hold or pass on, than
its group has room; and less what the replica given up took and no other rank has room for.  An exchange costs two
copies and needs no replica to give up.

E logical experts, G ranks.  Loads are multiples of the mean load of a rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest

from eplb.algorithms.split import NEGLIGIBLE, LayerSplit

TARGETS = 12  # ranks that take an expert, and ranks with most room for an exchange
SOURCES = 4  # experts of each stuck group, those with most load
HEAVIEST = 2  # ranks of each stuck group that give an expert in an exchange


@dataclass(frozen=True)
class Candidate:
    """`expert` of `source` goes into a slot of `rank`; in an exchange its expert goes into `source_slot`."""

    rank: int
    slot: int
    expert: int
    source: int
    source_slot: int | None = None

    @property
    def copies(self) -> int:
        return 1 if self.source_slot is None else 2

    def apply(self, state: LayerSplit) -> LayerSplit:
        """Return the split of the placement after the move."""
        after = state.clone()
        if self.source_slot is None:
            after.replace(self.rank, self.slot, self.expert, self.source)
        else:
            after.exchange(self.source, self.source_slot, self.rank, self.slot)
        return after


@dataclass(frozen=True)
class _Target:
    """A slot that can take an expert: load that can come, load that becomes homeless."""

    comes: float
    harm: float
    room: float
    rank: int
    slot: int


def all_moves(state: LayerSplit) -> Iterator[Candidate]:
    """Yield every copy onto a replica that can be given up, and every exchange of two experts with one slot each."""
    for rank, held in enumerate(state.held):
        for slot, victim in enumerate(held):
            for source, others in enumerate(state.held):
                for source_slot, expert in enumerate(others):
                    if expert in held:
                        continue
                    if victim in state.flows:
                        yield Candidate(rank, slot, expert, source)
                    elif source < rank and expert not in state.flows:
                        yield Candidate(rank, slot, expert, source, source_slot)


def copies_out(state: LayerSplit, stuck: list[bool], cap: float) -> list[Candidate]:
    """Return copies out of the stuck ranks, best estimate first."""
    groups = _Groups(state, stuck, cap)
    targets = _targets(state, groups, cap)
    found = []
    for group, over in groups.over.items():
        for expert, source in _largest(state, groups, group):
            wanted = min(state.shares[expert], over)
            for target in targets:
                if expert not in state.held[target.rank]:
                    gain = min(wanted, target.comes) - target.harm
                    found.append((-gain, -target.room, target.rank, target.slot, expert, source))
    found.sort()
    return [Candidate(rank, slot, expert, source) for _, _, rank, slot, expert, source in found]


def exchanges_out(state: LayerSplit, stuck: list[bool], cap: float) -> list[Candidate]:
    """Return exchanges of an expert of a stuck rank with one that has less load on a rank with room, best estimate
    first.
    """
    groups = _Groups(state, stuck, cap)
    held = state.held
    roomy = nlargest(TARGETS, ((groups.comes(rank), -rank) for rank in range(len(held)) if not stuck[rank]))
    found = []
    for group, over in groups.over.items():
        for source in nlargest(HEAVIEST, groups.members[group], key=state.loads.__getitem__):
            given = [(state.flow(expert, source), slot, expert) for slot, expert in enumerate(held[source])]
            for comes, negative in roomy:
                rank, wanted = -negative, min(over, comes)
                taken = sorted(
                    (state.flow(e, rank), slot) for slot, e in enumerate(held[rank]) if e not in held[source]
                )
                for load, source_slot, expert in given:
                    if expert in held[rank] or not taken:
                        continue
                    at = bisect_left(taken, (load - wanted, -1))
                    for other, slot in taken[max(0, at - 1) : at + 1]:
                        worth = wanted - abs(load - other - wanted)
                        if worth > NEGLIGIBLE:
                            found.append((-worth, rank, slot, expert, source, source_slot))
    found.sort()
    return [Candidate(*entry[1:]) for entry in found]


class _Groups:
    """Ranks of one kind, stuck or not, that are linked by experts.

    `of[g]` number of the group of rank g; `members` by number; `over` load over the cap, of stuck groups that have
    any; `room` load under it, of the others.
    """

    def __init__(self, state: LayerSplit, stuck: list[bool], cap: float) -> None:
        self._state, self._cap = state, cap
        self.of = _linked(state, stuck)
        self.members: dict[int, list[int]] = {}
        self.over: dict[int, float] = {}
        self.room: dict[int, float] = {}
        for rank, group in enumerate(self.of):
            self.members.setdefault(group, []).append(rank)
            of_kind, sign = (self.over, 1) if stuck[rank] else (self.room, -1)
            of_kind[group] = of_kind.get(group, 0.0) + max(0.0, sign * (state.loads[rank] - cap))
        self.over = {group: load for group, load in self.over.items() if load > NEGLIGIBLE}

    def own_room(self, rank: int) -> float:
        return max(0.0, self._cap - self._state.loads[rank])

    def comes(self, rank: int) -> float:
        """Return the load that a rank which is not stuck can take, or pass on for it."""
        passes = sum(self._state.flows[expert][rank] for expert in self._state.shared[rank])
        return min(self.room[self.of[rank]], self.own_room(rank) + passes)


def _linked(state: LayerSplit, stuck: list[bool]) -> list[int]:
    """Return a number for every rank, the same for ranks of one kind that are linked by experts."""
    parents = list(range(len(stuck)))

    def root(rank: int) -> int:
        while parents[rank] != rank:
            parents[rank] = parents[parents[rank]]
            rank = parents[rank]
        return rank

    for flow in state.flows.values():
        first = [-1, -1]
        for rank in flow:
            kind = stuck[rank]
            if first[kind] < 0:
                first[kind] = root(rank)
            else:
                parents[root(rank)] = first[kind]
    return [root(rank) for rank in range(len(stuck))]


def _largest(state: LayerSplit, groups: _Groups, group: int) -> list[tuple[int, int]]:
    """Return (expert, a rank that holds it): the experts of a stuck group that have most load."""
    holders = {
        expert: rank
        for rank in groups.members[group]
        for expert in state.held[rank]
        if state.flow(expert, rank) > NEGLIGIBLE
    }
    return [(expert, holders[expert]) for expert in nlargest(SOURCES, holders, key=state.shares.__getitem__)]


def _targets(state: LayerSplit, groups: _Groups, cap: float) -> list[_Target]:
    """Return the replica best given up of every rank that is not stuck; only the best of them."""
    targets = []
    for rank, shared in enumerate(state.shared):
        room = groups.room.get(groups.of[rank])
        if room is None or not shared:
            continue
        own = groups.own_room(rank)
        harm, victim = min((max(0.0, state.flows[expert][rank] - room + own), expert) for expert in shared)
        targets.append(_Target(groups.comes(rank), harm, own, rank, state.held[rank].index(victim)))
    return nlargest(TARGETS, targets, key=lambda target: (target.comes - target.harm, target.room, -target.rank))
