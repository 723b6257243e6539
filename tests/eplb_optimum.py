"""Exact optima for small layers by enumeration: the best even placement, and the fewest copies under a weighted split.

A division of tokens over replicas gets every rank under a cap if and only if, for every set of ranks, the experts that
live only among them have no more load than the cap allows in all (Hall's condition), so no solver is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

Placement = tuple[frozenset[int], ...]  # experts of every rank


def weighted_maximum(shares: list[float], placement: Placement) -> float:
    """Return the least possible largest load of a rank."""
    worst = 0.0
    ranks = range(len(placement))
    for size in range(1, len(placement) + 1):
        for inside in combinations(ranks, size):
            outside = set().union(*(placement[rank] for rank in ranks if rank not in inside))
            only = sum(share for expert, share in enumerate(shares) if expert not in outside)
            worst = max(worst, only / size)
    return worst


def even_maximum(shares: list[float], placement: Placement) -> float:
    counts = [sum(expert in held for held in placement) for expert in range(len(shares))]
    return max(sum(shares[expert] / counts[expert] for expert in held) for held in placement)


def placements(num_experts: int, num_ranks: int, slots: int) -> Iterator[Placement]:
    """Yield every placement without duplicates that covers every expert."""
    choices = [frozenset(choice) for choice in combinations(range(num_experts), slots)]
    for placement in product(choices, repeat=num_ranks):
        if len(frozenset().union(*placement)) == num_experts:
            yield placement


def placements_after(current: Placement, num_experts: int, copies: int) -> Iterator[Placement]:
    """Yield every placement without duplicates that covers every expert and takes exactly `copies` copies."""

    def changed(rank: int, left: int) -> Iterator[list[frozenset[int]]]:
        if rank == len(current):
            if not left:
                yield []
            return
        held = current[rank]
        absent = [expert for expert in range(num_experts) if expert not in held]
        for count in range(min(left, len(held), len(absent)) + 1):
            for rest in changed(rank + 1, left - count):
                for dropped in combinations(sorted(held), count):
                    for added in combinations(absent, count):
                        yield [(held - set(dropped)) | set(added), *rest]

    for placement in changed(0, copies):
        if len(frozenset().union(*placement)) == num_experts:
            yield tuple(placement)


def can_reach(shares: list[float], current: Placement, cap: float, copies: int) -> bool:
    """Return whether at most `copies` copies lead to a placement whose weighted split is within the cap."""
    return any(
        weighted_maximum(shares, placement) <= cap
        for count in range(copies + 1)
        for placement in placements_after(current, len(shares), count)
    )
