"""A sender's wait for a bucket on its way: what one look finds, and what wakes it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from weight_sync.errors import WeightRequestError
from weight_sync.sender import link, update
from weight_sync.sender.link import Sending


class Group:
    """A group with one engine.  `finishing` is called while a broadcast is finished."""

    has_ended, is_shared, timeout_s = False, False, 60.0
    carrier = SimpleNamespace(reads_memory=False)

    def __init__(self) -> None:
        finish, note = lambda work, deadline: self.finishing(), lambda reason: None
        self.handle = SimpleNamespace(finish=finish, end_connecting=note)
        self.finishing: Any = lambda: None


def sending_of(group: Group, call: Future[Any], *, has_come: bool, answer_s: float = 2.0) -> Sending:
    bucket: Any = SimpleNamespace(num_bytes=1, answer_s=answer_s)
    sending = Sending(group, {"engine": call}, bucket)  # type: ignore[arg-type]
    sending._works.append(SimpleNamespace(is_completed=lambda: has_come))  # type: ignore[arg-type]
    return sending


@pytest.mark.parametrize("refusal", [None, WeightRequestError("no such tensor")])
def test_one_look_finds_that_all_has_come_and_the_answer(refusal: WeightRequestError | None) -> None:
    call: Future[Any] = Future()
    call.set_exception(refusal) if refusal else call.set_result({})
    sending = sending_of(Group(), call, has_come=True)
    assert sending.poll()
    assert sending.failures == ({"engine": refusal} if refusal else {})


def test_a_refusal_that_comes_during_the_look_is_not_overlooked() -> None:
    call: Future[Any] = Future()
    group, refusal = Group(), WeightRequestError("not finite")
    group.finishing = lambda: call.set_exception(refusal)
    sending = sending_of(group, call, has_come=True)
    assert sending.poll() and sending.failures == {"engine": refusal}


def test_a_broadcast_that_is_on_its_way_is_waited_for() -> None:
    call: Future[Any] = Future()
    call.set_result({})
    assert not sending_of(Group(), call, has_come=False).poll()


def test_an_answer_ends_the_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look by itself would be an hour later."""
    monkeypatch.setattr(update, "_POLL_S", 3600.0)
    monkeypatch.setattr(update, "_MAX_POLL_S", 3600.0)
    call: Future[Any] = Future()
    sending = sending_of(Group(), call, has_come=True)
    looks: list[bool] = []

    def look(one: Sending) -> bool:
        looks.append(one.poll())
        return looks[-1]

    waiting = threading.Thread(target=update.await_all, args=([sending], look, lambda: None), daemon=True)
    waiting.start()
    while not looks:
        waiting.join(0.01)
    call.set_result({})
    waiting.join(30.0)
    assert not waiting.is_alive() and looks == [False, True] and sending.failures == {}


def test_an_engine_that_falls_silent_once_all_is_sent_costs_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of one that is to verify and commit before it answers begins when all is sent."""
    now = 1000.0
    monkeypatch.setattr("weight_sync.sender.link.time.monotonic", lambda: now)
    group: Any = Group()
    group.leave_failed = lambda: None
    sending = sending_of(group, Future(), has_come=True, answer_s=60.0)  # as long as the bucket's own
    now = 1030.0
    assert not sending.poll() and sending.is_sent
    now = 1090.0 + link.GRACE_S
    assert not sending.poll()
    now += 0.1
    assert sending.poll() and "did not answer within 60 s" in str(sending.failures)
