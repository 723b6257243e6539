"""`WeightUpdater` without a network: states, versions, notifications of the live weights; backends and arguments."""

from __future__ import annotations

import gc
import socket
import time

import pytest
import torch

from tests.logical_weights_fake import EMBED, NORM, FakeWeights, version
from tests.loopback_updater import LoopbackSource, LoopbackUpdater, broadcast_source, new_updater
from weight_sync.checker import live_fingerprints
from weight_sync.errors import (
    ContentError,
    CoverageError,
    TransactionStateError,
    TransportError,
    UnknownGroupError,
    WeightRequestError,
)
from weight_sync.fingerprint import fingerprint
from weight_sync.process_group import init_process_group, resolve_backend
from weight_sync.updater import WeightUpdater


def loopback(weights: FakeWeights | None = None) -> LoopbackUpdater:
    return LoopbackUpdater(weights or FakeWeights(), device="cpu", timeout_s=1.0, vote=lambda mine: mine)


def test_status_through_a_refresh() -> None:
    now = [100.0]
    updater = LoopbackUpdater(FakeWeights(), device="cpu", timeout_s=1.0, vote=lambda mine: mine, clock=lambda: now[0])
    closed = {
        "open": False,
        "implicit": False,
        "bound": False,
        **dict.fromkeys(("update_id", "state", "weight_version", "coverage", "received", "missing", "received_names")),
        **dict.fromkeys(("missing_names", "num_bytes", "unpaired", "unpaired_bytes", "lease_s", "lease_left_s")),
        **dict.fromkeys(("failed", "last_failure", "target")),
        "staging": "host",
    }
    assert updater.status() == closed
    assert not updater.is_open and updater.update is None and updater.staged(NORM) is None
    updater.begin("v1", lease_s=60, update_id="u1")
    sent = version(1)
    updater.send([(NORM, sent[NORM])])
    now[0] += 20
    opened = {"state": "open", "weight_version": "v1", "coverage": "full", "received": 1, "missing": 10}
    names = {"received_names": [NORM], "missing_names": sorted(set(sent) - {NORM})[:10]}
    rest = {
        "unpaired": 0,
        "unpaired_bytes": 0,
        "open": True,
        "update_id": "u1",
        "target": "model",
        "num_bytes": 16,
        "lease_s": 60,
        "lease_left_s": 40.0,
    }
    assert updater.status() == closed | opened | names | rest
    assert torch.equal(updater.staged(NORM)[0].content, sent[NORM])  # type: ignore[index]
    with pytest.raises(CoverageError):
        updater.send([(NORM, sent[NORM])])
    assert updater.status()["failed"] == f"{NORM} came twice"
    updater.abort()
    failure = updater.status().pop("last_failure")
    assert failure["reason"] == f"{NORM} came twice" and failure["weight_version"] == "v1"
    assert abs(failure["time"] - time.time()) < 60
    assert updater.status() == closed | {"last_failure": failure}


def test_a_lease_that_runs_out_drops_the_update_and_keeps_the_reason() -> None:
    now = [0.0]
    weights = FakeWeights()
    before = weights.snapshot()
    updater = LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, clock=lambda: now[0])
    sent = version(1)
    updater.begin("v1", lease_s=10)
    now[0] = 9
    updater.send([(NORM, sent[NORM])])
    now[0] = 18
    assert not updater.expire() and updater.is_open, "every bucket renews the lease"
    now[0] = 19
    assert updater.expire() and not updater.is_open
    assert "lease of 10 s ran out after 1 tensors, 10 were missing" in updater.status()["last_failure"]["reason"]
    with pytest.raises(TransactionStateError, match="lease of 10 s ran out"):
        updater.verify()
    assert weights.snapshot() == before
    assert not updater.expire()


def test_how_updates_ended_is_remembered() -> None:
    """The last sixteen are kept: aborted ones with the reason of the refusal, lost ones with the reason of the loss."""
    now = [0.0]
    updater = LoopbackUpdater(FakeWeights(), device="cpu", timeout_s=1.0, vote=lambda mine: mine, clock=lambda: now[0])
    sent = version(1)
    updater.begin("v1", update_id="u1")
    updater.send([(NORM, sent[NORM])])
    with pytest.raises(CoverageError):
        updater.send([(NORM, sent[NORM])])
    updater.abort("u1")
    updater.begin("v2", lease_s=10)
    now[0] = 10
    assert updater.expire()
    aborted, lost = updater.book.ended
    assert (aborted.update_id, aborted.kind, aborted.weight_version) == ("u1", "aborted", "v1")
    assert (aborted.reason, aborted.num_tensors, aborted.num_bytes) == (f"{NORM} came twice", 1, 16)
    assert aborted.weight_epoch is None and aborted.stall_s == 0 and not aborted.steps_held
    assert 0 < aborted.staging_s < 60 and abs(aborted.ended_at - time.time()) < 60
    assert lost.kind == "lost" and lost.reason is not None and "lease of 10 s ran out" in lost.reason
    for number in range(20):
        updater.begin(f"w{number}")
        updater.abort()
    assert [ended.weight_version for ended in updater.book.ended] == [f"w{number}" for number in range(4, 20)]


