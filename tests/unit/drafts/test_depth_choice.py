"""`DepthChoice` drafts as deep as it pays with the draft's own time, and not at all where it does not.

A simulated machine gives the time of a step; the choice sees nothing else of it.
"""

from __future__ import annotations

import random

import pytest

from rollout.drafts.costs import Kept
from rollout.drafts.depth_choice import DepthChoice


def rate(forward: float, kept: float, num_requests: int, steps: int = 700) -> tuple[float, float]:
    """Return the tokens a second against plain decoding, and the mean depth in the second half of the steps.

    A plain step takes 20 ms and 0.2 ms a token, the draft's forward `forward` of that.
    """
    rng = random.Random(0)
    choice, owns = DepthChoice(), [Kept() for _ in range(num_requests)]
    tokens, elapsed, depths = 0, 0.0, []
    for _ in range(steps):
        counts = choice.choose([choice.kept_rate(0, own) for own in owns], [6] * num_requests, num_requests)
        for count, own in zip(counts, owns, strict=True):
            right = 0
            while right < count and rng.random() < kept:
                right += 1
            tokens += 1 + right
            if count:
                choice.note_draft(0, own, right, min(right + 1, count))
        step = 0.020 + 0.0002 * (num_requests + sum(counts))
        took = (step + 0.020 * forward * max(counts)) * rng.uniform(0.95, 1.1)
        elapsed += took
        depths.append(max(counts))
        choice.note_step(num_requests, sum(counts), took)
    plain = num_requests / ((0.020 + 0.0002 * num_requests) * 1.025)
    return tokens / elapsed / plain, sum(depths[steps // 2 :]) / (steps - steps // 2)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_cheap_draft_that_is_right_goes_deep_and_pays(num_requests: int) -> None:
    gain, depth = rate(0.05, 0.9, num_requests)
    assert gain > 2.5 and depth > 4


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize(("forward", "kept"), [(1.0, 0.95), (0.3, 0.1), (0.1, 0.0)])
def test_a_draft_that_costs_more_than_it_gives_is_left_alone(forward: float, kept: float, num_requests: int) -> None:
    gain, depth = rate(forward, kept, num_requests)
    assert gain > 0.94 and depth < 0.2


def test_a_dear_draft_goes_less_deep() -> None:
    assert rate(0.3, 0.8, 1)[1] < rate(0.05, 0.8, 1)[1]


def test_nothing_is_drafted_before_a_plain_step_was_timed() -> None:
    assert DepthChoice().choose([0.9], [4], 1) == [0]


def test_a_step_that_it_did_not_choose_teaches_nothing_of_a_depth() -> None:
    choice = DepthChoice()
    choice.note_step(1, 3, 0.1)
    for _ in range(3):
        choice.note_step(1, 0, 0.1)
    assert choice.choose([0.9], [3], 1) == [3]


def test_a_depth_that_was_slow_once_is_tried_until_its_time_is_known() -> None:
    """A step in which the draft catches up with the tokens of plain steps is not timed, and teaches nothing."""
    choice = DepthChoice()
    for _ in range(4):
        choice.note_step(1, 0, 0.01)
    depth = choice.choose([0.99], [3], 1)[0]
    choice.note_step(1, depth, 0.3)
    while not choice.choose([0.99], [3], 1)[0]:
        choice.note_step(1, 0, 0.01)
    assert choice.choose([0.99], [3], 1)[0], "the time of the step before is not known"
