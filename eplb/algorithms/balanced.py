"""`balanced`: a fresh placement with even splits, and never two slots of an expert on one rank.

    1  slots    each further one to the expert with the most load a slot
    2  place    heaviest first, to the lightest rank that has room and not yet this expert
    3  refine   the heaviest rank meets the lightest, the second heaviest the second lightest, ...; each pair exchanges
                one item for one, later two for two, whichever leaves the two most equal
    4  retry    layers that do not fit together well, with other numbers of slots

All layers go through each step together, and leave when they are even enough.  Knows no placement in force.

Shapes: L MoE layers, E logical experts, P physical experts (slots), G ranks, S slots of a rank, Q pairs of ranks,
C subsets of the slots of a rank.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np

from eplb.algorithms.replicas import greedy_replica_order
from eplb.algorithms.types import ExpertLayout, Plan, checked_counts, even_split, replica_counts, shares_of

ENOUGH = 0.9997  # a layer this balanced is not refined further
ROUNDS = {1: 40, 2: 60}  # most rounds of exchanges of so many items
PATIENCE = 16  # rounds without progress, each with other pairs, after which larger exchanges are tried
RETRIED = 0.9992  # a layer less balanced than this is tried with other numbers of replicas
ATTEMPTS, VARIANTS, SPREAD = 3, 12, 0.3  # times, numbers tried each time, standard deviation of their logarithms
import os
SLACK = float(os.environ.get("SLACK", "0.1"))
NEARLY_FULL = float(os.environ.get("NF", "0.97"))
MOST_SUBSETS = 200  # of a rank; larger exchanges are not searched


def balanced(counts_LE: np.ndarray, layout: ExpertLayout) -> Plan:
    """A placement for these counts from nothing.  Raises `LoadsError`."""
    shares_LE = shares_of(checked_counts(counts_LE, layout))
    layers, experts = shares_LE.shape
    experts_LGS, loads_LGS = _place(shares_LE, shares_LE, layout)
    _refine(experts_LGS, loads_LGS)
    for seed in range(ATTEMPTS if layout.num_redundant_experts else 0):
        (hard,) = np.nonzero(loads_LGS.sum(axis=2).max(axis=1) * RETRIED > 1.0)
        if not len(hard):
            break
        other_experts, other_loads = _best_variant(shares_LE[hard], layout, seed)
        better = other_loads.sum(axis=2).max(axis=1) < loads_LGS[hard].sum(axis=2).max(axis=1)
        experts_LGS[hard[better]], loads_LGS[hard[better]] = other_experts[better], other_loads[better]
    physical_to_logical = experts_LGS.reshape(layers, -1)
    reason = "places afresh, as evenly as whole slots allow"
    return Plan("balanced", reason, layout, physical_to_logical, even_split(physical_to_logical, experts))


def _best_variant(shares_LE: np.ndarray, layout: ExpertLayout, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A refined placement with other numbers of replicas: the best of several, judged before they are refined.

    The least possible load a slot can be the wrong size: too large for two on a rank, too small for one.  Numbers that
    come from loads times random factors (the same in every call) have slots of many sizes.
    """
    layers, experts = shares_LE.shape
    factors = np.exp(np.random.default_rng(seed).normal(0.0, SPREAD, (VARIANTS, experts)))
    wanted = (shares_LE[:, None] * factors).reshape(-1, experts)
    experts_NGS, loads_NGS = _place(np.repeat(shares_LE, VARIANTS, axis=0), wanted, layout)
    best = loads_NGS.sum(axis=2).max(axis=1).reshape(layers, VARIANTS).argmin(axis=1)
    chosen = np.arange(layers) * VARIANTS + best
    experts_LGS, loads_LGS = experts_NGS[chosen], loads_NGS[chosen]
    _refine(experts_LGS, loads_LGS)
    return experts_LGS, loads_LGS


