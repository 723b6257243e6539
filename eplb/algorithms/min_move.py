"""`min_move`: from the placement in force to a balanced one, copying as few experts as possible.

The tokens of an expert are divided over its slots by weights, which costs no copy; that alone recovers much of what
drift lost.  What is left over the cap (mean load / target) is exactly what some set of ranks cannot pass on, because
every expert they serve lives only among them.  So each copy takes an expert out of such a set onto a rank with room,
in place of a replica that is needed least.  Where no replica can be spared, two experts exchange places (two copies).
Moves are ordered by an estimate, judged by the maximum flow after them, and the best is kept.

Shapes: L MoE layers, E logical experts, P physical experts (slots), G ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eplb.algorithms.split import NEGLIGIBLE, LayerSplit
from eplb.algorithms.types import ExpertLayout, Plan, checked_counts, checked_map, shares_of

ENOUGH_GAIN = 1e-3  # load under which a move is not worth its copy
SLOTS_KEPT = 100  # placements kept after each copy times slots; at least one
TRIED = 12  # moves judged exactly from each placement; more where there are few slots
SLOTS_TRIED = 5000  # moves judged exactly times slots: what small layers can afford
SMALL, SMALL_COPIES = 9, 4  # slots up to which all moves are tried, worse ones too, and so many copies at most
TARGETS, SOURCES = 10, 8  # ranks with most room, and experts to move, that are combined


@dataclass(frozen=True)
class Move:
    """`expert` of `source` goes into a slot of `rank`; in an exchange its expert goes into `source_slot`."""

    rank: int
    slot: int
    expert: int
    source: int
    source_slot: int | None = None

    @property
    def copies(self) -> int:
        return 1 if self.source_slot is None else 2


@dataclass(frozen=True)
class _Node:
    """A placement on the way, the load over the cap and the ranks it is stuck on."""

    excess: float
    state: LayerSplit
    stuck: list[bool]


def min_move(counts_LE: np.ndarray, layout: ExpertLayout, current_LP: np.ndarray, *, target: float = 0.98) -> Plan:
    """A placement near `current_LP` [L, P]; every layer has a predicted balancedness of `target`, if one is found.

    Every slot that is not copied keeps its expert.  Raises `LoadsError`; `MapError` for a map that cannot be served
    from or that holds an expert twice on one rank.
    """
    shares_LE = shares_of(checked_counts(counts_LE, layout))
    current = checked_map(current_LP, layout, len(shares_LE))
    cap = 1.0 / target
    physical_to_logical, split = current.copy(), np.empty(current.shape)
    for layer, (shares, row) in enumerate(zip(shares_LE * layout.num_ranks, current, strict=True)):
        held = row.reshape(layout.num_ranks, -1).tolist()
        state = LayerSplit(shares.tolist(), held)
        state.settle()
        state = _search(state, cap, layout.num_physical_experts)
        physical_to_logical[layer] = [expert for experts in state.held for expert in experts]
        split[layer] = _split_weights(state)
    reason = "moves as few experts as possible from the placement in force and divides tokens by weights"
    return Plan("min_move", reason, layout, physical_to_logical, split)


def _split_weights(state: LayerSplit) -> list[float]:
    """Share of its expert's tokens that each slot takes; even for an expert without tokens."""
    weights = []
    for rank, experts in enumerate(state.held):
        for expert in experts:
            flow = state.flows.get(expert)
            if flow is None:
                weights.append(1.0)
            elif (total := sum(flow.values())) > 0:
                weights.append(flow[rank] / total)
            else:
                weights.append(1.0 / len(flow))
    return weights


