"""Ranks made even: the heaviest rank meets the lightest, the second heaviest the second lightest, and so on.

Each pair exchanges one item for one, later two for two, whichever leaves the two most equal.  At first only experts
with one slot change ranks, so that what links ranks stays where it is; then all do.  Many layers
are computed at once.

Shapes: L MoE layers, G ranks, S slots of a rank, Q pairs of ranks, C subsets of X slots of a rank.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np

ENOUGH = 0.9997  # a layer this balanced is not refined further
ROUNDS = {1: 40, 2: 60}  # the most rounds, by the number of items exchanged
PATIENCE = 12  # rounds without progress, each with other pairs, after which a layer takes larger exchanges
PROGRESS = 1e-6  # by which the largest load of a rank falls in a round that counts
MAX_SUBSETS = 200  # of a rank; larger exchanges are not searched


def refine(experts_LGS: np.ndarray, loads_LGS: np.ndarray, replicated_LGS: np.ndarray) -> None:
    """Exchange items between ranks, in place in all three.  The largest load of a rank never grows.

    `experts_LGS` int64 and `loads_LGS` float64, in multiples of the mean load of a rank, of every slot;
    `replicated_LGS` bool: the slot's expert has other slots.
    """
    ranks, slots = loads_LGS.shape[1:]
    for single, (size, most) in product((True, False), ROUNDS.items()):
        subsets = np.array(list(combinations(range(slots), size)))
        if ranks == 1 or not len(subsets) or len(subsets) > MAX_SUBSETS:
            continue
        active = np.arange(len(loads_LGS))
        stalled = np.zeros(len(loads_LGS), dtype=np.int64)
        for _ in range(most):
            largest = loads_LGS[active].sum(axis=2).max(axis=1)
            going = (largest * ENOUGH > 1.0) & (stalled < PATIENCE)
            active, largest, stalled = active[going], largest[going], stalled[going]
            if not len(active):
                break
            experts, loads, replicated = experts_LGS[active], loads_LGS[active], replicated_LGS[active]
            _exchange(experts, loads, replicated, subsets, stalled, single)
            experts_LGS[active], loads_LGS[active], replicated_LGS[active] = experts, loads, replicated
            progress = loads.sum(axis=2).max(axis=1) < largest - PROGRESS
            stalled = np.where(progress, 0, stalled + 1)


def _exchange(
    experts_LGS: np.ndarray,
    loads_LGS: np.ndarray,
    replicated_LGS: np.ndarray,
    subsets_CX: np.ndarray,
    shift_L: np.ndarray,
    single: bool,
) -> None:
    """Run one round: every pair of a heavy and a light rank exchanges the subsets that leave the two most equal, in
    place.

    `shift_L` turns the light ranks of a layer against its heavy ones, so that other ranks meet.  Items whose expert the
    other rank holds stay; with `single`, items of replicated experts stay too.
    """
    rank_loads_LG = loads_LGS.sum(axis=2)
    order = np.argsort(-rank_loads_LG, axis=1, kind="stable")
    ranks, pairs = order.shape[1], order.shape[1] // 2
    every = np.arange(len(order))[:, None]
    heavy, light = order[:, :pairs], order[every, ranks - 1 - (np.arange(pairs) - shift_L[:, None]) % pairs]
    experts_heavy, experts_light = experts_LGS[every, heavy], experts_LGS[every, light]  # [L, Q, S]
    shared = experts_heavy[..., :, None] == experts_light[..., None, :]
    heavy_stays, light_stays = shared.any(axis=3), shared.any(axis=2)
    if single:
        heavy_stays |= replicated_LGS[every, heavy]
        light_stays |= replicated_LGS[every, light]
    give = np.where(heavy_stays, np.inf, loads_LGS[every, heavy])[..., subsets_CX].sum(axis=3)  # [L, Q, C]
    take = np.where(light_stays, -np.inf, loads_LGS[every, light])[..., subsets_CX].sum(axis=3)
    gap = rank_loads_LG[every, heavy] - rank_loads_LG[every, light]
    left = np.abs((give[..., :, None] - take[..., None, :]) - gap[..., None, None] / 2)
    left = left.reshape(*gap.shape, -1)
    best = left.argmin(axis=2)
    chosen = np.take_along_axis(left, best[..., None], axis=2)[..., 0] < np.abs(gap) / 2 - 1e-9
    layer, pair = np.nonzero(chosen)
    of_heavy, of_light = np.divmod(best[layer, pair], len(subsets_CX))
    at_heavy = (layer[:, None], heavy[layer, pair][:, None], subsets_CX[of_heavy])  # [N, X] each
    at_light = (layer[:, None], light[layer, pair][:, None], subsets_CX[of_light])
    for table in (experts_LGS, loads_LGS, replicated_LGS):
        table[at_heavy], table[at_light] = table[at_light], table[at_heavy]
