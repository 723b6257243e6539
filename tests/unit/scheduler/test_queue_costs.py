"""The cost of an arrival, an abort and a retraction: the same however many requests wait.

Counted in executed instructions of Python, not in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.core.messages.io_struct import (
    AbortReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from rollout.core.sampling_params import SamplingParams
from tests.counted_costs import instructions
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m")


def waiting(folder: Path, count: int, *, spread: bool = False) -> Harness:
    """Return a paused engine with `count` requests in its queue, all of one priority, or each of one of 50."""
    harness = Harness(folder, max_queued_requests=100_000, max_total_tokens=600, max_running_requests=8)
    for number in range(4):
        harness.submit([number] * 8, rid=f"running {number}", params={"max_new_tokens": 50}, priority=9)
    for _ in range(3):
        harness.tick()
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    for number in range(count):
        harness.submit([7, number % 300], rid=f"waits {number}", priority=5 + (number * 7 % 50 if spread else 0))
    harness.tick()
    assert len(harness.scheduler.queues.waiting) == count
    return harness


def source(rid: str, priority: int = 0, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=list(prompt), sampling_params=params, priority=priority, **fields
    )


def urgent(harness: Harness) -> object:
    return harness.scheduler._dispatch(source("urgent", priority=-1))


def ordinary(harness: Harness) -> object:
    return harness.scheduler._dispatch(source("ordinary", priority=30))


def abort_of_a_waiting_one(harness: Harness) -> object:
    return harness.scheduler._dispatch(AbortReqInput(rids=["waits 40"]))


def abort_of_a_running_one(harness: Harness) -> object:
    return harness.scheduler._dispatch(AbortReqInput(rids=["running 1"]))


def abort_of_nobody(harness: Harness) -> object:
    return harness.scheduler._dispatch(AbortReqInput(rids=["nobody"]))


def retraction(harness: Harness) -> object:
    return harness.scheduler.retract(harness.scheduler.queues.holding_kv())


def count_of_those_that_have_begun(harness: Harness) -> object:
    return harness.scheduler.num_begun()


def state(harness: Harness) -> object:
    """Return the state that /health asks for."""
    return harness.scheduler._dispatch(GetStateReqInput(request_id="state"))


EVENTS = [
    state,
    urgent,
    ordinary,
    abort_of_a_waiting_one,
    abort_of_a_running_one,
    abort_of_nobody,
    retraction,
    count_of_those_that_have_begun,
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_costs_the_same_however_many_wait(folder: Path, event: Callable[[Harness], object]) -> None:
    """C10: the event is an arrival of any priority, an abort or a retraction."""
    few, many = (waiting(folder, count) for count in (50, 1500))
    instructions(lambda: event(waiting(folder, 50)))  # the first call looks some objects up
    assert instructions(lambda: event(many)) <= instructions(lambda: event(few)) + 20


def test_a_turn_that_admits_costs_the_same_however_many_wait_with_its_prompt(folder: Path) -> None:
    """C10: requests with the prompt that is being computed let others pass, up to the number that could run."""

    def admitting(count: int) -> int:
        harness = waiting(folder, 0)
        for number in range(count):
            harness.submit([3] * 30, rid=f"twin {number}")
        while harness.channel.inbox:
            harness.tick()
        harness.scheduler.serving.resume()
        return instructions(lambda: harness.scheduler.tick(0))

    assert admitting(1500) <= admitting(200) * 1.1


def test_the_order_is_that_of_priorities_and_arrivals_whoever_leaves(folder: Path) -> None:
    """C10: the order is compared with a list that is sorted anew each time."""
    rng = random.Random(5)
    for _ in range(20):
        harness = waiting(folder, 0)
        expected: list[tuple[int, int, str]] = []
        for number in range(60):
            if expected and rng.random() < 0.3:
                gone = rng.choice(expected)
                expected.remove(gone)
                harness.scheduler._dispatch(AbortReqInput(rids=[gone[2]]))
            else:
                priority = rng.randrange(-3, 3)
                harness.scheduler._dispatch(source(str(number), priority))
                expected.append((priority, number, str(number)))
        queue = harness.scheduler.queues.waiting
        assert queue.num_tokens == sum(req.num_tokens for req in queue)
        assert [req.rid for req in queue] == [rid for *_, rid in sorted(expected)]
        assert len(queue) == len(expected) and queue.num_begun == 0
        assert [queue[i].rid for i in range(len(queue))] == [req.rid for req in queue]
        with pytest.raises(IndexError):
            queue[len(queue)]
        harness.scheduler.retract(harness.scheduler.queues.holding_kv())
        assert [req.rid for req in queue][:4] == [f"running {number}" for number in range(4)] and queue.num_begun == 4
        assert [queue.popleft().rid for _ in range(len(queue))][4:] == [rid for *_, rid in sorted(expected)]
        assert not queue and not queue._new and not queue._priorities and not queue.num_tokens
