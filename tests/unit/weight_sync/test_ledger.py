"""Counts and first names of a `WeightLedger`: right after each arrival, and as cheap for many tensors as for few."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from weight_sync import ledger as ledger_module
from weight_sync.ledger import WeightLedger

SHOWN = 10


def shown(ledger: WeightLedger) -> tuple[int, int, int, list[str], list[str]]:
    """Return what the state of an open update shows of it."""
    names = ledger.first_received(SHOWN), ledger.first_missing(SHOWN)
    return ledger.num_received, ledger.num_missing, ledger.num_bytes, *names


def play(seed: int, ledger_class: type[WeightLedger] = WeightLedger) -> None:
    """Let tensors arrive in random order, in plans of random length and singly; compare with plain sets of names."""
    rng = random.Random(seed)
    count = rng.randint(1, 60)
    names = [f"t{rng.random():.12f}" for _ in range(count)]
    sizes = np.array([rng.randint(0, 99) for _ in names])
    announced = sorted(rng.sample(range(count), rng.randint(1, count)))
    kept = np.array([rng.random() < 0.8 for _ in names])
    ledger = ledger_class(names, "full", np.array(announced), kept, sizes)
    due = {names[number] for number in announced if kept[number]}
    order, came = rng.sample(announced, len(announced)), list[int]()
    while order:
        numbers = [order.pop() for _ in range(min(len(order), rng.choice([1, 2, 9])))]
        if len(numbers) == 1 and rng.random() < 0.5:
            assert ledger.record(names[numbers[0]], names[numbers[0]])
        elif rng.random() < 0.2:
            ledger.record_elsewhere(np.array(numbers + came))
        else:
            ledger.record_all(np.array(numbers), [names[number] for number in numbers])
        came += numbers
        missing = sorted(due - {names[number] for number in came})
        if rng.random() < 0.7:
            received = [names[number] for number in came]
            counts = len(came), len(missing), int(sizes[came].sum())
            assert shown(ledger) == (*counts, received[:SHOWN], missing[:SHOWN])
            assert (ledger.received, ledger.missing) == (received, missing)


def cost_ratio(ledger_class: type[WeightLedger]) -> float:
    """Return how much more it costs to ask for the state of 200,000 tensors than of 2,000, half of which came."""
    seconds = []
    for count in (2_000, 200_000):
        names = [f"t{number:06d}" for number in range(count)]
        ledger = ledger_class(names, sizes=np.ones(count, dtype=np.int64))
        ledger.record_all(np.arange(0, count, 2), names[::2])
        shown(ledger)
        best = float("inf")
        for _ in range(30):
            start = time.process_time()
            for _ in range(5):
                shown(ledger)
            best = min(best, time.process_time() - start)
        seconds.append(best)
    return seconds[1] / seconds[0]


@pytest.mark.parametrize("look_at", [1, 4, 256])
def test_counts_and_first_names_are_right_after_each_arrival(monkeypatch: pytest.MonkeyPatch, look_at: int) -> None:
    monkeypatch.setattr(ledger_module, "_LOOK_AT", look_at)
    for seed in range(200):
        play(seed)


def test_a_state_of_many_tensors_costs_what_one_of_few_does_d4() -> None:
    """D4: 20 ms at 31,094 tensors, between two steps, for each bucket."""
    assert cost_ratio(WeightLedger) < 5


# --- wrong on purpose -------------------------------------------------------------------------------------------------


class Searching(WeightLedger):
    """Looks through all tensors for the first that are missing."""

    def first_missing(self, count: int) -> list[str]:
        return self.missing[:count]


class Forgetful(WeightLedger):
    """Does not ask again whether a tensor that was missing has come."""

    def first_missing(self, count: int) -> list[str]:
        kept = self._missing_first
        return [self.numbers.names[number] for number in kept[:count]] if len(kept) else super().first_missing(count)


class Repeating(WeightLedger):
    """Counts tensors that came before."""

    def record_elsewhere(self, numbers: np.ndarray) -> None:
        self._note(numbers)


def test_a_search_through_all_tensors_is_noticed() -> None:
    assert cost_ratio(Searching) > 20


@pytest.mark.parametrize("wrong", [Forgetful, Repeating])
def test_a_wrong_count_or_name_is_noticed(wrong: type[WeightLedger]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(200):
            play(seed, wrong)