def test_a_commit_says_how_long_it_was_staged() -> None:
    updater = loopback()
    updater.begin("v1")
    time.sleep(0.02)
    updater.send(list(version(1).items()))
    updater.verify()
    result = updater.commit()
    assert 0.02 <= result.staging_seconds < 60 and result.seconds < 60


def test_an_expired_update_never_blocks_the_next() -> None:
    now = [0.0]
    weights = FakeWeights()
    updater = LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, clock=lambda: now[0])
    updater.begin("v1")
    now[0] = 599
    with pytest.raises(TransactionStateError, match=r"already open \(1 s left of its lease\)"):
        updater.begin("v2")
    now[0] = 600
    updater.begin("v2")
    updater.send(list(version(2).items()))
    updater.verify()
    assert updater.commit().weight_version == "v2"
    assert weights.snapshot() == FakeWeights(2).snapshot()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_lease_must_last(seconds: float) -> None:
    updater = loopback()
    with pytest.raises(WeightRequestError, match="lease"):
        updater.begin(lease_s=seconds)
    assert not updater.is_open


def test_commit_tells_what_it_wrote() -> None:
    weights = FakeWeights()
    updater = loopback(weights)
    updater.begin(coverage="partial")
    updater.send([(EMBED, version(1)[EMBED])], weight_version="v7")
    update = updater.admit(None, "name")
    assert update.transaction.weight_version == "v7"
    update.transaction.weight_version = "v8"
    updater.verify()
    result = updater.commit()
    assert (result.weight_version, result.names, result.num_bytes) == ("v8", [EMBED], 6 * 4 * 2)
    assert result.seconds > 0
    assert torch.equal(weights.embed, version(1)[EMBED])


def test_buckets_of_two_versions_do_not_mix() -> None:
    """A bucket with another version comes from another sender, unless it carries the id of the update."""
    updater = loopback()
    updater.begin(update_id="u1")
    updater.send([(EMBED, version(1)[EMBED])], weight_version="v1")
    for update_id in (None, "u1"):
        with pytest.raises(TransactionStateError, match="'v2', the open weight update of 'v1'"):
            updater.receive(LoopbackSource([(NORM, version(1)[NORM])]), "v2", update_id)
        assert (updater.status()["failed"] is None) == (update_id is None)
    with pytest.raises(TransactionStateError, match="failed"):
        updater.verify("u1")


def test_an_implicit_transaction_keeps_begin_out() -> None:
    weights = FakeWeights()
    updater = loopback(weights)
    updater.open_implicit("full")
    assert updater.status()["implicit"]
    with pytest.raises(TransactionStateError):
        updater.begin()
    updater.send(list(version(1).items()))
    updater.verify()
    updater.commit()
    assert not updater.status()["implicit"]
    assert weights.snapshot() == FakeWeights(1).snapshot()


def test_checksums_are_of_the_live_weights() -> None:
    weights = FakeWeights(seed=3)
    updater = loopback(weights)
    live = {name: fingerprint(tensor) for name, tensor in version(3).items()}
    assert live_fingerprints(updater.weights) == live
    updater.begin()
    updater.send(list(version(4).items()))
    assert live_fingerprints(updater.weights) == live
    updater.verify()
    updater.commit()
    assert live_fingerprints(updater.weights) == live_fingerprints(FakeWeights(seed=4)) != live


def test_close_drops_what_is_open() -> None:
    updater = loopback()
    updater.begin()
    updater.close()
    assert not updater.is_open
    updater.close()


def test_what_another_rank_s_failure_tears_is_known_at_once() -> None:
    """Nothing was kept of what the bucket overwrote, and the other rank's failure is the first news of it."""
    updater = LoopbackUpdater(FakeWeights(), device="cpu", timeout_s=1.0, vote=lambda mine: mine, staging="in_place")
    updater.begin("v1")
    updater.send([(NORM, version(1)[NORM])])
    assert updater.torn is None
    updater.fail("rank 1: the peer is gone")
    assert updater.torn is not None and "rank 1: the peer is gone" in updater.torn
    assert updater.status()["failed"] == "rank 1: the peer is gone" and updater.is_open


def test_an_update_names_its_target_whose_state_is_its_own() -> None:
    weights = FakeWeights()
    updater = loopback(weights)
    updater.begin("v1")
    assert updater.update is not None and updater.update.target is updater.model
    assert (updater.model.name, updater.model.weights, updater.model.torn) == ("model", weights, None)
    updater.send(list(version(1).items()))
    assert updater.model.content.digests.sent is None
    updater.verify()
    result = updater.commit()
    assert result.update.target.content.digests == result.digests and result.digests.sent is not None