def _search(start: LayerSplit, cap: float, num_slots: int) -> LayerSplit:
    """The placement with the fewest copies that gets under the cap, or else the one that gets nearest."""
    tried = max(TRIED, SLOTS_TRIED // num_slots)
    excess, stuck = start.relieve(cap)
    best, best_excess = start, excess
    expanded = []
    by_copies: dict[int, list[_Node]] = {0: [_Node(excess, start, stuck)]}
    copies = 0
    while by_copies and best_excess > NEGLIGIBLE and copies <= (SMALL_COPIES if num_slots <= SMALL else num_slots):
        for node in _kept(by_copies.pop(copies, []), max(1, SLOTS_KEPT // num_slots)):
            expanded.append(node.state)
            better = 0
            for index, move in enumerate(_moves(node, cap)):
                if best_excess <= NEGLIGIBLE or (index >= tried and better):
                    break
                after = _moved(node.state, move)
                left, stuck = after.relieve(cap)
                if left < node.excess - ENOUGH_GAIN or num_slots <= SMALL:
                    better += 1
                    by_copies.setdefault(copies + move.copies, []).append(_Node(left, after, stuck))
                if left < best_excess:
                    best, best_excess = after, left
        copies += 1
    best.settle()
    return best if best_excess <= NEGLIGIBLE else _nearest([*expanded, best])


def _nearest(states: list[LayerSplit]) -> LayerSplit:
    """The first, so the one with the fewest copies, whose largest load is about as small as any one's."""
    for state in states:
        state.settle()
    least = min(max(state.loads) for state in states)
    return next(state for state in states if max(state.loads) <= least + ENOUGH_GAIN)


def _kept(nodes: list[_Node], most: int) -> list[_Node]:
    """The best few placements that differ."""
    kept: dict[tuple[tuple[int, ...], ...], _Node] = {}
    for node in sorted(nodes, key=lambda node: node.excess):
        kept.setdefault(tuple(tuple(sorted(experts)) for experts in node.state.held), node)
        if len(kept) == most:
            break
    return list(kept.values())


def _moved(state: LayerSplit, move: Move) -> LayerSplit:
    after = state.clone()
    if move.source_slot is None:
        after.replace(move.rank, move.slot, move.expert, move.source)
    else:
        after.exchange(move.source, move.source_slot, move.rank, move.slot)
    return after


def _moves(node: _Node, cap: float) -> list[Move]:
    """Moves out of the set of ranks that load is stuck on, best estimate first."""
    if sum(map(len, node.state.held)) <= SMALL:
        return list(_all_moves(node.state))
    targets = _targets(node.state, node.stuck, cap)
    found = [*_copies(node, targets, cap), *_exchanges(node, cap)]
    found.sort(key=lambda entry: (-entry[0], entry[1].rank, entry[1].slot, entry[1].expert))
    return [move for _, move in found]


def _all_moves(state: LayerSplit) -> Iterator[Move]:
    """Every copy onto a replica that can be given up, and every exchange of two experts that have one slot each."""
    for rank, held in enumerate(state.held):
        for slot, victim in enumerate(held):
            for source, others in enumerate(state.held):
                for source_slot, expert in enumerate(others):
                    if expert in held:
                        continue
                    if victim in state.flows:
                        yield Move(rank, slot, expert, source)
                    elif source < rank and expert not in state.flows:
                        yield Move(rank, slot, expert, source, source_slot)


def _targets(state: LayerSplit, stuck: list[bool], cap: float) -> list[tuple[float, float, int, int]]:
    """(room, harm, rank, slot): for each rank with room the replica best given up."""
    targets = []
    for rank, load in enumerate(state.loads):
        if stuck[rank]:
            continue
        best = None
        for slot, victim in enumerate(state.held[rank]):
            flow = state.flows.get(victim)
            if flow is None:
                continue
            taken = flow[rank]
            elsewhere = sum(max(0.0, cap - state.loads[other]) for other in flow if other != rank)
            entry = (cap - load + taken, max(0.0, taken - elsewhere), rank, slot)
            if best is None or entry[0] - 2 * entry[1] > best[0] - 2 * best[1]:
                best = entry
        if best is not None:
            targets.append(best)
    targets.sort(key=lambda entry: (entry[1] - entry[0], entry[2]))
    return targets[:TARGETS]


def _copies(node: _Node, targets: list[tuple[float, float, int, int]], cap: float) -> Iterator[tuple[float, Move]]:
    """Copies of experts of the overloaded ranks, with an estimate of the load that each brings away."""
    state = node.state
    ranks = [rank for rank, is_stuck in enumerate(node.stuck) if is_stuck]
    served = {expert: rank for rank in ranks for expert in state.held[rank] if state.flow(expert, rank) > NEGLIGIBLE}
    sources = sorted(served, key=lambda expert: (-state.shares[expert], expert))[:SOURCES]
    for expert in sources:
        share = state.shares[expert]
        for room, harm, rank, slot in targets:
            if expert not in state.held[rank]:
                yield min(share, node.excess, room) - harm, Move(rank, slot, expert, served[expert])


def _exchanges(node: _Node, cap: float) -> Iterator[tuple[float, Move]]:
    """Exchanges of a single expert of an overloaded rank with a lighter one, at half their value: two copies."""
    state = node.state
    lightest = sorted(range(len(state.loads)), key=lambda rank: (state.loads[rank], rank))[:TARGETS]
    heaviest = max(range(len(state.loads)), key=lambda rank: (state.loads[rank], -rank))
    for source_slot, expert in enumerate(state.held[heaviest]):
        if expert in state.flows:
            continue
        for rank in lightest:
            wanted = min(node.excess, cap - state.loads[rank])
            if wanted <= 0:
                continue
            best: tuple[float, int] | None = None
            for slot, other in enumerate(state.held[rank]):
                shift = state.shares[expert] - state.shares[other]
                if shift > 0 and other not in state.flows:
                    value = min(shift, wanted) - max(0.0, shift - wanted)
                    best = max(best, (value, slot)) if best else (value, slot)
            if best:
                yield best[0] / 2, Move(rank, best[1], expert, heaviest, source_slot)
