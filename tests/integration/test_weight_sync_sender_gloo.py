"""A real `WeightSender` and a real engine process over gloo: refreshes, and refusals on either side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.logical_weights_fake import NORM, fused, version
from tests.weight_engine_process import Engine
from tests.weight_group_helpers import TIMEOUT_S, content_of, in_background, names, seeds
from weight_sync.errors import TransactionStateError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.json_lists import JsonList
from weight_sync.process_group import GroupHandle
from weight_sync.sender import EngineError, WeightSender
from weight_sync.sender.rooms import Ahead


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    engine = Engine(TIMEOUT_S)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    shared_engine.settle()


@pytest.fixture
def sender(engine: Engine) -> Iterator[WeightSender]:
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    yield sender
    sender.close()


@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_refresh_sends_and_reports_every_tensor(
    engine: Engine, sender: WeightSender, bucket_bytes: int, with_manifest: bool
) -> None:
    seed = next(seeds)
    sent = version(seed)
    progress: list[tuple[int, int]] = []
    report = sender.refresh(
        sent.items(),
        f"v{seed}",
        bucket_bytes=bucket_bytes,
        progress=lambda done, total: progress.append((done, total)),
        with_manifest=with_manifest,
    )
    assert engine.call("content") == content_of(seed)
    total = sum(tensor.nbytes for tensor in sent.values())
    assert report.num_bytes == total
    assert progress[-1] == (total, total)
    assert len(progress) == report.num_buckets == {1: 11, 60: 5, 1 << 20: 1}[bucket_bytes]
    checksums = engine.call("checksums")
    assert checksums == {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in sent.items()}
    if with_manifest:
        assert report.fingerprints == checksums
        assert report.digest == engine.call("content_digest")
    else:
        assert report.digest is None


class Noting:
    """An engine that notes the arguments of calls; `takes_lists` as a control may have it."""

    def __init__(self, engine: Engine, **attributes: object) -> None:
        self._engine = engine
        self.calls: list[tuple[str, dict[str, Any]]] = []
        vars(self).update(attributes)

    def __getattr__(self, verb: str) -> Any:
        call = getattr(self._engine, verb)

        def noted(**arguments: Any) -> Any:
            self.calls.append((verb, arguments))
            return call(**arguments)

        return noted


@pytest.mark.parametrize(
    ("attributes", "takes_lists"),
    [({"takes_lists": True}, True), ({"takes_lists": False}, False), ({}, False), ({"takes_lists": print}, False)],
)
def test_a_manifest_comes_as_lists_to_a_control_that_takes_them(
    engine: Engine, attributes: dict[str, Any], takes_lists: bool
) -> None:
    """Any other control gets entries, and all get lists of tensors that keep their JSON."""
    noting = Noting(engine, **attributes)
    sender = WeightSender(noting, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    for _ in range(2):
        seed, noting.calls[:] = next(seeds), []
        sent = version(seed)
        report = sender.refresh(sent.items(), f"v{seed}", bucket_bytes=60)
        assert engine.call("content") == content_of(seed)
        (manifest,) = [arguments["manifest"] for verb, arguments in noting.calls if verb == "begin_weight_update"]
        if takes_lists:
            assert list(manifest) == ["names", "dtypes", "shapes", "fingerprints"]
            assert manifest["names"] == list(sent) and manifest["shapes"] == [list(it.shape) for it in sent.values()]
            assert manifest["fingerprints"] == "".join(report.fingerprints.values())
        else:
            assert [entry["name"] for entry in manifest] == list(sent)
            assert {entry["name"]: entry["fingerprint"] for entry in manifest} == report.fingerprints
        buckets = [arguments for verb, arguments in noting.calls if verb == "update_weights_from_distributed"]
        assert sorted(name for bucket in buckets for name in bucket["names"]) == sorted(sent)
        for bucket in buckets:
            assert all(type(bucket[key]) is JsonList for key in ("names", "dtypes", "shapes"))
    sender.close()


def test_a_manifest_of_tensors_without_fingerprints_comes_as_entries(engine: Engine, sender: WeightSender) -> None:
    """Lists state all fingerprints or none; a fused tensor that the engine splits has none of its own."""
    noting = Noting(engine, takes_lists=True)
    sender = WeightSender(noting, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    seed = next(seeds)
    report = sender.refresh(fused(version(seed)), split_experts=False)
    (manifest,) = [arguments["manifest"] for verb, arguments in noting.calls if verb == "begin_weight_update"]
    stated = {entry["name"]: entry["fingerprint"] for entry in manifest if entry["fingerprint"] is not None}
    assert stated == report.fingerprints and 0 < len(stated) < len(manifest) and report.digest is None
    assert engine.call("content") == content_of(seed)
    sender.close()


class Told:
    """An engine that takes `prepared_s` as a server does, and reports its own times."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prepared_s: float | None = None

    def begin_weight_update(self, *, prepared_s: float | None = None, **fields: Any) -> dict[str, Any]:
        self.prepared_s = prepared_s
        return self._engine.begin_weight_update(**fields)

    def end_weight_update(self, **fields: Any) -> dict[str, Any]:
        return self._engine.end_weight_update(**fields) | {"staging_seconds": 0.5, "receiving_seconds": 0.25}

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)