def test_an_unknown_group_is_refused() -> None:
    updater = WeightUpdater(FakeWeights(), device="cpu", timeout_s=1.0, vote=lambda mine: mine)
    with pytest.raises(UnknownGroupError, match="'g' does not exist; joined groups: none"):
        updater.groups.destroy("g")
    updater.begin()
    with pytest.raises(UnknownGroupError):
        updater.receive(broadcast_source(updater, [NORM], ["float32"], [[4]], "g"))
    with pytest.raises(TransactionStateError, match="failed"):
        updater.verify()


def test_one_call_cannot_announce_the_moon() -> None:
    updater = loopback()
    updater.begin()
    with pytest.raises(WeightRequestError, match="at most 67108864"):
        updater.receive(broadcast_source(updater, ["a"], ["uint8"], [[67108865]], "group"))


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        (None, "cpu", "gloo"),
        ("nccl", "cpu", "gloo"),
        ("gloo", "cpu", "gloo"),
        (None, "cuda:0", "nccl"),
        ("nccl", "cuda", "nccl"),
        ("gloo", "cuda", "gloo"),
    ],
)
def test_a_backend_is_chosen_that_the_device_supports(backend: str | None, device: str, expected: str) -> None:
    assert resolve_backend(backend, device) == expected
    with pytest.raises(WeightRequestError, match="unknown backend 'mpi'"):
        resolve_backend("mpi", device)


def test_a_name_that_torch_already_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch.distributed.distributed_c10d._world.pg_names, object(), "taken")  # type: ignore[misc]
    with pytest.raises(WeightRequestError, match="already has a process group named 'taken'"):
        init_process_group("127.0.0.1", 1234, 0, 2, "taken", "gloo", 1.0)


def test_a_master_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(TransportError, match="cannot join group 'g'"):
            init_process_group("127.0.0.1", listener.getsockname()[1], 0, 2, "g", "gloo", 1.0)
        assert time.monotonic() - start < 8


# --- refusals and failures that public engines got wrong (numbers of the bug list B2) ---------------------------------


def live_tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor):  # asking an object itself may warn
            continue
        if item.device.type == "cpu" and item.layout == torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_48_vllm_37334_refused_refreshes_hold_no_memory() -> None:
    tensors = version(2)
    names = sorted(tensors)
    updater = new_updater(FakeWeights(seed=1))

    def fail_once() -> None:
        updater.begin("v2")
        updater.send([(name, tensors[name]) for name in names[:-1]])
        with pytest.raises(ContentError):
            updater.send([(names[-1], torch.full_like(tensors[names[-1]], float("nan")))])
            updater.verify()
        if updater.is_open:
            updater.abort()

    fail_once()
    before = live_tensor_bytes()
    for _ in range(5):
        fail_once()
    one = sum(tensor.nbytes for tensor in tensors.values())
    assert live_tensor_bytes() < before + one
    kept = [tensor.clone() for tensor in tensors.values()]  # what the wrong variant would hold on to
    assert live_tensor_bytes() >= before + one and kept


def serves_one_version(weights: FakeWeights) -> bool:
    found = {
        seed for name in weights.metas() for seed in (1, 2) if torch.equal(weights.read(name), version(seed)[name])
    }
    return len(found) == 1


def test_55_skyrl_1605_a_second_begin_is_refused_and_harms_nothing() -> None:
    weights = FakeWeights(seed=1)
    updater = new_updater(weights)
    named = list(version(2).items())
    updater.begin("v2")
    updater.send(named[:4])
    with pytest.raises(TransactionStateError):
        updater.begin("v3")
    assert updater.status()["weight_version"] == "v2"
    updater.send(named[4:])
    updater.verify()
    assert updater.commit().weight_version == "v2"
    assert torch.equal(weights.read(EMBED), version(2)[EMBED])


def test_62_prime_rl_3577_a_bucket_of_another_version_is_drained_and_refused() -> None:
    """The sender's broadcast completes, so that no rank is left waiting in it; another's update does not feel it."""
    weights = FakeWeights(seed=1)
    updater = new_updater(weights)
    named = list(version(2).items())
    updater.begin("v2")
    updater.send(named[:4], "v2")
    stray = LoopbackSource(named[4:])
    with pytest.raises(TransactionStateError, match="v3"):
        updater.receive(stray, "v3")
    assert stray.drained
    updater.send(named[4:], "v2")
    updater.verify()
    assert torch.equal(weights.read(NORM), version(1)[NORM])
    assert updater.commit().weight_version == "v2"
    assert serves_one_version(weights) and torch.equal(weights.read(NORM), version(2)[NORM])
