"""One sender, two real engine processes: together, or with one that refuses, dies or hangs, under both policies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.logical_weights_fake import version
from tests.ports import free_ports_in_a_row
from tests.weight_engine_process import Engine
from tests.weight_group_helpers import TIMEOUT_S, Meddling, content_of, names, seeds
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.sender import EngineError, WeightSender
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.link import Bucket, start_pieces
from weight_sync.sender.lists import TensorLists
from weight_sync.tensor_meta import TensorMeta

pytestmark = pytest.mark.full

POLICIES = ("abort_all", "leave_out")
OLD = 0  # the seed that engines start with


@contextmanager
def two_engines(timeout_s: float = TIMEOUT_S) -> Iterator[dict[str, Engine]]:
    engines = {"a": Engine(timeout_s), "b": Engine(timeout_s)}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.kill()


@pytest.fixture(scope="module")
def shared_engines() -> Iterator[dict[str, Engine]]:
    with two_engines() as engines:
        yield engines


@pytest.fixture
def engines(shared_engines: dict[str, Engine]) -> Iterator[dict[str, Engine]]:
    yield shared_engines
    for engine in shared_engines.values():
        engine.settle()


def sender_for(controls: dict[str, Any], timeout_s: float = TIMEOUT_S, **options: Any) -> WeightSender:
    sender = WeightSender(controls, timeout_s=timeout_s, **options)
    sender.connect(group_name=next(names))
    return sender


def contents(engines: dict[str, Engine]) -> dict[str, Any]:
    return {name: engine.call("content") for name, engine in engines.items()}


def refused_at(verb: str, nth: int = 1) -> Callable[[str, dict[str, Any]], None]:
    left = nth

    def before(called: str, arguments: dict[str, Any]) -> None:
        nonlocal left
        if called == verb:
            left -= 1
            if left == 0:
                raise ConnectionError("meddled with")

    return before


def test_two_engines_and_two_phases(engines: dict[str, Engine]) -> None:
    controls = {name: Meddling(engine, lambda verb, arguments: None) for name, engine in engines.items()}
    sender = sender_for(controls)
    seed = next(seeds)
    report = sender.refresh(version(seed), f"v{seed}", bucket_bytes=40)
    assert contents(engines) == dict.fromkeys(engines, content_of(seed))
    for name, engine in report.engines.items():
        assert engine.committed and engine.error is None and engine.num_bytes == report.num_bytes
        assert engine.stall_seconds is not None and 0 < engine.stall_seconds < engine.seconds <= report.seconds
        assert engines[name].call("content_digest") == report.digest
        assert controls[name].calls[-2:] == ["end_weight_update:verify", "end_weight_update:commit"]
    assert report.left_out == []
    sender.close()


def test_no_engine_commits_before_all_have_verified(engines: dict[str, Engine]) -> None:
    """One engine verifies late: the other still has the old weights then."""
    seen: list[Any] = []
    before = contents(engines)["a"]

    def look(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "end_weight_update:verify":
            time.sleep(0.3)
            seen.append(engines["a"].call("content"))
            seen.append(engines["a"].call("status")["state"])

    sender = sender_for({"a": engines["a"], "b": Meddling(engines["b"], look)})
    sender.refresh(version(next(seeds)))
    assert seen == [before, "verified"]
    sender.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", ["begin_weight_update", "update_weights_from_distributed", "end_weight_update:verify"])
def test_one_engine_fails_before_the_commit(engines: dict[str, Engine], policy: Any, verb: str) -> None:
    before = contents(engines)
    nth = 3 if verb == "update_weights_from_distributed" else 1
    controls = {"a": Meddling(engines["a"], lambda v, a: None), "b": Meddling(engines["b"], refused_at(verb, nth))}
    sender = sender_for(controls, on_engine_failure=policy)
    seed = next(seeds)
    start = time.monotonic()
    if policy == "abort_all":
        with pytest.raises(EngineError, match="engine b: ConnectionError: meddled with") as caught:
            sender.refresh(version(seed), bucket_bytes=40)
        assert caught.value.failures.keys() == {"b"} and caught.value.committed == []
        assert contents(engines) == before
        assert not any(call.startswith("end_weight_update:commit") for call in controls["a"].calls)
    else:
        report = sender.refresh(version(seed), bucket_bytes=40)
        assert report.left_out == ["b"] and "meddled with" in str(report.engines["b"].error)
        assert contents(engines) == {"a": content_of(seed), "b": before["b"]}
    assert time.monotonic() - start < 8
    assert not any(engine.call("status")["open"] for engine in engines.values())
    if "b" not in sender.connected:
        sender.connect(group_name=next(names))
    seed = next(seeds)
    sender.refresh(version(seed), bucket_bytes=40)
    assert contents(engines) == dict.fromkeys(engines, content_of(seed))
    sender.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_one_engine_fails_to_commit(engines: dict[str, Engine], policy: Any) -> None:
    """The other engine has committed and keeps the new version; under "abort_all" the error names it."""
    before = contents(engines)
    controls = {"a": engines["a"], "b": Meddling(engines["b"], refused_at("end_weight_update:commit"))}
    sender = sender_for(controls, on_engine_failure=policy)
    seed = next(seeds)
    if policy == "abort_all":
        with pytest.raises(EngineError, match=r"engine b: .* committed despite the failure: a") as caught:
            sender.refresh(version(seed))
        assert caught.value.committed == ["a"] and caught.value.unknown == []
    else:
        assert sender.refresh(version(seed)).left_out == ["b"]
    assert contents(engines) == {"a": content_of(seed), "b": before["b"]}
    assert not engines["b"].call("status")["open"]
    sender.close()


class Late(Meddling):
    """The engine does what it is asked, and its answers to some calls take `seconds`."""

    def __init__(self, engine: Engine, verbs: tuple[str, ...], seconds: float) -> None:
        super().__init__(engine, lambda verb, arguments: None)
        self._verbs, self._seconds = verbs, seconds

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        passed_on = super().__getattr__(verb)

        def call(**arguments: Any) -> Any:
            reply = passed_on(**arguments)
            if self.calls[-1] in self._verbs:
                time.sleep(self._seconds)
            return reply

        return call


@pytest.mark.parametrize("policy", POLICIES)
def test_w12_an_engine_that_commits_after_the_deadline_has_committed(engines: dict[str, Engine], policy: Any) -> None:
    late = Late(engines["b"], ("end_weight_update:commit",), 1.5)
    sender = sender_for({"a": engines["a"], "b": late}, on_engine_failure=policy)
    seed = next(seeds)
    with_deadline(sender, 0.7)
    report = sender.refresh(version(seed), f"v{seed}")
    assert report.left_out == [] and report.engines["b"].committed and not report.engines["b"].unknown
    assert "weight_update" in late.calls and contents(engines) == dict.fromkeys(engines, content_of(seed))
    with_deadline(sender, TIMEOUT_S).close()


@pytest.mark.parametrize("policy", POLICIES)
def test_w12_of_an_engine_that_falls_silent_at_its_commit_nothing_is_claimed(
    engines: dict[str, Engine], policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_sync.joint_update._ASK_S", 0.3)
    verbs = ("end_weight_update:commit", "abort_weight_update", "weight_update")
    sender = sender_for({"a": engines["a"], "b": Late(engines["b"], verbs, 3.0)}, on_engine_failure=policy)
    seed = next(seeds)
    with_deadline(sender, 0.7)
    if policy == "abort_all":
        with pytest.raises(EngineError, match="not known whether committed: b") as caught:
            sender.refresh(version(seed))
        assert caught.value.committed == ["a"] and caught.value.unknown == ["b"]
        assert engines["b"].weight_update(update_id=str(caught.value.update_id))["outcome"] == "committed"
    else:
        report = sender.refresh(version(seed))
        assert report.left_out == ["b"] and report.engines["b"].unknown and not report.engines["a"].unknown
    assert contents(engines) == dict.fromkeys(engines, content_of(seed))
    with_deadline(sender, TIMEOUT_S).close()


@pytest.mark.parametrize(
    ("at", "fault", "policy"),
    [
        ("begin_weight_update", "kill", "leave_out"),
        ("begin_weight_update", "freeze", "leave_out"),
        ("bucket", "kill", "abort_all"),
        ("bucket", "kill", "leave_out"),
        ("bucket", "freeze", "abort_all"),
        ("end_weight_update:verify", "kill", "abort_all"),
        ("end_weight_update:verify", "kill", "leave_out"),
        ("end_weight_update:verify", "freeze", "leave_out"),
    ],
)
def test_one_engine_is_killed_or_hangs(at: str, fault: str, policy: Any) -> None:
    timeout_s = 2.0
    with two_engines() as engines:

        def strike(verb: str, arguments: dict[str, Any]) -> None:
            if verb == at:
                getattr(engines["b"], fault)()

        controls = {"a": engines["a"], "b": Meddling(engines["b"], strike)}
        sender = sender_for(controls, on_engine_failure=policy)
        sender = with_deadline(sender, timeout_s)

        def progress(done: int, total: int) -> None:
            if at == "bucket" and done < 100:
                getattr(engines["b"], fault)()

        start = time.monotonic()
        if policy == "abort_all":
            with pytest.raises(EngineError, match="engine b: "):
                sender.refresh(version(9), bucket_bytes=40, progress=progress)
            assert engines["a"].call("content") == content_of(OLD)
        else:
            report = sender.refresh(version(9), bucket_bytes=40, progress=progress)
            assert report.left_out == ["b"] and report.engines["a"].committed
            assert engines["a"].call("content") == content_of(9)
        assert time.monotonic() - start < timeout_s + 15
        assert not engines["a"].call("status")["open"]
        assert sender.connected == ["a"], "no group is kept with an engine that gave no answer"
        if policy == "leave_out":  # and the next one goes to the remaining engines
            assert sender.refresh(version(10)).engines["a"].committed
            assert engines["a"].call("content") == content_of(10)
        sender.close()


def with_deadline(sender: WeightSender, timeout_s: float) -> WeightSender:
    """Set a deadline from here on: a rendezvous may be slow for reasons of its own."""
    for link in sender._links.values():
        link.timeout_s = timeout_s
    return sender


def test_a_refresh_that_all_engines_refuse_changes_nothing(engines: dict[str, Engine]) -> None:
    controls = {name: Meddling(engine, refused_at("end_weight_update:verify")) for name, engine in engines.items()}
    sender = sender_for(controls, on_engine_failure="leave_out")
    before = contents(engines)
    with pytest.raises(EngineError, match=r"engine a: .*engine b: "):
        sender.refresh(version(next(seeds)))
    assert contents(engines) == before and not any(engine.call("status")["open"] for engine in engines.values())
    sender.close()


def test_another_trainers_update_is_not_aborted(engines: dict[str, Engine]) -> None:
    engines["b"].call("begin", weight_version="other", coverage="full")
    sender = sender_for(dict(engines))
    with pytest.raises(EngineError, match=r"engine b: .*already open"):
        sender.refresh(version(next(seeds)))
    assert engines["b"].call("status")["weight_version"] == "other"
    assert not engines["a"].call("status")["open"]
    sender.close()


def test_a_begin_that_is_late_leaves_nothing_open(engines: dict[str, Engine]) -> None:
    go = threading.Event()

    def dawdle(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "begin_weight_update":
            assert go.wait(20)

    late = Meddling(engines["b"], dawdle)
    sender = with_deadline(sender_for({"a": engines["a"], "b": late}), 0.5)
    with pytest.raises(EngineError, match=r"engine b: TransportError: no answer to begin_weight_update within 0\.5 s"):
        sender.refresh(version(next(seeds)))
    assert not engines["a"].call("status")["open"]
    go.set()
    deadline = time.monotonic() + 10
    while "abort_weight_update" not in late.calls:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while engines["b"].call("status")["open"]:
        assert time.monotonic() < deadline
    with_deadline(sender, TIMEOUT_S).close()


def test_connect_names_who_did_not_join(engines: dict[str, Engine]) -> None:
    def wrong_rank(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "init_weights_update_group" and controls["b"].calls.count(verb) == 1:
            arguments["rank_offset"] = 0

    controls: dict[str, Any] = {"a": engines["a"], "b": Meddling(engines["b"], wrong_rank)}
    sender = WeightSender(controls, timeout_s=TIMEOUT_S)
    with pytest.raises(EngineError, match=r"engine b: .*rank 0") as caught:
        sender.connect(group_name=next(names))
    assert caught.value.failures.keys() == {"b"} and sender.connected == ["a"]
    with pytest.raises(EngineError, match=r"engine b: .*not connected"):
        sender.refresh(version(next(seeds)))
    sender.connect(group_name=next(names))
    seed = next(seeds)
    sender.refresh(version(seed))
    assert contents(engines) == dict.fromkeys(engines, content_of(seed))
    with pytest.raises(TransactionStateError, match="already connected; close first"):
        sender.connect()
    sender.close()
    assert sender.connected == []


def test_an_update_block_sends_what_it_is_given(engines: dict[str, Engine]) -> None:
    sender = sender_for(dict(engines))
    seed = next(seeds)
    tensors = list(version(seed).items())
    with sender.update(f"v{seed}") as update:
        for name, tensor in tensors:
            sent = tensor.clone()
            update.send([(name, sent)])
            sent.zero_()  # a copy went
    assert contents(engines) == dict.fromkeys(engines, content_of(seed))
    assert update.buckets_sent == len(tensors) and all(engine.committed for engine in update.engines.values())
    with pytest.raises(TransactionStateError, match="the weight update has ended or was not entered"):
        update.send(tensors)
    sender.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_update_block_that_fails_aborts_and_never_ends(
    engines: dict[str, Engine], error: type[BaseException]
) -> None:
    before = contents(engines)
    controls = {name: Meddling(engine, lambda v, a: None) for name, engine in engines.items()}
    sender = sender_for(controls)
    with pytest.raises(error), sender.update("never") as update:
        update.send(list(version(99).items())[:5])
        raise error
    for name, control in controls.items():
        assert control.calls[-1] == "abort_weight_update" or error is KeyboardInterrupt
        assert "abort_weight_update" in control.calls
        assert not any(call.startswith("end_weight_update") for call in control.calls)
        assert not engines[name].call("status")["open"]
    assert contents(engines) == before
    if error is ValueError:
        sender.refresh(version(next(seeds)))  # the groups are as good as before
    sender.close()


def test_the_next_bucket_is_gathered_while_this_one_is_sent(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow engines and slow packing take the time of one of them, not of both."""
    pause_s = 0.15
    gather = Gatherer.gather

    def slow_gather(self: Gatherer, *arguments: Any) -> Any:
        time.sleep(pause_s)
        return gather(self, *arguments)

    def slow_engine(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "update_weights_from_distributed":
            time.sleep(pause_s)

    monkeypatch.setattr(Gatherer, "gather", slow_gather)
    sender = sender_for({name: Meddling(engine, slow_engine) for name, engine in engines.items()})
    seed = next(seeds)
    start = time.monotonic()
    report = sender.refresh(version(seed), bucket_bytes=50)
    seconds = time.monotonic() - start
    assert report.num_buckets >= 5
    one, both = report.num_buckets * pause_s, 2 * report.num_buckets * pause_s
    assert one < seconds < (one + both) / 2 + 0.2
    assert contents(engines) == dict.fromkeys(engines, content_of(seed))
    sender.close()


def test_a_piece_that_cannot_be_packed_ends_the_refresh_at_once(engines: dict[str, Engine]) -> None:
    """The engines wait for it: they are not left to their deadline, and serve what they served."""
    before = contents(engines)
    sender = sender_for(engines)

    def pieces() -> Iterator[torch.Tensor]:
        yield torch.zeros(1 << 20, dtype=torch.uint8)
        raise ValueError("a tensor is gone")

    metas = [TensorMeta(name, torch.uint8, (1 << 20,)) for name in ("x", "y")]
    start = time.monotonic()
    with pytest.raises(ValueError, match="a tensor is gone"), sender.update("never") as update:
        update.send_bucket(Bucket(TensorLists.of(metas), pieces(), 2 << 20))
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert contents(engines) == before
    assert not sender.connected
    sender.close()
    again = sender_for(engines)
    seed = next(seeds)
    again.refresh(version(seed))
    assert contents(engines) == dict.fromkeys(engines, content_of(seed))
    again.close()


def test_an_engine_is_asked_for_buckets_in_their_order(engines: dict[str, Engine]) -> None:
    """A call that is slow on its way is not overtaken by the next, though that is made before it is answered."""
    log: list[tuple[str, int]] = []

    def slow_road(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "update_weights_from_distributed":
            number = sum(what == "called" for what, _ in log)
            log.append(("called", number))
            time.sleep(0.2)
            log.append(("arrives", number))

    name = next(iter(engines))
    sender = sender_for({name: Meddling(engines[name], slow_road)})
    seed = next(seeds)
    report = sender.refresh(version(seed), bucket_bytes=50)
    assert report.num_buckets >= 5
    expected = [(what, number) for number in range(report.num_buckets) for what in ("called", "arrives")]
    assert log == expected
    sender.close()


def test_two_buckets_on_their_way_to_an_engine_that_hangs_cost_one_deadline() -> None:
    timeout_s = 1.0
    with two_engines() as engines:
        sender = with_deadline(sender_for({"b": engines["b"]}), timeout_s)
        group = sender._links["b"].require_group()
        engines["b"].freeze()
        content = torch.zeros(4 << 20, dtype=torch.uint8)
        bucket = Bucket(TensorLists.of([TensorMeta("x", torch.uint8, (content.numel(),))]), [content], content.numel())
        older, newer = group.start(bucket, None, "u"), group.start(bucket, None, "u")
        for sending in (older, newer):
            start_pieces([sending])
        start = time.monotonic()
        while not older.poll():
            time.sleep(0.01)
        ended = time.monotonic()
        assert ended - start < timeout_s + 15
        assert newer.poll() and time.monotonic() - ended < 0.5
        assert older.failures is not None and isinstance(older.failures["b"], TransportError)
        assert "earlier bucket" in str(newer.failures)


def test_ports_and_names_are_one_each(engines: dict[str, Engine]) -> None:
    asked: list[tuple[int, str]] = []

    def note(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "init_weights_update_group":
            asked.append((arguments["master_port"], arguments["group_name"]))

    port = free_ports_in_a_row(2)
    sender = WeightSender({name: Meddling(engine, note) for name, engine in engines.items()}, timeout_s=TIMEOUT_S)
    sender.connect(master_port=port, group_name="fleet")
    assert asked == [(port, "fleet-a"), (port + 1, "fleet-b")]
    sender.close()


def test_a_replacement_joins_a_running_sender() -> None:
    """The dead engine is removed and a new one added, and the survivor's group goes on unchanged."""
    with two_engines() as engines:
        sender = sender_for(dict(engines), on_engine_failure="leave_out")
        sender.refresh(version(next(seeds)), bucket_bytes=40)
        group = sender._links["a"].group
        engines["b"].kill()
        assert sender.refresh(version(next(seeds)), bucket_bytes=40).left_out == ["b"]
        sender.remove_engine("b")
        engines["c"] = Engine(TIMEOUT_S)
        sender.add_engine("c", engines["c"])
        assert sender.connected == ["a"]
        sender.connect(group_name=next(names))
        assert sender.connected == ["a", "c"] and sender._links["a"].group is group
        seed = next(seeds)
        assert sender.refresh(version(seed), bucket_bytes=40).left_out == []
        assert {name: engines[name].call("content") for name in "ac"} == dict.fromkeys("ac", content_of(seed))
        sender.remove_engine("a")  # alive: it leaves, too, and can join again
        sender.add_engine("a", engines["a"])
        sender.connect(group_name=next(names))
        sender.refresh(version(seed + 1), bucket_bytes=40)
        assert {name: engines[name].call("content") for name in "ac"} == dict.fromkeys("ac", content_of(seed + 1))
        sender.close()


def test_engines_are_added_and_removed_by_name() -> None:
    sender = WeightSender({"a": None})  # type: ignore[dict-item]
    with pytest.raises(WeightRequestError, match="'a' already"):
        sender.add_engine("a", None)  # type: ignore[arg-type]
    with pytest.raises(WeightRequestError, match="no engine 'b'"):
        sender.remove_engine("b")
    sender.remove_engine("a")
    with pytest.raises(TransactionStateError, match="no engines"):
        sender.update("1")


def test_wrong_options_are_refused() -> None:
    with pytest.raises(WeightRequestError, match="on_engine_failure"):
        WeightSender({}, on_engine_failure="ignore")  # type: ignore[arg-type]
    sender = WeightSender({})
    sender.connect()
    with pytest.raises(TransactionStateError, match="not connected"):
        sender.refresh({"w": torch.zeros(1)})
    with pytest.raises(TransactionStateError, match="no engines"):
        sender.update("1")