def _items(shares_LE: np.ndarray, wanted_LE: np.ndarray, layout: ExpertLayout) -> tuple[np.ndarray, np.ndarray]:
    """Experts [L, P] and loads [L, P], in multiples of a rank's mean, of all slots by falling load.

    Slots are given to experts as `wanted_LE` says.
    """
    layers, experts = shares_LE.shape
    extra = greedy_replica_order(wanted_LE, layout.num_redundant_experts, layout.num_ranks)
    copies = np.concatenate((np.broadcast_to(np.arange(experts), (layers, experts)), extra), axis=1)
    copies = np.sort(copies, axis=1)
    loads = np.take_along_axis(shares_LE, copies, axis=1) * even_split(copies, experts) * layout.num_ranks
    order = np.argsort(-loads, axis=1, kind="stable")
    return np.take_along_axis(copies, order, axis=1), np.take_along_axis(loads, order, axis=1)


def _place(shares_LE: np.ndarray, wanted_LE: np.ndarray, layout: ExpertLayout) -> tuple[np.ndarray, np.ndarray]:
    """Experts and loads of the slots of every rank, [L, G, S] each: heaviest slot first, to the lightest rank."""
    experts_LP, loads_LP = _items(shares_LE, wanted_LE, layout)
    layers, ranks, slots = len(experts_LP), layout.num_ranks, layout.slots_per_rank
    placed = np.full((layers, ranks, slots), -1, dtype=np.int64)
    placed_loads = np.zeros((layers, ranks, slots))
    holds = np.zeros((layers, layout.num_logical_experts, ranks), dtype=bool)
    rank_loads = np.zeros((layers, ranks))  # infinite when full
    filled = np.zeros((layers, ranks), dtype=np.int64)
    every = np.arange(layers)
    links = np.broadcast_to(np.arange(ranks), (layers, ranks)).copy()
    first_rank = np.full((layers, layout.num_logical_experts), -1)
    for expert, load in zip(experts_LP.T, loads_LP.T, strict=True):
        open_loads = np.where(holds[every, expert], np.inf, rank_loads)
        first = first_rank[every, expert]
        again = first >= 0
        if again.any():
            own = links[every, first]
            inside = again[:, None] & (links == own[:, None])
            rank = (open_loads + np.where(inside, SLACK, 0.0) + (open_loads + load[:, None] > NEARLY_FULL)).argmin(axis=1)
        else:
            rank = open_loads.argmin(axis=1)
        for layer in np.flatnonzero(np.isinf(open_loads[every, rank])):
            rank[layer] = _make_room(
                int(expert[layer]), placed[layer], placed_loads[layer], holds[layer], filled[layer]
            )
            rank_loads[layer] = np.where(filled[layer] == slots, np.inf, placed_loads[layer].sum(axis=1))
        if again.any():
            other = np.where(again, links[every, rank], -1)
            links = np.where(links == other[:, None], own[:, None], links)
        first_rank[every, expert] = np.where(again, first, rank)
        slot = filled[every, rank]
        placed[every, rank, slot] = expert
        placed_loads[every, rank, slot] = load
        holds[every, expert, rank] = True
        filled[every, rank] = slot + 1
        grown = rank_loads[every, rank] + load
        rank_loads[every, rank] = np.where(slot + 1 == slots, np.inf, grown)
    return placed, placed_loads


def _make_room(
    expert: int, placed_GS: np.ndarray, loads_GS: np.ndarray, holds_EG: np.ndarray, filled_G: np.ndarray
) -> int:
    """A full rank without `expert`, after one of its items went to a rank with room; all ranks with room hold `expert`.

    There is such an item: the full rank holds more experts than the other, which also holds `expert`.
    """
    taker = int(np.flatnonzero(filled_G < placed_GS.shape[1])[0])
    giver = int(np.flatnonzero(~holds_EG[expert])[0])
    slot = int(np.flatnonzero(~holds_EG[placed_GS[giver], taker])[-1])
    moved, last = placed_GS[giver, slot], filled_G[giver] - 1
    placed_GS[taker, filled_G[taker]], loads_GS[taker, filled_G[taker]] = moved, loads_GS[giver, slot]
    holds_EG[moved, taker], holds_EG[moved, giver] = True, False
    placed_GS[giver, slot], loads_GS[giver, slot] = placed_GS[giver, last], loads_GS[giver, last]
    placed_GS[giver, last], loads_GS[giver, last] = -1, 0.0
    filled_G[taker] += 1
    filled_G[giver] -= 1
    return giver


