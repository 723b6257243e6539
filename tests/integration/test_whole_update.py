"""Refreshes of one call: a real `WeightSender` and a real engine process over gloo.

The engine carries out the begin, the bucket and the end of a call one by one, as a server does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.logical_weights_fake import NORM, fused, version
from tests.weight_engine_process import Engine, Refused
from tests.weight_group_helpers import TIMEOUT_S, content_of, in_background, names, seeds
from weight_sync.errors import TransactionStateError
from weight_sync.process_group import GroupHandle
from weight_sync.sender import EngineError, WeightSender

BUCKET = "update_weights_from_distributed"


class OneCall:
    """An engine that takes whole updates, as a server does.  `at(step)` is called before each of its three steps."""

    takes_lists = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.calls: list[str] = []
        self.at: Callable[[str], None] = lambda step: None
        self.states_it: Any = True

    def init_weights_update_group(self, **arguments: Any) -> dict[str, Any]:
        return self._engine.init_weights_update_group(**arguments) | {"whole_updates": self.states_it}

    def update_weights_from_distributed(
        self, *, whole_update: dict[str, Any] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        self.calls.append(BUCKET)
        if whole_update is None:
            return self._engine.update_weights_from_distributed(**arguments)
        begin = {name: arguments[name] for name in ("weight_version", "update_id")}
        begin["coverage"], stated = whole_update["coverage"], whole_update.get("fingerprints")
        if stated is not None:
            lists = {name: arguments[name] for name in ("names", "dtypes", "shapes")}
            begin["manifest"] = lists | {"fingerprints": stated}
        steps = {
            "begin": lambda: self._engine.begin_weight_update(**begin),
            "bucket": lambda: self._engine.update_weights_from_distributed(**arguments),
            "end": lambda: self._engine.end_weight_update(update_id=arguments["update_id"]),
        }
        refusals, answer = list[Refused](), dict[str, Any]()
        for name, step in steps.items():
            self.at(name)
            try:
                answer = step()
            except Refused as refusal:
                refusals.append(refusal)
        self.at("answer")
        if refusals:
            raise refusals[0]
        return answer

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self.calls.append(verb)
            return getattr(self._engine, verb)(**arguments)

        return call


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    engine = Engine(TIMEOUT_S)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[OneCall]:
    yield OneCall(shared_engine)
    shared_engine.settle()


@pytest.fixture
def sender(engine: OneCall) -> Iterator[WeightSender]:
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    engine.calls.clear()
    yield sender
    sender.close()


def content(engine: OneCall) -> list[str]:
    return engine._engine.call("content")


def refreshes_again(engine: OneCall, sender: WeightSender) -> bool:
    """Return whether the next refresh over the same group is taken."""
    seed = next(seeds)
    sender.refresh(version(seed).items())
    return content(engine) == content_of(seed)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_refresh_of_one_bucket_is_one_call(engine: OneCall, sender: WeightSender, with_manifest: bool) -> None:
    for _ in range(2):
        seed = next(seeds)
        report = sender.refresh(version(seed).items(), f"v{seed}", with_manifest=with_manifest)
        assert content(engine) == content_of(seed)
        (share,) = report.engines.values()
        assert share.committed and share.stall_seconds is not None and share.num_bytes == report.num_bytes
        assert sum(report.parts.values()) <= report.seconds and {"send", "end"} <= report.parts.keys()
        assert (report.digest == engine._engine.call("content_digest")) is with_manifest
    assert engine.calls == [BUCKET, BUCKET]


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_bytes": 60},
        {"progress": lambda done, total: None},
        {"begin_options": {"lease_s": 77.0}},
        {"coverage": "some"},
        {"source": fused, "split_experts": False},
    ],
    ids=["several buckets", "progress", "begin options", "unknown coverage", "no fingerprints"],
)
def test_other_refreshes_begin_and_end_by_calls_of_their_own(
    engine: OneCall, sender: WeightSender, options: dict[str, Any]
) -> None:
    seed = next(seeds)
    given = dict(options)
    tensors = given.pop("source", dict)(version(seed))
    sender.refresh(tensors, **given)
    assert content(engine) == content_of(seed)
    assert engine.calls[0] == "begin_weight_update" and engine.calls[-1] == "end_weight_update"


@pytest.mark.parametrize("states", [None, False, "yes"])
def test_an_engine_that_does_not_state_it_gets_three_calls(engine: OneCall, states: Any) -> None:
    engine.states_it = states
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    assert refreshes_again(engine, sender)
    assert engine.calls[-3:] == ["begin_weight_update", BUCKET, "end_weight_update"]
    sender.close()


def test_what_is_refused_changes_nothing_and_the_group_goes_on(
    engine: OneCall, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(engine)
    incomplete, with_nan = version(99), version(99)
    del incomplete[NORM]
    with_nan[NORM] = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    refused = [
        (incomplete, True, r"CoverageError.*manifest lacks 1"),  # by the begin
        (with_nan, False, r"ContentError.*not finite"),  # by the bucket
        (incomplete, False, r"CoverageError.*1 of 11 tensors missing"),  # by the end
    ]
    for tensors, with_manifest, reason in refused:
        with pytest.raises(EngineError, match=reason) as caught:
            sender.refresh(tensors.items(), with_manifest=with_manifest)
        assert caught.value.committed == [] and caught.value.unknown == []
        assert content(engine) == before and not engine._engine.call("status")["open"]
        assert refreshes_again(engine, sender)
        before = content(engine)
    with monkeypatch.context() as flipped:
        flip_bits(flipped)
        with pytest.raises(EngineError, match=r"ContentError.*fingerprint"):
            sender.refresh(version(99).items())
    assert content(engine) == before and refreshes_again(engine, sender)


def flip_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    send = GroupHandle.start_broadcast

    def flipped(group: GroupHandle, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        damaged = tensor.clone()
        damaged[0] ^= 1
        return send(group, damaged, timeout_s)

    monkeypatch.setattr(GroupHandle, "start_broadcast", flipped)


def test_the_update_of_another_sender_is_left_alone(engine: OneCall, sender: WeightSender) -> None:
    before = content(engine)
    engine._engine.call("begin", weight_version="other", coverage="full", update_id="another", bound=True)
    with pytest.raises(EngineError, match="already open"):
        sender.refresh(version(99).items())
    status = engine._engine.call("status")
    assert status["update_id"] == "another" and status["received"] == 0 and content(engine) == before
    engine._engine.settle()
    assert refreshes_again(engine, sender)


def test_a_piece_that_cannot_be_packed_ends_the_update(
    engine: OneCall, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is on its way by then: the group is left, which ends the engine's wait."""
    before = content(engine)

    def fail(*_: object) -> None:
        raise ValueError("a tensor is gone")

    with monkeypatch.context() as failing, pytest.raises(ValueError, match="a tensor is gone"):
        failing.setattr("weight_sync.sender.rooms.Ahead.__next__", fail)
        sender.refresh(version(next(seeds)).items())
    assert content(engine) == before and not engine._engine.call("status")["open"]
    sender.connect(group_name=next(names))
    assert refreshes_again(engine, sender)


