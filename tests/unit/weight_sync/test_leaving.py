"""Engines that hang, and how a sender leaves them: all at the same time, after an interrupt, too, under each policy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weight_sync import joint_update
from weight_sync.engine_control import EngineError
from weight_sync.errors import TransactionStateError, TransportError
from weight_sync.sender import WeightSender, link, meeting
from weight_sync.sender.link import SenderGroup, leave_failed
from weight_sync.sender.lists import TensorLists
from weight_sync.sender.rank_refresh import RankRefresh
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.sender.refresh_plan import RefreshPlan
from weight_sync.sender.update import WeightUpdate
from weight_sync.tensor_meta import TensorMeta
from weight_sync.waiting import Patience

NAMES = "abcdefghijkl"


class Control:
    """An engine's control whose calls are noted.  `acts`: by verb, what a call does, such as to hang or to raise."""

    def __init__(self, **acts: Callable[[], Any]) -> None:
        self.acts, self.calls = acts, list[str]()

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(**fields: Any) -> Any:
            self.calls.append(verb)
            return self.acts.get(verb, dict)() or {}

        return call


@pytest.fixture
def hang() -> Iterator[Callable[[], Any]]:
    """Yield a call that waits for the end of the test."""
    end = threading.Event()
    yield lambda: end.wait(60) and None
    end.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "GRACE_S", 0.4)
    monkeypatch.setattr("weight_sync.sender.update.ABORT_S", 0.4)
    monkeypatch.setattr("weight_sync.joint_update.ABORT_S", 0.4)


def connected(controls: dict[str, Control], timeout_s: float = 0.4, **options: Any) -> tuple[WeightSender, list[str]]:
    """Return a sender with a group for each engine; and the names of the groups that it has left."""
    left: list[str] = []
    sender = WeightSender(controls, timeout_s=timeout_s, **options)
    for name, one in sender._links.items():
        handle: Any = SimpleNamespace(name=name, broken=False, destroy=lambda name=name: left.append(name))
        carrier: Any = SimpleNamespace(reads_memory=False)
        one.group = SenderGroup(handle, [one], carrier)
    return sender, left


def update_of(sender: WeightSender, **options: Any) -> WeightUpdate:
    return WeightUpdate(sender._links, sender._policy, torch.device("cpu"), {"update_id": "u"}, **options)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Have the next wait of a module end as Ctrl-C ends it."""
    wait = module.wait

    def interrupted(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupted)


def test_many_engines_that_hang_at_close_cost_one_deadline(hang: Callable[[], Any]) -> None:
    sender, left = connected({name: Control(destroy_weights_update_group=hang) for name in NAMES})
    start = time.monotonic()
    with pytest.raises(EngineError) as caught:
        sender.close()
    assert time.monotonic() - start < 0.8 * len(NAMES) * 0.4  # of 0.4 s each
    assert list(caught.value.failures) == sorted(left) == list(NAMES) and sender.connected == []


def test_many_groups_that_broke_are_left_at_the_same_time(hang: Callable[[], Any]) -> None:
    sender, left = connected({name: Control(destroy_weights_update_group=hang) for name in NAMES})
    start = time.monotonic()
    leave_failed(sender._links.values())
    assert time.monotonic() - start < 0.8 * len(NAMES) * 0.4  # of 0.4 s each
    assert sorted(left) == list(NAMES) and sender.connected == []


def test_an_interrupt_of_close_leaves_no_name_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close could not leave the groups, as the first one has taken them from the engines."""
    sender, left = connected({"a": Control(), "b": Control()})
    interrupt_once(monkeypatch, link)
    with pytest.raises(KeyboardInterrupt):
        sender.close()
    assert sorted(left) == ["a", "b"] and sender.connected == []


def test_a_rendezvous_waits_until_the_group_before_has_been_left(hang: Callable[[], Any]) -> None:
    """An interrupt may have ended the wait for it."""
    sender, left = connected({"a": Control(destroy_weights_update_group=hang)})
    one = sender._links["a"]
    assert one.group is not None
    one.group.leave_failed()
    assert left == []
    seen: list[list[str]] = []

    def get_world_size() -> int:
        seen.append(list(left))
        return 1

    one._control.acts["get_world_size"] = get_world_size  # type: ignore[attr-defined]
    place = meeting.MeetingPlace("127.0.0.1", None, "g", "gloo", 2, False, "auto")  # of another size, so none joins
    place.join(sender._links, ["a"])
    assert seen == [["a"]]


def test_an_interrupt_gives_up_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[bool] = []

    def join(coming: Any, place: Any, patience: Patience) -> dict[str, BaseException]:
        until = time.monotonic() + 5
        while not patience.has_ended and time.monotonic() < until:
            time.sleep(0.01)
        given_up.append(patience.has_ended)
        return {}

    monkeypatch.setattr(meeting, "_join", join)
    interrupt_once(monkeypatch, meeting)
    with pytest.raises(KeyboardInterrupt):
        meeting._join_all([({}, None)] * 2)  # type: ignore[list-item]
    assert given_up == [True, True]