def _refine(experts_LGS: np.ndarray, loads_LGS: np.ndarray) -> None:
    """Exchange items between ranks, in place.  The largest load of a rank never grows."""
    ranks, slots = loads_LGS.shape[1:]
    counts = replica_counts(experts_LGS.reshape(len(loads_LGS), -1), int(experts_LGS.max()) + 1)
    for single, (size, most) in product((True, False), ROUNDS.items()):
        subsets = list(combinations(range(slots), size))
        if ranks == 1 or not subsets or len(subsets) > MOST_SUBSETS:
            continue
        active = np.arange(len(loads_LGS))
        stalled = 0
        for _ in range(most):
            largest = loads_LGS[active].sum(axis=2).max(axis=1)
            active = active[largest * ENOUGH > 1.0]
            if not len(active) or stalled >= PATIENCE:
                break
            experts, loads = experts_LGS[active], loads_LGS[active]
            _exchange(experts, loads, np.array(subsets), stalled, counts[active] if single else None)
            progress = loads.sum(axis=2).max(axis=1) < loads_LGS[active].sum(axis=2).max(axis=1) - 1e-7
            stalled = 0 if progress.any() else stalled + 1
            experts_LGS[active], loads_LGS[active] = experts, loads


def _exchange(experts_LGS: np.ndarray, loads_LGS: np.ndarray, subsets_CX: np.ndarray, shift: int, counts_LE: np.ndarray | None) -> None:
    """One round: every pair of a heavy and a light rank exchanges the subsets that leave the two most equal, in place.

    `shift` turns the light ranks against the heavy ones, so that other ranks meet.  Items whose expert the other rank
    holds stay.
    """
    rank_loads_LG = loads_LGS.sum(axis=2)
    order = np.argsort(-rank_loads_LG, axis=1, kind="stable")
    pairs = order.shape[1] // 2
    heavy, light = order[:, :pairs], np.roll(order[:, -pairs:][:, ::-1], shift, axis=1)
    every = np.arange(len(order))[:, None]
    experts_heavy, experts_light = experts_LGS[every, heavy], experts_LGS[every, light]  # [L, Q, S]
    loads_heavy, loads_light = loads_LGS[every, heavy], loads_LGS[every, light]
    shared = experts_heavy[..., :, None] == experts_light[..., None, :]
    stay_heavy, stay_light = shared.any(axis=3), shared.any(axis=2)
    if counts_LE is not None:
        stay_heavy |= counts_LE[every[..., None], experts_heavy] > 1
        stay_light |= counts_LE[every[..., None], experts_light] > 1
    give = np.where(stay_heavy, np.inf, loads_heavy)[..., subsets_CX].sum(axis=3)  # [L, Q, C]
    take = np.where(stay_light, -np.inf, loads_light)[..., subsets_CX].sum(axis=3)
    gap = rank_loads_LG[every, heavy] - rank_loads_LG[every, light]
    left = np.abs((give[..., :, None] - take[..., None, :]) - gap[..., None, None] / 2)
    left = left.reshape(*gap.shape, -1)
    best = left.argmin(axis=2)
    chosen = np.take_along_axis(left, best[..., None], axis=2)[..., 0] < np.abs(gap) / 2 - 1e-9
    layer, pair = np.nonzero(chosen)
    of_heavy, of_light = np.divmod(best[layer, pair], len(subsets_CX))
    heavy_slots, light_slots = subsets_CX[of_heavy], subsets_CX[of_light]  # [N, X]
    at_heavy = (layer[:, None], heavy[layer, pair][:, None], heavy_slots)
    at_light = (layer[:, None], light[layer, pair][:, None], light_slots)
    for table in (experts_LGS, loads_LGS):
        table[at_heavy], table[at_light] = table[at_light], table[at_heavy]