def test_the_report_shows_the_whole_time_and_its_parts_n23a(engine: Engine) -> None:
    """N23a: the trainer's time, and the engine's."""
    told = Told(engine)
    sender = WeightSender(told, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    report = sender.refresh(version(next(seeds)), "v", bucket_bytes=60)
    sender.close()
    assert list(report.parts) == ["plan", "fingerprints", "manifest", "pack", "begin", "send", "end"]
    assert 0.8 * report.seconds < sum(report.parts.values()) <= report.seconds
    before = report.parts["plan"] + report.parts["fingerprints"] + report.parts["manifest"]
    assert told.prepared_s is not None and before <= told.prepared_s < report.seconds
    (share,) = report.engines.values()
    assert (share.staging_seconds, share.receiving_seconds) == (0.5, 0.25) and share.stall_seconds is not None


def test_begin_options_reach_the_engine(engine: Engine, sender: WeightSender) -> None:
    with pytest.raises(EngineError, match="lease"):
        sender.refresh(version(99), begin_options={"lease_s": -1.0})
    seen = []
    sender.refresh(
        version(next(seeds)),
        begin_options={"lease_s": 77.0},
        progress=lambda done, total: seen.append(engine.call("status")["lease_s"]),
    )
    assert seen == [77.0]


def test_the_first_bucket_is_packed_while_the_engine_begins(
    engine: Engine, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The begin waits for it, so a sender that packs after the answer is found out."""
    packed, found = threading.Event(), list[bool]()
    pack_one = Ahead.pack_one

    def noted(self: Ahead) -> bool:
        is_left = pack_one(self)
        packed.set()
        return is_left

    def begin(arguments: dict[str, Any]) -> dict[str, Any]:
        found.append(packed.wait(2.0))
        return arguments

    monkeypatch.setattr(Ahead, "pack_one", noted)
    sender = WeightSender(Meddling(engine, "begin_weight_update", begin), timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    seed = next(seeds)
    sender.refresh(version(seed).items(), bucket_bytes=60)
    assert found == [True]
    assert engine.call("content") == content_of(seed)
    sender.close()


class SlowToAnswer:
    """An engine whose answer to a begin comes a while after it has opened its transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.opened = engine, threading.Event()

    def begin_weight_update(self, **fields: Any) -> dict[str, Any]:
        answer = self._engine.begin_weight_update(**fields)
        self.opened.set()
        time.sleep(0.2)
        return answer

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)


def test_what_cannot_be_packed_while_the_engine_begins_leaves_nothing_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next refresh begins at once, and finds no transaction of the one that failed."""
    slow = SlowToAnswer(engine)

    def fail(_: Ahead) -> bool:
        assert slow.opened.wait(TIMEOUT_S)
        raise ValueError("a tensor is gone")

    sender = WeightSender(slow, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    before = engine.call("content")
    with monkeypatch.context() as failing, pytest.raises(ValueError, match="a tensor is gone"):
        failing.setattr(Ahead, "pack_one", fail)
        sender.refresh(version(next(seeds)).items())
    assert not engine.call("status")["open"] and engine.call("content") == before
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert engine.call("content") == content_of(seed)
    sender.close()


def test_a_refused_begin_after_packing_leaves_nothing(engine: Engine, sender: WeightSender) -> None:
    before, sent = engine.call("content"), version(next(seeds))
    with pytest.raises(EngineError, match="Refused"):
        sender.refresh([*sent.items(), ("stranger", torch.zeros(3))])
    assert engine.call("content") == before and not engine.call("status")["open"]
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert engine.call("content") == content_of(seed)


class TestModel(torch.nn.Module):
    """A model whose state dict is a version in float64, with its experts fused."""

    __test__ = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, tensor in fused(version(seed)).items():
            self.register_buffer(name.replace(".", "/"), tensor.double())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name.replace("/", "."): tensor for name, tensor in super().state_dict(*args, **kwargs).items()}


def test_refresh_casts_on_the_way(engine: Engine, sender: WeightSender) -> None:
    """Tensors come in another dtype than the engine's, also from a model; the norm is float32 and sent on its own."""
    seed = next(seeds)
    model = TestModel(seed)
    norm = dict(model.state_dict())[NORM].float()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != NORM}
    sender.refresh(tensors, dtype=torch.bfloat16, coverage="partial", bucket_bytes=40)
    report = sender.refresh({NORM: norm}, coverage="partial")
    assert engine.call("content") == content_of(seed)
    assert report.num_buckets == 1 and all(tensor.dtype is torch.float64 for tensor in tensors.values())
    sender.refresh(model, dtype=torch.bfloat16)
    rounded = norm.bfloat16().float().numpy().tobytes().hex()
    assert engine.call("content")[:2] == [content_of(seed)[0], rounded], "what comes in bfloat16 is widened"
    with pytest.raises(EngineError, match=r"DtypeMismatchError"):
        sender.refresh(model, dtype=torch.float16)