# --- an engine that gives no answer ----------------------------------------------------------------------------------


def broken() -> None:
    raise ConnectionError("gone")


def refusing() -> None:
    raise TransactionStateError("another update is open")


@pytest.mark.parametrize("policy", ["abort_all", "leave_out"])
def test_only_the_group_of_an_engine_that_gives_no_answer_is_left(policy: Any) -> None:
    controls = {"a": Control(), "b": Control(begin_weight_update=broken), "c": Control(begin_weight_update=refusing)}
    sender, left = connected(controls, on_engine_failure=policy)
    if policy == "abort_all":
        with pytest.raises(EngineError), update_of(sender):
            pass
    else:
        with update_of(sender):
            pass
    assert left == ["b"] and sender.connected == ["a", "c"]
    sender.close()


def test_an_engine_that_does_not_answer_an_abort_loses_its_group(hang: Callable[[], Any]) -> None:
    controls = {"a": Control(begin_weight_update=refusing), "b": Control(abort_weight_update=hang)}
    sender, left = connected(controls)
    with pytest.raises(EngineError, match="another update is open"), update_of(sender):
        pass
    assert left == ["b"] and sender.connected == ["a"]


def test_after_an_interrupt_close_does_not_wait_for_an_engine_that_hangs(
    monkeypatch: pytest.MonkeyPatch, hang: Callable[[], Any]
) -> None:
    """Its own error would take the place of the interrupt, which a caller that repeats refreshes then overlooks."""
    sender, left = connected({"a": Control(begin_weight_update=hang, destroy_weights_update_group=hang)}, 60.0)
    interrupt_once(monkeypatch, joint_update)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), update_of(sender):
            pass
    finally:
        sender.close()
    assert left == ["a"] and time.monotonic() - start < 10


@pytest.mark.parametrize("ends_well", [True, False])
def test_an_engine_that_is_removed_amid_an_update_holds_none_open(ends_well: bool) -> None:
    controls = {"a": Control(), "b": Control()}
    sender, left = connected(controls)
    with contextlib.suppress(ValueError), update_of(sender):
        sender.remove_engine("b")
        if not ends_well:
            raise ValueError
    last = "end_weight_update" if ends_well else "abort_weight_update"
    assert [control.calls[-1] for control in controls.values()] == [last, last]
    assert left == ["b"] and sender.connected == ["a"]


# --- engines that state what their ranks keep ------------------------------------------------------------------------


PARTS = {"placement_epoch": 1, "patterns": [[None]], "tensors": [0]}


def rank_refresh_of(sender: WeightSender) -> RankRefresh:
    """Return a refresh of one tensor, up to what engines state."""
    plan: Any = object.__new__(RefreshPlan)
    plan.contents = SimpleNamespace(lists=TensorLists.of([TensorMeta("x", torch.float32, (1,))]))
    refresh: Any = SimpleNamespace(plan=plan, ranks=None, parts={}, is_sender=True)
    room: Any = None
    return RankRefresh(sender._links, refresh, room, leaves_out=True)


def test_an_engine_that_does_not_state_its_parts_is_asked_for_nothing_more(hang: Callable[[], Any]) -> None:
    """It has cost a deadline by then.  Its own error is reported, and it is sent nothing."""
    controls = {"a": Control(weight_parts=lambda: PARTS), "b": Control(weight_parts=hang)}
    sender, left = connected(controls, on_engine_failure="leave_out", per_rank=True)
    one = rank_refresh_of(sender)
    assert list(one._stated()) == list(one._stated()) == ["a"]
    assert controls["b"].calls == ["weight_parts"]
    with update_of(sender, lost=one._lost) as update:
        pass
    assert "no answer to weight_parts" in str(update.engines["b"].error) and update.engines["a"].committed
    assert controls["b"].calls == ["weight_parts", "destroy_weights_update_group"] and left == ["b"]


def test_only_engines_that_refused_are_asked_whether_their_experts_moved() -> None:
    controls = {name: Control(weight_parts=lambda: PARTS) for name in "abc"}
    sender, _ = connected(controls, per_rank=True)
    failures = {"a": TransportError("no answer"), "b": TransactionStateError("the placement epoch is 1")}
    assert rank_refresh_of(sender)._moved(failures) == ["b"]
    assert [control.calls for control in controls.values()] == [[], ["weight_parts"], []]


# --- trainer ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0.5, 300.0])
def test_a_trainer_rank_outwaits_the_sending_one(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
    """An engine that hangs in its commit costs the sender more than deadlines.  All ranks then report the same."""
    monkeypatch.undo()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    last_bucket = timeout_s + 2 * link.GRACE_S + 2 * link.GRACE_S  # its reason, and to leave the group
    end = 2 * timeout_s + 2 * joint_update._ASK_S + joint_update.ABORT_S + 2 * link.GRACE_S
    assert TrainerRanks(object(), "cpu", timeout_s)._timeout_s > last_bucket + end  # type: ignore[arg-type]
