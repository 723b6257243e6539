"""Public bugs of weight refresh (field notes, B2) about failures and states, each as a test that fails on the bug.

    48  vllm#37334        layers that never complete keep their tensors until memory is full
    52  tokenspeed#672    a chunk fails, the end publishes the version all the same
    53  UniRL#480         a failure while writing leaves two policies mixed
    55  SkyRL#1605        a second begin wedges the update that is open
    56  trl#6913          a failed transfer leaves the server mid-update, so that the next run fails too
    62  prime-rl#3577     buckets of another version wedge the receiver

`test_regression_b2_layout.py` has the others, and says which cannot occur here.
"""

from __future__ import annotations

import gc

import pytest
import torch

from tests.logical_weights_fake import EMBED, NORM, FakeWeights, version
from tests.loopback_updater import LoopbackSource, LoopbackUpdater, Named, new_updater
from weight_sync.errors import ContentError, TransactionStateError, TransportError

# --- 48: memory ---------------------------------------------------------------------------------------------------


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


# --- 52, 53, 55, 56, 62: failures ---------------------------------------------------------------------------------


class EndsAllTheSame(LoopbackUpdater):
    """Wrong: a bucket that fails is only reported, and the rest makes up the version."""

    def send(self, named: Named, weight_version: str | None = None) -> None:
        if self.failure is None:
            super().send(named, weight_version)


def serves_one_version(weights: FakeWeights) -> bool:
    found = {
        seed for name in weights.metas() for seed in (1, 2) if torch.equal(weights.read(name), version(seed)[name])
    }
    return len(found) == 1


def test_52_tokenspeed_672_an_end_after_a_failed_chunk_publishes_nothing() -> None:
    for updater_class, right in ((LoopbackUpdater, True), (EndsAllTheSame, False)):
        weights = FakeWeights(seed=1)
        updater = updater_class(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine)
        named = list(version(2).items())
        updater.begin("v2", "partial")
        updater.send(named[:3])
        updater.failure = TransportError("the sender is gone")
        try:
            updater.send(named[3:6])
        except TransportError:
            assert right
        updater.failure = None
        try:
            updater.verify()
            updater.commit()
            published = True
        except TransactionStateError:
            published = False
        assert published is not right
        assert serves_one_version(weights) is right


@pytest.mark.parametrize("place", range(11))
def test_53_unirl_480_a_failed_write_is_rolled_back(place: int) -> None:
    """At every tensor in turn, with that tensor half written: the mode that writes tensors as they come.

    Where they are exchanged at the commit: `test_a_write_that_fails_anywhere_restores_every_bit`.
    """
    weights = FakeWeights(seed=1)
    updater = LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, staging="journal")
    old, writes = weights.snapshot(), []

    def fail(name: str) -> None:
        writes.append(name)
        if len(writes) == place + 1:
            raise OSError("no such luck")

    updater.begin("v2")
    weights.fault = fail
    with pytest.raises(OSError, match="no such luck"):
        updater.send(list(version(2).items()))
    with pytest.raises(TransactionStateError):
        updater.verify()
    assert len(writes) > place and weights.snapshot() == old and updater.torn is None


@pytest.mark.mutant
def test_53_writing_without_a_way_back_is_caught() -> None:
    """The wrong variant: write what came, one by one, and stop at the first failure."""
    weights = FakeWeights(seed=1)
    for name, tensor in list(version(2).items())[:4]:
        weights.write(name, tensor)
    assert not serves_one_version(weights)


def test_55_skyrl_1605_a_second_begin_is_refused_and_harms_nothing() -> None:
    weights = FakeWeights(seed=1)
    updater = new_updater(weights)
    named = list(version(2).items())
    updater.begin("v2")
    updater.send(named[:4])
    with pytest.raises(TransactionStateError):
        updater.begin("v3")
    assert updater.pending_version == "v2"
    updater.send(named[4:])
    updater.verify()
    assert updater.commit().weight_version == "v2"
    assert torch.equal(weights.read(EMBED), version(2)[EMBED])


@pytest.mark.parametrize("failure", [TransportError("the sender is gone"), OSError("broken pipe")])
def test_56_trl_6913_the_next_run_can_refresh(failure: Exception) -> None:
    """A transfer fails, its trainer is gone; another one comes, drops what is open, and succeeds."""
    weights = FakeWeights(seed=1)
    updater = new_updater(weights)
    named = list(version(2).items())
    updater.begin("v2")
    updater.send(named[:4])
    updater.failure = failure
    with pytest.raises(type(failure)):
        updater.send(named[4:])
    updater.failure = None
    assert serves_one_version(weights)
    if updater.is_open:
        updater.abort()
    updater.begin("v3")
    updater.send(named)
    updater.verify()
    assert updater.commit().weight_version == "v3"
    assert torch.equal(weights.read(NORM), version(2)[NORM])


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
