"""One sender and three real engine processes in one group: late ones, and ones killed at each point of a refresh."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.logical_weights_fake import version
from tests.weight_engine_process import Engine
from tests.weight_group_helpers import TIMEOUT_S, Meddling, content_of, names, seeds
from weight_sync.errors import TransactionStateError
from weight_sync.sender import EngineError, WeightSender
from weight_sync.sender.link import SenderGroup, Sending
from weight_sync.sender.update import WeightUpdate

BUCKET_BYTES = 40


class Fleet:
    """Three engines under the names a, b, c; `mended` replaces the ones that were killed."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(3) as pool:
            self.engines = dict(zip("abc", pool.map(lambda _: Engine(TIMEOUT_S), "abc")))

    def replace(self, name: str) -> Engine:
        self.engines[name].kill()
        self.engines[name] = Engine(TIMEOUT_S)
        return self.engines[name]

    def contents(self, but: str = "") -> dict[str, Any]:
        return {name: engine.call("content") for name, engine in self.engines.items() if name not in but}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def sender_of(controls: dict[str, Any], **options: Any) -> WeightSender:
    sender = WeightSender(controls, timeout_s=TIMEOUT_S, **options)
    sender.connect(group_name=next(names), shared=True)
    return sender


def refreshed(sender: WeightSender, fleet: Fleet, left_out: str = "", **options: Any) -> None:
    """Refresh; require that all engines have it, except the left out."""
    seed = next(seeds)
    report = sender.refresh(version(seed), f"v{seed}", bucket_bytes=BUCKET_BYTES, **options)
    assert report.left_out == list(left_out)
    expected = {name: content_of(seed) for name in fleet.engines if name not in left_out}
    assert fleet.contents(but=left_out) == expected
    for name in expected:
        assert fleet.engines[name].call("content_digest") == report.digest
        assert report.engines[name].num_bytes == report.num_bytes and report.engines[name].committed
        assert not fleet.engines[name].call("status")["open"]