@pytest.mark.parametrize("split_experts", [True, False])
def test_refresh_from_fused_tensors(engine: Engine, sender: WeightSender, split_experts: bool) -> None:
    seed = next(seeds)
    report = sender.refresh(fused(version(seed)).items(), split_experts=split_experts)
    assert engine.call("content") == content_of(seed)
    assert report.digest == (engine.call("content_digest") if split_experts else None)


class Meddling:
    """Passes control calls on, with one of them changed."""

    def __init__(self, engine: Engine, verb: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._engine, self._verb, self._change = engine, verb, change
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self.calls.append(verb)
            changed = self._change(arguments) if verb == self._verb else arguments
            return getattr(self._engine, verb)(**changed)

        return call


def test_sender_is_told_at_once_when_the_engine_will_not_join(engine: Engine) -> None:
    control = Meddling(engine, "init_weights_update_group", lambda sent: {**sent, "rank_offset": 0})
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"engine engine: Refused: .*rank 0"):
        WeightSender(control, timeout_s=TIMEOUT_S).connect(group_name=next(names))
    assert time.monotonic() - start < 2


def test_sender_is_told_at_once_when_the_engine_refuses_before_receiving(engine: Engine) -> None:
    """The broadcast is under way and no rank takes it; the sender leaves, aborts, and can connect again."""
    control = Meddling(engine, "update_weights_from_distributed", lambda sent: {**sent, "dtypes": ["int4"] * 11})
    sender = WeightSender(control, timeout_s=TIMEOUT_S)
    sender.connect(group_name="meddled")
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"Refused: .*int4"):
        sender.refresh(version(99).items(), "v99")
    assert time.monotonic() - start < 5
    assert control.calls[-1] == "abort_weight_update"
    assert "end_weight_update" not in control.calls
    assert not engine.call("status")["open"]
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name="meddled")
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert engine.call("content") == content_of(seed)
    sender.close()


def test_closing_accepts_an_engine_that_has_left_the_group(engine: Engine, sender: WeightSender) -> None:
    engine.destroy_weights_update_group(group_name=sender._links["engine"].require_group().handle.name)
    sender.close()
    assert not sender.connected


def test_closing_ends_a_refresh_on_another_thread(engine: Engine, sender: WeightSender) -> None:
    """Close as a `finally` does after Ctrl-C, while `asyncio.to_thread` waits for the refresh."""
    before, on_its_way = engine.call("content"), threading.Event()

    def progress(done: int, total: int) -> None:
        on_its_way.set()
        time.sleep(0.2)

    outcome = in_background(lambda: sender.refresh(version(99).items(), bucket_bytes=1, progress=progress))
    assert on_its_way.wait(TIMEOUT_S)
    start = time.monotonic()
    sender.close()
    ended = outcome(0.5)
    assert time.monotonic() - start < 5.0
    assert isinstance(ended, TransactionStateError) and "is being closed" in str(ended), ended
    assert not sender.connected and not engine.call("status")["open"]
    assert engine.call("content") == before
    sender.connect(group_name=next(names))
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert engine.call("content") == content_of(seed)


def test_a_bit_that_flips_on_the_way(engine: Engine, sender: WeightSender, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.call("content")
    send = GroupHandle.start_broadcast

    def flip(group: GroupHandle, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        damaged = tensor.clone()
        damaged[0] ^= 1
        return send(group, damaged, timeout_s)

    monkeypatch.setattr(GroupHandle, "start_broadcast", flip)
    with pytest.raises(EngineError, match=r"ContentError.*fingerprint"):
        sender.refresh(version(99).items())
    assert engine.call("content") == before


def test_sender_refusals_change_nothing(engine: Engine, sender: WeightSender) -> None:
    before = engine.call("content")
    with_nan = version(99)
    with_nan[NORM] = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    with pytest.raises(EngineError, match=r"ContentError.*not finite"):
        sender.refresh(with_nan.items(), with_manifest=False)
    incomplete = version(99)
    del incomplete[NORM]
    with pytest.raises(EngineError, match=r"CoverageError.*manifest lacks 1"):
        sender.refresh(incomplete.items())
    with pytest.raises(EngineError, match=r"CoverageError.*1 of 11 tensors missing"):
        sender.refresh(incomplete.items(), with_manifest=False)
    with pytest.raises(EngineError, match="UnknownTensorError"):
        sender.refresh({**version(99), "ghost": torch.ones(2)}.items(), with_manifest=False)

    def lose_patience(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sender.refresh(version(99).items(), progress=lose_patience)
    assert not engine.call("status")["open"]
    assert engine.call("content") == before
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert engine.call("content") == content_of(seed)


def test_an_engine_that_dies() -> None:
    """The sender notices within its deadline and reports what it could not clean up."""
    engine = Engine(TIMEOUT_S)
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    start = time.monotonic()
    with pytest.raises(EngineError, match="engine engine: ") as caught:
        sender.refresh(version(99).items(), bucket_bytes=1, progress=lambda done, total: engine.kill())
    assert time.monotonic() - start < 6
    assert any("aborting the weight update failed" in note for note in caught.value.__notes__)
