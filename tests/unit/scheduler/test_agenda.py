"""Pending work between two steps: its turn and its order, and the cost of a turn without any."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout.control.weight_queue import Job, replies
from rollout.core.messages.io_struct import FlushCacheReqInput, PauseGenerationReqInput
from rollout.core.messages.message import NoReply
from rollout.scheduler.agenda import Agenda
from rollout.scheduler.channel import LocalChannel
from tests.call_recorder import Call, Recorder, is_poll, steady, turns_of
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import control_of
from tests.scheduler_harness import Harness

ROOT = Path(__file__).resolve().parents[3]
MAX_STEP_CALLS, MAX_IDLE_CALLS = 99, 19


class Clock(LocalChannel):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    @property
    def now(self) -> float:
        return self.seconds


class Diary:
    """An agenda of three tasks, and the tasks that ran in each turn."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.agenda = Agenda(self.clock)
        self.done: list[str] = []
        self.then: dict[str, Callable[[], None]] = {}
        self.agenda.order = [self.first, self.second, self.third]

    def first(self) -> None:
        self._do("first")

    def second(self) -> None:
        self._do("second")

    def third(self) -> None:
        self._do("third")

    def _do(self, name: str) -> None:
        self.done.append(name)
        self.then.get(name, lambda: None)()

    def turn(self) -> list[str]:
        self.done = []
        self.agenda.run()
        return self.done


def test_pending_work_is_done_once_in_its_order() -> None:
    diary = Diary()
    assert diary.turn() == []
    for work in (diary.third, diary.first, diary.third):
        diary.agenda.call(work)
    assert diary.turn() == ["first", "third"] and diary.turn() == []


def test_work_makes_later_work_pending_in_this_turn_and_other_work_in_the_next() -> None:
    diary = Diary()
    diary.then["second"] = lambda: [diary.agenda.call(w) for w in (diary.first, diary.second, diary.third)] and None
    diary.agenda.call(diary.second)
    assert diary.turn() == ["second", "third"]
    diary.then.clear()
    assert diary.turn() == ["first", "second"] and diary.turn() == []


def test_a_deadline_comes_once_and_exactly() -> None:
    diary = Diary()
    diary.agenda.call_at(diary.second, 5.0)
    diary.agenda.call_at(diary.first, 7.0)
    diary.clock.seconds = math.nextafter(5.0, 0.0)
    assert diary.turn() == []
    diary.clock.seconds = 5.0
    assert diary.turn() == ["second"] and diary.turn() == []
    diary.agenda.call_at(diary.first, 6.0)  # in place of 7
    diary.clock.seconds = 6.5
    assert diary.turn() == ["first"]
    diary.clock.seconds = 100.0
    assert diary.turn() == []
    diary.agenda.call_at(diary.third, 90.0)
    diary.agenda.call_at(diary.third, math.inf)
    assert diary.turn() == []


def test_deadlines_against_a_plain_list() -> None:
    diary, rng = Diary(), random.Random(3)
    works = {"first": diary.first, "second": diary.second, "third": diary.third}
    due: dict[str, float] = {}
    for _ in range(2000):
        name = rng.choice(list(works))
        due[name] = rng.choice([diary.clock.seconds + rng.randrange(-2, 6), math.inf])
        diary.agenda.call_at(works[name], due[name])
        diary.clock.seconds += rng.random()
        expected = [name for name in works if due.get(name, math.inf) <= diary.clock.seconds]
        assert diary.turn() == expected
        due = {name: when for name, when in due.items() if name not in expected}


def test_no_call_of_another_thread_is_lost() -> None:
    diary, ended, handled = Diary(), [0], [0]

    def handle() -> None:
        handled[0] = ended[0]

    def end() -> None:
        for _ in range(3000):
            ended[0] += 1
            diary.agenda.call(diary.second)

    diary.then["second"] = handle
    thread = threading.Thread(target=end)
    thread.start()
    while thread.is_alive():
        diary.turn()
    diary.turn()
    assert handled == ended == [3000]


def test_work_without_a_place_is_refused() -> None:
    diary = Diary()
    for wrong in (diary.turn, lambda: None):
        with pytest.raises(AssertionError, match="has no place in the order"):
            diary.agenda.call(wrong)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="has no place in the order"):
            diary.agenda.call_at(wrong, 1.0)  # type: ignore[arg-type]


# --- costs of a turn ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tiny_checkpoint(tmp_path_factory.mktemp("agenda") / "m", "moe"))


def recorded_turns(harness: Harness, count: int) -> list[list[Call]]:
    recorder = Recorder(ROOT)
    recorder.start()
    try:
        for _ in range(count):
            harness.tick()
    finally:
        recorder.stop()
    return turns_of(recorder.calls())


def polls(turns: list[list[Call]]) -> set[str]:
    return {call.function.name for turn in turns for call in turn if is_poll(call)}


@torch.inference_mode()  # as the loop runs: else no forward is recorded
def test_a_steady_decode_step_asks_nothing_between_steps(harness: Harness) -> None:
    harness.generate([[5, 9, 2], [4], [8, 1]], {"max_new_tokens": 20})
    harness.submit([5, 9, 2], params={"max_new_tokens": 60})
    for _ in range(20):
        harness.tick()  # steps of two sizes have recorded the forward
    turns = recorded_turns(harness, 20)
    harness.run()
    assert len(turns) == 20 and polls(turns) == {"Agenda.run"}
    assert len(steady(turns)) <= MAX_STEP_CALLS


def test_an_idle_turn_costs_one_check(harness: Harness) -> None:
    turns = recorded_turns(harness, 5)
    assert polls(turns) == {"Agenda.run"} and len(steady(turns)) <= MAX_IDLE_CALLS


def test_what_is_pending_is_seen_by_the_recorder(harness: Harness) -> None:
    """Otherwise the two tests above could not fail."""
    harness.post(PauseGenerationReqInput)
    turns = recorded_turns(harness, 2)
    assert "WeightQueue.advance" in polls(turns[:1]) and polls(turns[1:]) == {"Agenda.run"}
    harness.scheduler.serving.resume()


def test_a_turn_does_not_ask_whether_io_has_ended(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, may_end, ends = control_of(harness.scheduler)._queue, threading.Event(), threading.Event()
    monkeypatch.setattr(queue, "_wake", ends.set)  # comes after the agenda has learnt of the end
    monkeypatch.setitem(harness.scheduler._verbs, FlushCacheReqInput, queue.put)
    monkeypatch.setitem(
        queue._planners, FlushCacheReqInput, lambda verb: Job(verb, lambda: may_end.wait(30), replies("", NoReply()))
    )
    flush = harness.post(FlushCacheReqInput)
    assert "WeightQueue._start" in polls(recorded_turns(harness, 1))
    assert polls(recorded_turns(harness, 3)) == {"Agenda.run"} and flush not in harness.answers
    may_end.set()
    assert ends.wait(30)
    assert "WeightQueue._finish" in polls(recorded_turns(harness, 1)) and harness.answers[flush].success
    assert polls(recorded_turns(harness, 3)) == {"Agenda.run"}