def test_a_broadcast_reaches_all_engines_and_one_that_is_killed_costs_no_version(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcasts = []
    start = SenderGroup.start

    def counted(self: SenderGroup, *arguments: Any) -> Sending:
        broadcasts.append(len(self.links))
        return start(self, *arguments)

    monkeypatch.setattr(SenderGroup, "start", counted)
    sender = sender_of({"a": fleet.engines["a"], "b": fleet.engines["b"]}, on_engine_failure="leave_out")
    sender.add_engine("c", fleet.engines["c"])  # late: the next `connect` makes one group of all
    sender.connect(group_name=next(names), shared=True)
    refreshed(sender, fleet)
    assert set(broadcasts) == {3}
    with pytest.raises(TransactionStateError, match="already connected"):
        sender.connect(shared=True)
    refreshed(sender, fleet, left_out="b", progress=lambda done, total: fleet.engines["b"].kill())
    assert sender.connected == ["a", "c"] and set(broadcasts) == {2, 3}
    refreshed(sender, fleet, left_out="b")
    sender.remove_engine("b")
    sender.add_engine("b", fleet.replace("b"))
    sender.connect(group_name=next(names), shared=True)
    refreshed(sender, fleet)
    sender.remove_engine("a")  # alive: the others join another group at the next refresh
    sender.add_engine("a", fleet.engines["a"])
    assert sorted(sender.connected) == ["b", "c"]
    refreshed(sender, fleet, left_out="a")
    sender.close()


@pytest.mark.full
@pytest.mark.parametrize("victim", ["a", "b", "c"])  # passes messages on; receives first; gets them from another one
@pytest.mark.parametrize(
    "at", ["begin_weight_update", "update_weights_from_distributed", "end_weight_update:verify", "bucket"]
)
def test_an_engine_that_is_killed_is_left_out(fleet: Fleet, at: str, victim: str) -> None:
    _survive(fleet, at, victim, "leave_out")


@pytest.mark.full
@pytest.mark.parametrize("policy", ["leave_out", "abort_all"])
def test_an_engine_that_is_killed_in_its_commit_is_not_known_to_have_the_version(fleet: Fleet, policy: str) -> None:
    _survive(fleet, "end_weight_update:commit", "b", policy)


@pytest.mark.full
@pytest.mark.parametrize("at", ["begin_weight_update", "bucket", "end_weight_update:verify"])
def test_with_abort_all_no_engine_has_the_version(fleet: Fleet, at: str) -> None:
    _survive(fleet, at, "c", "abort_all")


def _survive(fleet: Fleet, at: str, victim: str, policy: Any) -> None:
    """Kill an engine at a point of a refresh, then refresh the others, then all of them with a replacement."""
    count = 0

    def strike(verb: str, arguments: dict[str, Any]) -> None:
        nonlocal count
        count += verb == at
        if verb == at and count == (2 if at == "update_weights_from_distributed" else 1):
            fleet.engines[victim].kill()

    def progress(done: int, total: int) -> None:
        if at == "bucket":
            fleet.engines[victim].kill()

    sender = sender_of(dict(fleet.engines), on_engine_failure="leave_out")
    refreshed(sender, fleet)
    sender._links[victim]._control = Meddling(fleet.engines[victim], strike)  # type: ignore[assignment]
    sender._policy = policy
    if policy == "leave_out":
        refreshed(sender, fleet, left_out=victim, progress=progress)
    else:
        before = fleet.contents()
        with pytest.raises(EngineError, match=f"engine {victim}: ") as caught:
            sender.refresh(version(next(seeds)), bucket_bytes=BUCKET_BYTES, progress=progress)
        assert caught.value.failures.keys() == {victim}
        others = [name for name in fleet.engines if name != victim]
        is_late = at == "end_weight_update:commit"
        assert caught.value.committed == (others if is_late else [])
        assert caught.value.unknown == ([victim] if is_late else [])
        if not is_late:
            assert fleet.contents(but=victim) == {name: before[name] for name in others}
        with pytest.raises(EngineError, match=f"engine {victim}: .*not connected"):
            sender.refresh(version(next(seeds)))
    sender.remove_engine(victim)
    assert victim not in sender.connected and len(sender.connected) == 2
    sender._policy = "abort_all"
    seed = next(seeds)
    sender.refresh(version(seed), bucket_bytes=BUCKET_BYTES)
    assert set(map(tuple, fleet.contents(but=victim).values())) == {tuple(content_of(seed))}
    sender.add_engine(victim, fleet.replace(victim))
    sender.connect(group_name=next(names), shared=True)
    refreshed(sender, fleet)
    sender.close()


@pytest.mark.full
def test_an_engine_that_hangs_is_left_out_after_its_deadline(fleet: Fleet) -> None:
    sender = sender_of(dict(fleet.engines), on_engine_failure="leave_out")
    for link in sender._links.values():
        link.timeout_s = 4.0
    refreshed(sender, fleet, left_out="c", progress=lambda done, total: fleet.engines["c"].freeze())
    sender.remove_engine("c")
    sender.add_engine("c", fleet.replace("c"))
    sender.connect(group_name=next(names), shared=True)
    refreshed(sender, fleet)
    sender.close()


@pytest.mark.full
def test_an_engine_that_refuses_a_bucket_is_left_out_and_joins_again(fleet: Fleet) -> None:
    def spoil(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "update_weights_from_distributed" and control.calls.count(verb) == 2:
            arguments["dtypes"] = ["int4"] * len(arguments["dtypes"])

    control = Meddling(fleet.engines["a"], spoil)
    sender = sender_of(fleet.engines | {"a": control}, on_engine_failure="leave_out")  # type: ignore[dict-item]
    refreshed(sender, fleet, left_out="a")
    sender.connect(group_name=next(names), shared=True)
    refreshed(sender, fleet)
    sender.close()


@pytest.mark.full
def test_own_buckets_of_a_caller_are_refused_on_all_as_nobody_can_send_them_again(fleet: Fleet) -> None:
    def refuse(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "update_weights_from_distributed" and control.calls.count(verb) == 2:
            raise ConnectionError("meddled with")

    control = Meddling(fleet.engines["b"], refuse)
    sender = sender_of(fleet.engines | {"b": control}, on_engine_failure="leave_out")  # type: ignore[dict-item]
    before, seed = fleet.contents(), next(seeds)
    with pytest.raises(EngineError, match="meddled with"), sender.update(f"v{seed}") as update:
        for named in version(seed).items():
            update.send([named])
    assert fleet.contents() == before
    with sender.update(f"v{seed}") as update:  # the others have joined again
        update.send(version(seed).items())
    assert fleet.contents(but="b") == dict.fromkeys("ac", content_of(seed))
    sender.close()


@pytest.mark.full
def test_an_engine_that_does_not_join_holds_nobody_up(fleet: Fleet) -> None:
    """One refuses, one breaks off: the third joins, and no wait goes on until its deadline."""

    def wrong(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "init_weights_update_group" and control.calls.count(verb) == 1:
            arguments["rank_offset"] = 0

    def broken(verb: str, arguments: dict[str, Any]) -> None:
        if verb == "init_weights_update_group" and other.calls.count(verb) == 1:
            raise ConnectionError("broken")

    control, other = Meddling(fleet.engines["a"], wrong), Meddling(fleet.engines["b"], broken)
    sender = WeightSender({"a": control, "b": other, "c": fleet.engines["c"]}, timeout_s=600.0)  # type: ignore[dict-item]
    with pytest.raises(EngineError, match="rank 0") as caught:
        sender.connect(group_name=next(names), shared=True)
    assert caught.value.failures.keys() == {"a", "b"} and sender.connected == ["c"]
    sender.connect(group_name=next(names), shared=True)
    refreshed(sender, fleet)
    sender.close()


# --- wrong on purpose -------------------------------------------------------------------------------------------------


@pytest.mark.mutant
def test_a_sender_that_goes_on_in_the_broken_group_is_noticed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightUpdate, "begins_again", lambda self: False)
    with pytest.raises(EngineError):
        _survive(fleet, "bucket", "b", "leave_out")
    fleet.replace("b")


@pytest.mark.mutant
def test_a_sender_that_blames_all_members_is_noticed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightUpdate, "_to_blame", lambda self, failed: failed)
    monkeypatch.setattr("weight_sync.sender.meeting.to_blame", lambda failed: failed)
    with pytest.raises((AssertionError, EngineError)):
        _survive(fleet, "bucket", "b", "leave_out")
    fleet.replace("b")
