"""`/weights_checker` in a real scheduler, digests of versions, and what a reset does to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import ControlReqOutput, GetStateReqInput
from rollout.core.messages.weight_check import WeightCheckReply, WeightCheckReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    DropWeightSnapshotReqInput,
    UpdateWeightsFromDistributedReqInput,
    WeightsCheckerReqInput,
)
from tests.late_loop import loop  # noqa: F401
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.tensor_meta import TensorMeta

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    return tiny_checkpoint(base / "old", "moe", seed=1), tiny_checkpoint(base / "new", "moe", seed=2)


@pytest.fixture
def harness(folders: tuple[Path, Path]) -> Harness:
    return Harness(folders[0], weight_version="v1")


@pytest.fixture
def trainer(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> LoopbackTrainer:
    """Sends the new weights."""
    trainer = LoopbackTrainer(logical_tensors(folders[1]))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    return trainer


def check(harness: Harness, action: str, **fields) -> ControlReqOutput:
    return harness.control(WeightsCheckerReqInput, action=action, **fields)


def state(harness: Harness) -> dict:
    return harness.control(GetStateReqInput).data


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    return digest((TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items())


def test_checksums_are_those_that_a_trainer_computes(harness: Harness, folders: tuple[Path, Path]) -> None:
    tensors = logical_tensors(folders[0])
    assert state(harness)["content_digest"] is None, "a cold load computes nothing"
    data = check(harness, "checksum").data
    assert data["checksums"] == {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}
    assert data["digest"] == digest_of(tensors)
    assert state(harness)["content_digest"] == data["digest"]
    assert check(harness, "checksum").data["expected_digest"] == data["digest"]


def test_snapshot_and_compare_over_a_refresh(
    harness: Harness, trainer: LoopbackTrainer, folders: tuple[Path, Path]
) -> None:
    assert check(harness, "compare").status_code == 409, "there is no snapshot yet"
    taken = check(harness, "snapshot", keep_content=True)
    assert taken.success and taken.data["weight_version"] == "v1"
    assert taken.data["num_bytes"] == sum(tensor.nbytes for tensor in trainer.tensors.values())
    assert check(harness, "compare").data["equal"]
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    old = logical_tensors(folders[0])
    changed = LoopbackTrainer(old | {name: old[name] + 0.5})
    trainer.tensors = changed.tensors
    assert trainer.refresh(harness, "v2").success
    data = check(harness, "compare").data
    (difference,) = data["differing"]
    assert not data["equal"] and data["snapshot_weight_version"] == "v1"
    assert difference["name"] == name and difference["num_elements"] == old[name].numel()
    assert difference["max_abs_difference"] == pytest.approx(0.5, abs=1e-6)
    assert check(harness, "compare", skip_tensor_list=[name]).data["equal"]
    assert check(harness, "compare", skip_tensor_list=["nobody"]).status_code == 400
    assert check(harness, "snapshot").data["num_bytes"] == 0
    assert check(harness, "compare").data["equal"]


def test_a_reset_engine_refuses_until_a_complete_refresh(
    harness: Harness, trainer: LoopbackTrainer, folders: tuple[Path, Path]
) -> None:
    """Running and new requests get 503; a refresh of the same weights restores everything."""
    trainer.tensors = logical_tensors(folders[0])
    (before,) = harness.generate([PROMPT], {"max_new_tokens": 6})
    running = harness.submit(PROMPT, params={"max_new_tokens": 200})
    for _ in range(4):
        harness.tick()
    assert check(harness, "snapshot").success
    assert check(harness, "reset_tensors").data["num_tensors"] == len(trainer.tensors)
    finished = harness.results[running].finished
    assert finished is not None and finished.reason.status_code == 503 and "NaN" in (finished.reason.message or "")
    (refused,) = harness.generate([PROMPT], {"max_new_tokens": 6})
    assert refused.finished.reason.status_code == 503 and refused.token_ids == []
    assert state(harness)["poisoned"] and state(harness)["content_digest"] is None
    compared = check(harness, "compare").data
    assert [difference["name"] for difference in compared["differing"]] == list(
        harness.scheduler.runner.state.model.weights.metas()
    )

    name = sorted(trainer.tensors)[0]
    assert harness.control(BeginWeightUpdateReqInput, coverage="partial", update_id="u").success
    assert trainer.send(harness, [name], update_id="u").success
    assert harness.control(AbortWeightUpdateReqInput, update_id="u").success
    assert state(harness)["poisoned"]
    assert trainer.refresh(harness, "v2").success
    assert state(harness)["poisoned"] is None
    assert check(harness, "compare").data["equal"]
    (after,) = harness.generate([PROMPT], {"max_new_tokens": 6})
    assert after.token_ids == before.token_ids and after.logprobs == before.logprobs
    assert after.versions == [("v2", 0, 6)] and after.finished.cached_tokens == 0


def test_a_snapshot_that_is_dropped_holds_no_memory(harness: Harness) -> None:
    kept = check(harness, "snapshot", keep_content=True).data["num_bytes"]
    assert kept > 0 and check(harness, "compare").success
    assert harness.control(DropWeightSnapshotReqInput).data == {"num_bytes": kept}
    assert check(harness, "compare").status_code == 409
    again = harness.control(DropWeightSnapshotReqInput)
    assert again.success and again.data == {"num_bytes": 0}


def vllm_check(harness: Harness, action: str, **fields) -> ControlReqOutput:
    return harness.control(WeightCheckReqInput, action=action, **fields)


def test_a_comparison_with_what_a_trainer_computed_names_each_difference(
    harness: Harness, folders: tuple[Path, Path]
) -> None:
    """It lists changed, missing and unknown tensors in the order of their names, and keeps nothing between calls."""
    baseline = {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in logical_tensors(folders[0]).items()}
    assert vllm_check(harness, "checksum").data == {"checksums": baseline}
    assert vllm_check(harness, "compare", baseline=baseline).data == {"match": True, "mismatches": []}
    missing, changed, *_ = sorted(baseline)
    wrong = {name: value for name, value in baseline.items() if name != missing} | {changed: "0", "a.weight": "0"}
    found = vllm_check(harness, "compare", baseline=wrong)
    assert found.success and found.data == {"match": False, "mismatches": ["a.weight", missing, changed]}
    assert check(harness, "compare").status_code == 409, "no snapshot was taken"


def test_a_baseline_belongs_to_a_comparison(harness: Harness) -> None:
    for action, fields in (("compare", {}), ("checksum", {"baseline": {}}), ("reset", {"baseline": {}})):
        refused = vllm_check(harness, action, **fields)
        assert refused.status_code == 400 and "baseline" in refused.message
    assert state(harness)["poisoned"] is None


def test_weights_that_come_back_after_a_reset_match(
    harness: Harness, trainer: LoopbackTrainer, folders: tuple[Path, Path]
) -> None:
    trainer.tensors = logical_tensors(folders[0])
    baseline = vllm_check(harness, "checksum").data["checksums"]
    assert vllm_check(harness, "reset").data == {"status": "reset"}
    assert "reset" in state(harness)["poisoned"]
    assert vllm_check(harness, "compare", baseline=baseline).data == {"match": False, "mismatches": sorted(baseline)}
    assert trainer.refresh(harness, "v2").success
    assert vllm_check(harness, "compare", baseline=baseline).data["match"]


def test_a_tensor_that_differs_on_one_replica_is_a_mismatch() -> None:
    equal, other = WeightCheckReply(match=True, mismatches=[]), WeightCheckReply(match=False, mismatches=["w"])
    for replies in ([equal, other], [other, equal], [other, other]):
        assert replies[0].merged(replies) == other
    assert equal.merged([equal, equal]) == equal
    checksums = WeightCheckReply(checksums={"w": "1"})
    assert checksums.merged([checksums, checksums]) == checksums


def test_a_reset_is_refused_while_an_update_is_open(harness: Harness, trainer: LoopbackTrainer) -> None:
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
    refused = check(harness, "reset_tensors")
    assert refused.status_code == 409 and state(harness)["poisoned"] is None
    assert harness.control(AbortWeightUpdateReqInput).success
    assert check(harness, "reset_tensors", skip_tensor_list=["nobody"]).status_code == 400
    assert check(harness, "checksum", skip_tensor_list=["x"]).status_code == 400
    assert state(harness)["poisoned"] is None
    (served,) = harness.generate([PROMPT], {"max_new_tokens": 2})
    assert served.finished.reason.type == "length"


def test_every_version_has_the_digest_of_its_content(
    harness: Harness, trainer: LoopbackTrainer, folders: tuple[Path, Path]
) -> None:
    """After full, partial and full refreshes the published digest is the digest of the weights in memory."""
    old, new = logical_tensors(folders[0]), logical_tensors(folders[1])
    assert check(harness, "checksum").data["digest"] == digest_of(old)
    assert trainer.refresh(harness, "v2").success
    assert state(harness)["content_digest"] == digest_of(new)
    name = sorted(new)[3]
    trainer.tensors = {name: old[name]}
    assert trainer.send(harness, weight_version="v3").success  # running, without begin: one partial update
    assert state(harness)["content_digest"] == digest_of(new | {name: old[name]})
    trainer.tensors = old
    assert trainer.refresh(harness, "v4").success
    live = check(harness, "checksum").data
    assert live["digest"] == live["expected_digest"] == digest_of(old)
    history = state(harness)["weight_versions"]
    assert [(entry["weight_version"], entry["weight_epoch"]) for entry in history] == [
        ("v1", 0),
        ("v2", 1),
        (f"v3~1of{len(new)}", 2),
        ("v4", 3),
    ]
    assert [entry["content_digest"] for entry in history] == [
        digest_of(tensors) for tensors in (old, new, new | {name: old[name]}, old)
    ]


def test_sixteen_versions_are_remembered(harness: Harness, trainer: LoopbackTrainer) -> None:
    trainer.tensors = {name: trainer.tensors[name] for name in ["model.norm.weight"]}
    for number in range(20):
        assert trainer.send(harness, weight_version=f"w{number}").success
    history = state(harness)["weight_versions"]
    assert [entry["weight_version"] for entry in history] == [f"w{number}~1of68" for number in range(4, 20)]
