"""`min_move`: from the placement in force to a balanced one, copying as few experts as possible.

The tokens of an expert are divided over its slots by weights, which costs no copy; that alone recovers much of what
drift lost.  What is left over the cap (mean load / target) is exactly what some set of ranks cannot pass on, because
every expert they serve lives only among them.  So each copy takes an expert out of such a set onto a rank with room,
in place of a replica that is needed least.  Where no replica can be spared, two experts exchange places (two copies).
Moves are ordered by an estimate (`moves`), judged by the maximum flow after them (`split`), and the best is kept.  At
the end every slot that can have its old expert back gets it.

Shapes: L MoE layers, E logical experts, P physical experts (slots), G ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eplb.algorithms import TARGET
from eplb.algorithms.moves import Candidate, all_moves, copies_out, exchanges_out
from eplb.algorithms.split import NEGLIGIBLE, LayerSplit
from eplb.algorithms.types import ExpertLayout, Plan, checked_counts, checked_map, shares_of
from eplb.errors import EplbRequestError

ENOUGH_GAIN = 1e-3  # load under which a move is not worth its copy
EFFORTS = ((1, 12), (4, 40))  # placements kept after each copy, moves judged from each; the next if that gets nowhere
SLOTS_KEPT, SLOTS_TRIED = 100, 2000  # divided by the number of slots, what small layers add to both
SMALL, SMALL_COPIES = 16, 4  # slots up to which all moves are tried first, worse ones too, and the most copies then


@dataclass(frozen=True)
class _Node:
    """A placement on the way, the load over the cap and the ranks it is stuck on."""

    excess: float
    state: LayerSplit
    stuck: list[bool]


def min_move(
    counts_LE: np.ndarray, layout: ExpertLayout, current_LP: np.ndarray | None, *, target: float = TARGET
) -> Plan:
    """Return a placement near `current_LP` [L, P]; every layer has a predicted balancedness of `target`, if one is
    found.

    Every slot that is not copied keeps its expert.  Raises `LoadsError`; `EplbRequestError` without a placement;
    `MapError` for a map that cannot be served from or that holds an expert twice on one rank.
    """
    if current_LP is None:
        raise EplbRequestError("min_move needs the placement in force; use `balanced` for a fresh one")
    shares_LE = shares_of(checked_counts(counts_LE, layout))
    current = checked_map(current_LP, layout, len(shares_LE))
    cap = 1.0 / target
    physical_to_logical, split = current.copy(), np.empty(current.shape)
    for layer, (shares, row) in enumerate(zip(shares_LE * layout.num_ranks, current, strict=True)):
        held = row.reshape(layout.num_ranks, -1).tolist()
        state = _best(LayerSplit(shares.tolist(), held), cap, layout.num_physical_experts)
        physical_to_logical[layer] = [expert for experts in state.held for expert in experts]
        split[layer] = _split_weights(state)
    reason = "moves as few experts as possible from the placement in force and divides tokens by weights"
    return Plan("min_move", reason, layout, physical_to_logical, split)


def _split_weights(state: LayerSplit) -> list[float]:
    """Return the share of its expert's tokens that each slot takes; even for an expert without tokens."""
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


def _best(start: LayerSplit, cap: float, num_slots: int) -> LayerSplit:
    """Return the placement with the fewest copies that gets under the cap, or else the one that gets nearest."""
    excess, stuck = start.relieve(cap)
    seen = [start]
    efforts = [(kept + SLOTS_KEPT // num_slots, tried + SLOTS_TRIED // num_slots, False) for kept, tried in EFFORTS]
    if num_slots <= SMALL:
        efforts.insert(0, (SLOTS_KEPT // num_slots, 0, True))
    for kept, tried, thorough in efforts:
        found, passed = _search(_Node(excess, start, stuck), cap, kept, tried, thorough)
        if found is not None:
            found = _with_old_experts_back(found, start, cap)
            found.settle()
            return found
        seen += passed
    return _nearest(seen)


def _search(
    start: _Node, cap: float, kept: int, tried: int, thorough: bool
) -> tuple[LayerSplit | None, list[LayerSplit]]:
    """Return the first placement under the cap, by rising copies, if there is one; the placements on the way."""
    if start.excess <= NEGLIGIBLE:
        return start.state, []
    found: LayerSplit | None = None
    found_copies = SMALL_COPIES + 1 if thorough else len(start.state.shares) * len(start.stuck)
    passed = []
    by_copies = {0: [start]}
    copies = 0
    while by_copies and copies + 1 < found_copies:
        for node in _few(by_copies.pop(copies, []), kept):
            passed.append(node.state)
            for move, after in _expand(node, cap, tried, thorough):
                by_copies.setdefault(copies + move.copies, []).append(after)
                if after.excess <= NEGLIGIBLE and copies + move.copies < found_copies:
                    found, found_copies = after.state, copies + move.copies
        copies += 1
    return found, passed


def _expand(node: _Node, cap: float, tried: int, thorough: bool) -> Iterator[tuple[Candidate, _Node]]:
    """Yield better placements one move away; exchanges only if no copy takes away half of the excess."""
    if thorough:
        yield from ((move, _after(node, move, cap)) for move in all_moves(node.state))
        return
    least = node.excess
    for find, enough in ((copies_out, node.excess / 2), (exchanges_out, NEGLIGIBLE)):
        better = 0
        for index, move in enumerate(find(node.state, node.stuck, cap)):
            if least <= NEGLIGIBLE or (index >= tried and better):
                break
            after = _after(node, move, cap)
            if after.excess < node.excess - ENOUGH_GAIN or after.excess <= NEGLIGIBLE:
                better += 1
                least = min(least, after.excess)
                yield move, after
        if least <= enough:
            break


def _after(node: _Node, move: Candidate, cap: float) -> _Node:
    state = move.apply(node.state)
    excess, stuck = state.relieve(cap)
    return _Node(excess, state, stuck)


def _few(nodes: list[_Node], most: int) -> list[_Node]:
    """Return the best few placements that differ."""
    kept: dict[tuple[tuple[int, ...], ...], _Node] = {}
    for node in sorted(nodes, key=lambda node: node.excess):
        kept.setdefault(tuple(tuple(sorted(experts)) for experts in node.state.held), node)
        if len(kept) == most:
            break
    return list(kept.values())


def _with_old_experts_back(state: LayerSplit, start: LayerSplit, cap: float) -> LayerSplit:
    """Return the placement after as many of its copies as possible were undone, one after the other."""
    changed = [
        (rank, slot)
        for rank, (now, before) in enumerate(zip(state.held, start.held, strict=True))
        for slot, expert in enumerate(now)
        if expert != before[slot]
    ]
    for rank, slot in changed if len(changed) > 1 else ():
        old, new = start.held[rank][slot], state.held[rank][slot]
        if old in state.held[rank] or new not in state.flows:
            continue
        after = state.clone()
        after.replace(rank, slot, old, next(other for other, held in enumerate(state.held) if old in held))
        if after.relieve(cap)[0] <= NEGLIGIBLE:
            state = after
    return state


def _nearest(states: list[LayerSplit]) -> LayerSplit:
    """Return the first, so the one with the fewest copies, whose largest load is about as small as any one's."""
    for state in states:
        state.settle()
    least = min(max(state.loads) for state in states)
    return next(state for state in states if max(state.loads) <= least + ENOUGH_GAIN)
