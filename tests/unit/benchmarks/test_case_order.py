"""The order of cases in rounds of a benchmark is balanced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from benchmarks.adapter_decode import case_order

Order = Callable[[list[str], int], list[str]]


def is_balanced(order: Order, count: int) -> bool:
    """Return whether each case has each place, and follows each other case, equally often in a whole cycle."""
    names = [f"case {number}" for number in range(count)]
    rounds = [order(names, turn) for turn in range(count * (2 if count % 2 else 1))]
    places = Counter((name, place) for names in rounds for place, name in enumerate(names))
    pairs = Counter(pair for names in rounds for pair in pairwise(names))
    of_all = len(places) == count**2 and len(pairs) == count * (count - 1)
    return of_all and len(set(places.values())) == len(set(pairs.values())) == 1


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_each_case_has_each_place_and_follows_each_other_equally_often(count: int) -> None:
    assert is_balanced(case_order, count)


def test_each_case_has_each_place_once_in_five_rounds() -> None:
    """The benchmark has five cases."""
    rounds = [case_order(list("abcde"), turn) for turn in range(5)]
    assert all(sorted(column) == list("abcde") for column in [*rounds, *zip(*rounds, strict=True)])


@pytest.mark.mutant
@pytest.mark.parametrize(
    "order",
    [
        lambda names, turn: names,
        lambda names, turn: names[turn % len(names) :] + names[: turn % len(names)],
        lambda names, turn: names[:: -1 if turn % 2 else 1],
    ],
    ids=["the same", "rotated", "there and back"],
)
def test_other_orders_are_not_balanced(order: Order) -> None:
    assert not is_balanced(order, 5)