def test_an_answer_that_does_not_come_is_asked_for(engine: OneCall, sender: WeightSender) -> None:
    """The connection breaks once the engine has committed: it has the new version, and nothing has failed."""

    def break_off(step: str) -> None:
        if step == "answer":
            raise ConnectionError("the connection broke")

    engine.at, seed = break_off, next(seeds)
    report = sender.refresh(version(seed).items(), f"v{seed}")
    assert report.engines["engine"].committed and content(engine) == content_of(seed)
    assert engine.calls == [BUCKET, "abort_weight_update", "weight_update"]


def test_a_connection_that_breaks_before_the_end_leaves_the_old_version(engine: OneCall, sender: WeightSender) -> None:
    before = content(engine)

    def break_off(step: str) -> None:
        if step == "end":
            raise ConnectionError("the connection broke")

    engine.at = break_off
    with pytest.raises(EngineError, match="the connection broke") as caught:
        sender.refresh(version(99).items())
    assert caught.value.committed == [] and caught.value.unknown == []
    assert content(engine) == before and not engine._engine.call("status")["open"]


def test_an_engine_has_the_deadline_of_a_call_to_verify_and_commit(
    engine: OneCall, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket's answer is due with the bucket, after 6 and 2 s; this one is due so long after its content."""
    link, go_on = sender._links["engine"], GroupHandle.start_broadcast
    link.timeout_s = 6.0

    def slow(group: GroupHandle, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        time.sleep(4.0)
        return go_on(group, tensor, timeout_s)

    monkeypatch.setattr(GroupHandle, "start_broadcast", slow)
    engine.at = lambda step: time.sleep(6.0 if step == "end" else 0.0)
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert content(engine) == content_of(seed) and "abort_weight_update" not in engine.calls
    link.timeout_s = TIMEOUT_S


@pytest.mark.parametrize("sent", [False, True])
def test_closing_on_another_thread_ends_with_one_outcome(
    engine: OneCall, sender: WeightSender, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """Before all is sent the refresh ends with an error, and the old version; afterwards with the new version."""
    before, seed = content(engine), next(seeds)
    under_way, closing, go_on = threading.Event(), threading.Event(), GroupHandle.start_broadcast

    def held(group: GroupHandle, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        if not sent:
            under_way.set()
            assert closing.wait(TIMEOUT_S)
            return go_on(group, tensor[:0], timeout_s)  # less than was announced
        return go_on(group, tensor, timeout_s)

    def at(step: str) -> None:
        if sent and step == "end":
            under_way.set()
            assert closing.wait(TIMEOUT_S)
            time.sleep(0.1)

    engine.at = at
    monkeypatch.setattr(GroupHandle, "start_broadcast", held)
    outcome = in_background(lambda: sender.refresh(version(seed).items()))
    assert under_way.wait(TIMEOUT_S)
    sender._closing.set()  # as `close` does first
    closing.set()
    ended = outcome(TIMEOUT_S)
    if sent:
        assert ended is None and content(engine) == content_of(seed)
    else:
        assert isinstance(ended, TransactionStateError) and "is being closed" in str(ended), ended
        assert content(engine) == before and not engine._engine.call("status")["open"]
