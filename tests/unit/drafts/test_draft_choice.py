"""`DraftChoice` verifies as many tokens as raise the rate, and none where plain decoding is faster.

A simulated machine gives the time of a step; the choice sees nothing else of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rollout.drafts.costs import DraftChoice, Kept

Machine = Callable[[int, bool], float]


def rate(seconds: Machine, kept: float, num_requests: int, *, drafts: bool, steps: int = 3000) -> float:
    """Return the tokens a second of requests whose drafted tokens are kept with this probability."""
    rng = random.Random(0)
    choice, owns = DraftChoice(), [Kept() for _ in range(num_requests)]
    tokens, elapsed = 0, 0.0
    for _ in range(steps):
        lengths = [8 if drafts else 0] * num_requests
        counts = choice.choose([choice.kept_rate(4, own) for own in owns], lengths, num_requests)
        for count, own in zip(counts, owns, strict=True):
            depth = 0
            while depth < count and rng.random() < kept:
                depth += 1
            tokens += 1 + depth
            if count:
                choice.note_draft(4, own, depth, min(depth + 1, count))
        took = seconds(num_requests + sum(counts), any(counts)) * rng.uniform(0.95, 1.1)
        elapsed += took
        choice.note_step(num_requests, sum(counts), took)
    return tokens / elapsed


def bound_by_bytes(tokens: int, verifies: bool) -> float:
    return 0.020 + 0.0002 * tokens + 0.001 * verifies


def bound_by_operations(tokens: int, verifies: bool) -> float:
    return 0.001 + 0.004 * tokens + 0.001 * verifies


@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("machine", [bound_by_bytes, bound_by_operations])
def test_drafts_never_cost_more_than_three_percent(machine: Machine, kept: float, num_requests: int) -> None:
    plain = rate(machine, kept, num_requests, drafts=False)
    assert rate(machine, kept, num_requests, drafts=True) > 0.97 * plain


def test_drafts_pay_where_steps_are_bound_by_bytes() -> None:
    plain = rate(bound_by_bytes, 0.9, 1, drafts=False)
    assert rate(bound_by_bytes, 0.9, 1, drafts=True) > 3.5 * plain
    assert rate(bound_by_bytes, 0.5, 4, drafts=True) > 1.4 * rate(bound_by_bytes, 0.5, 4, drafts=False)
    assert rate(bound_by_bytes, 0.5, 16, drafts=True) > 1.2 * rate(bound_by_bytes, 0.5, 16, drafts=False)


def test_a_slow_first_step_does_not_make_drafts_look_good_for_ever() -> None:
    """Plain steps are timed again from time to time, also while drafts are thought to pay."""
    choice, own = DraftChoice(), Kept()
    for _ in range(3):
        choice.note_step(1, 0, 0.1)
    plain = 0
    for _ in range(400):
        counts = choice.choose([choice.kept_rate(1, own)], [4], 1)
        if any(counts):
            choice.note_draft(1, own, 0, 1)
        choice.note_step(1, sum(counts), 0.02 if any(counts) else 0.01)
        plain += not any(counts)
    assert plain > 200


def test_a_request_is_judged_by_what_its_matches_promise() -> None:
    """Short matches that failed do not speak against a long one."""
    choice, others, own = DraftChoice(), Kept(), Kept()
    for _ in range(50):
        choice.note_draft(3, others, 0, 1)
        choice.note_draft(8, others, 4, 4)
    for _ in range(20):
        choice.note_draft(3, own, 0, 1)
    assert choice.kept_rate(3, own) < 0.1 and choice.kept_rate(8, own) > 0.5


def test_nothing_is_verified_before_a_plain_step_was_timed() -> None:
    assert DraftChoice().choose([0.9], [4], 1) == [0]
