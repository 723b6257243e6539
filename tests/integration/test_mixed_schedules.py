"""Random schedules of everything that a scheduler can be asked: each request has the bits that it has alone.

`python -m tests.mixed replay SEED` plays one again; `make nightly` plays thousands.
"""

from __future__ import annotations

import random

import pytest

from tests.mixed.checker import Tally
from tests.mixed.many import Played, Report
from tests.mixed.play import MixedFailed, play
from tests.mixed.schedule import Steps, Submit, decode, encode, schedule_of
from tests.mixed.shrink import shrink
from tests.mixed.wrong_engines import WRONG_ENGINES, notices, schedules_until_noticed
from tests.mixed.zoo import Zoo
from tests.tiers import in_the_gate

SEEDS = range(300)
GATE_SEEDS = range(36, 56)  # a mask over the limit follows a retraction at once in three of them
NUM_TO_CATCH = 100  # schedules within which a wrong engine must be noticed; most are within ten


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("mixed"))


def test_each_request_is_as_if_it_were_alone(zoo: Zoo) -> None:
    """C1: whatever ends a request and when, no KV slot is in two places, and nothing is computed on KV of others."""
    tally = Tally()
    for seed in GATE_SEEDS if in_the_gate() else SEEDS:
        tally.add(play(schedule_of(seed, zoo.shapes), zoo))
    # Enough happened for the checks to mean something.
    few = {name: count for name, count in vars(tally).items() if count < (1 if in_the_gate() else 50)}
    assert not few, f"{few} of {tally}"
    assert tally.alone > tally.requests // 2


def test_a_schedule_is_the_same_each_time(zoo: Zoo) -> None:
    schedule = schedule_of(7, zoo.shapes)
    assert encode(schedule_of(7, zoo.shapes)) == encode(schedule) != encode(schedule_of(8, zoo.shapes))
    assert decode(encode(schedule)) == schedule
    random.seed(1)
    assert play(schedule, zoo) == play(decode(encode(schedule)), zoo)


@pytest.mark.parametrize(("each", "grows"), [(0.0, False), (0.05, False), (0.5, True)])
def test_a_run_says_whether_memory_grows(each: float, grows: bool) -> None:
    """Memory grows by `each` MB a schedule, and 30 MB more come and go."""
    report = Report()
    for seed in range(500):
        memory = 500.0 + each * seed + 30 * (seed % 3 == 0) if seed % 20 == 0 else None
        report.add(Played(seed, 1, Tally(), memory=memory))
    assert report.settled_memory() and report.grows is grows


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG_ENGINES)
def test_wrong_engines_are_noticed(zoo: Zoo, name: str) -> None:
    _, noticed = schedules_until_noticed(name, zoo, NUM_TO_CATCH)
    assert noticed is not None


@pytest.mark.mutant
def test_a_failure_is_made_smaller_and_can_be_played_again(zoo: Zoo) -> None:
    """It ends with what is needed: a request, and a turn in which the score of another row is returned."""
    wrong = WRONG_ENGINES["returns_the_score_of_another_row"]
    schedule = next(
        found for seed in range(NUM_TO_CATCH) if notices(wrong, found := schedule_of(seed, zoo.shapes), zoo) is not None
    )
    with wrong():
        with pytest.raises(MixedFailed) as caught:
            play(schedule, zoo)
        smaller = shrink(caught.value, zoo).schedule
        assert len(smaller.actions) < min(4, len(schedule.actions))
        assert all(isinstance(action, Submit | Steps) for action in smaller.actions)
        with pytest.raises(MixedFailed, match="log-probabilities"):
            play(decode(encode(smaller)), zoo)
