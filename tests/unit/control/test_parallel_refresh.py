"""Refreshes of an engine of several ranks: every transport that needs no second process, whole or not at all.

What all ranks serve is read back from them and compared with what was sent, slot by slot: every replica of an expert,
every shard of a matrix.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from tests.family_zoo import FAMILIES, also_for, family_checkpoint, in_dtype, with_experts
from tests.late_loop import loop  # noqa: F401
from tests.model_zoo import logical_tensors, stored_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness, control_of
from tests.scheduler_harness import Harness
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_encoded
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.sender import split_fused_experts
from weight_sync.tensor_meta import TensorMeta

Tensors = dict[str, torch.Tensor]
PROMPTS = [[7, 3, 9], list(range(20, 50)), [5], [4] * 17]
SIX = {"max_new_tokens": 6}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 ep2": {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 4},
    "tp2, experts split": {"tp_size": 2},
    "dp2 all-to-all": {
        "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2, "moe_a2a_backend": "all_to_all",
        "ep_num_redundant_experts": 2,
    },
    "tp4 ep2": {"tp_size": 4, "ep_size": 2, "ep_num_redundant_experts": 2},
}  # fmt: skip

QWEN3 = "moe_dense_first"
WITH_FAMILIES = also_for(with_experts(layers=2, experts=8), QWEN3)


def checkpoint(folder: Path, name: str, seed: int) -> Path:
    return family_checkpoint(folder, name, seed) if name in FAMILIES else tiny_checkpoint(folder, name, seed=seed)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", QWEN3)


@pytest.fixture(scope="module")
def old(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("old") / "m", model, 5)


@pytest.fixture(scope="module")
def new(model: str, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    folder = checkpoint(tmp_path_factory.mktemp("new") / "m", model, 6)
    return in_dtype(logical_tensors(folder), torch.float64)


@pytest.fixture(params=LAYOUTS)
def engine(request: pytest.FixtureRequest, old: Path) -> Iterator[ParallelHarness]:
    with ParallelHarness(old, **LAYOUTS[request.param], enable_memory_saver=True) as harness:
        yield harness


def check_content(harness: ParallelHarness, tensors: Tensors) -> None:
    """Check that every place of every rank holds its part of the tensor, and all places together the whole."""
    covered: dict[str, int] = dict.fromkeys(tensors, 0)
    for scheduler in harness.schedulers:
        weights = scheduler.runner.state.model.weights
        for name, whole in tensors.items():
            for place in weights.places(name):
                part = place.region.of(whole) if place.region else whole
                assert torch.equal(place.read().double(), part.double()), f"{name} on {scheduler.parallel.position}"
                covered[name] += part.numel()
    assert all(covered[name] >= whole.numel() for name, whole in tensors.items())


def send(harness: ParallelHarness, tensors: Tensors, parts: int = 2, update_id: str | None = None) -> list[Any]:
    names = sorted(tensors)
    answers = []
    for part in range(parts):
        payload = save({name: tensors[name].contiguous() for name in names[part::parts]})
        verb = {"payload": bytearray(payload), "format": "safetensors", "update_id": update_id}
        answers.append(harness.control(UpdateWeightsFromTensorReqInput, **verb))
    return answers


def refresh(harness: ParallelHarness, tensors: Tensors, version: str, **begin: Any) -> Any:
    update_id = uuid.uuid4().hex
    begun = harness.control(BeginWeightUpdateReqInput, weight_version=version, update_id=update_id, **begin)
    assert begun.success, begun.message
    for answer in send(harness, tensors, update_id=update_id):
        assert answer.success, answer.message
    return harness.control(EndWeightUpdateReqInput, update_id=update_id)


def same_as_one_rank(harness: ParallelHarness, tensors: Tensors, old: Path) -> None:
    alone = Harness(old, dtype="float64", num_threads=1)
    alone_tensors = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    assert alone.control(PauseGenerationReqInput).success
    verb = {"payload": bytearray(alone_tensors), "format": "safetensors"}
    assert alone.control(UpdateWeightsFromTensorReqInput, **verb).success
    assert alone.control(ContinueGenerationReqInput).success
    for ours, theirs in zip(harness.generate(PROMPTS, SIX), alone.generate(PROMPTS, SIX), strict=True):
        assert ours.token_ids == theirs.token_ids and np.array_equal(ours.routes, theirs.routes)
        assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-10)


@WITH_FAMILIES
def test_begin_buckets_and_end_refresh_every_rank(engine: ParallelHarness, new: Tensors, old: Path) -> None:
    engine.generate(PROMPTS, SIX)
    ended = refresh(engine, new, "v1")
    assert ended.success and ended.data["weight_version"] == "v1", ended.message
    check_content(engine, new)
    assert len({scheduler.runner.state.epoch for scheduler in engine.schedulers}) == 1
    same_as_one_rank(engine, new, old)


@WITH_FAMILIES
def test_paused_client_without_begin(engine: ParallelHarness, new: Tensors) -> None:
    assert engine.control(PauseGenerationReqInput).success
    assert all(answer.success for answer in send(engine, new))
    assert engine.control(ContinueGenerationReqInput).success
    check_content(engine, new)


@pytest.mark.full(but=("sequential-tp2, experts split", "sequential-dp2 all-to-all"))
def test_what_is_read_back_is_whole(engine: ParallelHarness, new: Tensors) -> None:
    assert refresh(engine, new, "v1").success
    for name in ("model.layers.1.mlp.experts.5.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        answer = engine.control(GetWeightsByNameReqInput, name=name, truncate_size=4)
        assert answer.data["parameter"] == new[name][:4].tolist()
    checked = engine.control(WeightsCheckerReqInput, action="checksum")
    metas = [(TensorMeta(name, tensor.dtype, tuple(tensor.shape)), fingerprint(tensor)) for name, tensor in new.items()]
    assert checked.data["digest"] == digest(metas)
    assert engine.control(WeightsCheckerReqInput, action="snapshot", keep_content=True).success
    some = {name: new[name] * 2 for name in sorted(new)[:3]}
    assert refresh(engine, some, "v2", coverage="partial").success
    compared = engine.control(WeightsCheckerReqInput, action="compare")
    assert sorted(entry["name"] for entry in compared.data["differing"]) == sorted(some)


@WITH_FAMILIES
def test_from_disk_and_by_delta(engine: ParallelHarness, old: Path, tmp_path: Path) -> None:
    before = stored_tensors(old)
    after = {name: tensor * 1.5 for name, tensor in before.items()}
    source, local = tmp_path / "source", tmp_path / "local"
    encoder = DeltaEncoder(before.items())
    publish_encoded(source, 1, encoder.encode(after.items()))
    verb = {"local_checkpoint_dir": str(local), "source_dir": str(source), "target_version": 1, "update_memory": True}
    pulled = engine.control(PullWeightsReqInput, **verb)
    assert pulled.success, pulled.message
    check_content(engine, in_dtype(dict(split_fused_experts(after.items())), torch.float64))
    answer = engine.control(UpdateWeightsFromDiskReqInput, model_path=str(old), weight_version="back")
    assert answer.success, answer.message
    check_content(engine, in_dtype(logical_tensors(old), torch.float64))


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True, scope="module")
def test_by_fused_tensors_as_its_checkpoints_have_them(
    engine: ParallelHarness, old: Path, new: Tensors, tmp_path: Path
) -> None:
    wire = in_dtype(stored_tensors(family_checkpoint(tmp_path / "m", "gpt_oss", 6)), torch.float64)
    assert len(wire) < len(new) / 3
    ended = refresh(engine, wire, "fused")
    assert ended.success, ended.message
    check_content(engine, new)
    same_as_one_rank(engine, new, old)
    checked = engine.control(WeightsCheckerReqInput, action="checksum")
    metas = [(TensorMeta(name, t.dtype, tuple(t.shape)), fingerprint(t)) for name, t in new.items()]
    assert checked.data["digest"] == digest(metas)


@pytest.mark.full(but="sequential-dp2 all-to-all-moe_dense_first")
@WITH_FAMILIES
def test_memory_goes_and_comes_back_on_all_ranks(engine: ParallelHarness, new: Tensors) -> None:
    engine.submit(PROMPTS[0], params={"max_new_tokens": 60}, dp_rank=engine.num_dp_ranks - 1)
    engine.tick()
    refused = engine.control(ReleaseMemoryOccupationReqInput)
    assert not refused.success and "1 requests running" in refused.message
    engine.run()
    assert engine.control(ReleaseMemoryOccupationReqInput).success
    assert refresh(engine, new, "v1").success
    assert engine.control(ResumeMemoryOccupationReqInput).success
    check_content(engine, new)
    engine.generate(PROMPTS, SIX)


@pytest.mark.parametrize("name", ["tp2 ep2", "dp2 all-to-all"])
def test_calls_without_begin_into_lost_weights_add_up(name: str, old: Path, new: Tensors) -> None:
    """A wrong call ends them on all ranks alike."""
    with ParallelHarness(old, **LAYOUTS[name], enable_memory_saver=True) as engine:
        assert engine.control(ReleaseMemoryOccupationReqInput).success
        assert engine.control(ResumeMemoryOccupationReqInput).success
        norm = "model.norm.weight"
        bad = {norm: torch.full_like(new[norm], torch.nan)}
        first = {name: tensor for name, tensor in new.items() if name != norm}
        assert all(answer.success for answer in send(engine, first))
        (refused,) = send(engine, bad, parts=1)
        assert refused.status_code == 400, refused.message
        (again,) = send(engine, {norm: new[norm]}, parts=1)
        assert again.status_code == 409 and "an earlier weight update was dropped" in again.message
        assert engine.control(AbortWeightUpdateReqInput).status_code == 409, "a new start"
        answers = send(engine, new, parts=3)
        assert [answer.data.get("num_tensors") for answer in answers] == [None, None, len(new)]
        check_content(engine, new)
        engine.generate(PROMPTS, SIX)


@pytest.mark.parametrize("name", ["tp2 ep2", "dp2 all-to-all"])
@WITH_FAMILIES
def test_a_full_refresh_adopts_a_placement(name: str, old: Path, new: Tensors) -> None:
    counts_LE = np.random.default_rng(0).zipf(1.5, size=(2, 8)).astype(float)
    with ParallelHarness(old, **LAYOUTS[name]) as engine:
        for scheduler in engine.schedulers:
            control_of(scheduler)._adoption._loads = lambda: counts_LE  # type: ignore[method-assign]
        placements = [scheduler.runner.state.placement for scheduler in engine.schedulers]
        was = placements[0].metadata.physical_to_logical_map.clone()
        engine.generate(PROMPTS, SIX)
        failed = {**new, "model.norm.weight": new["model.norm.weight"] * float("nan")}
        assert engine.control(BeginWeightUpdateReqInput, weight_version="v0", adopt_placement=True).success
        send(engine, failed)
        assert not engine.control(EndWeightUpdateReqInput).success
        assert all(torch.equal(placement.metadata.physical_to_logical_map, was) for placement in placements)
        assert engine.control(BeginWeightUpdateReqInput, weight_version="v1", adopt_placement=True).success
        for fields in ({}, {"adopt_placement": False}, {"placement_epoch": 0}):
            stranger = engine.control(BeginWeightUpdateReqInput, weight_version="other", **fields)
            assert stranger.status_code == 409 and "already open" in stranger.message
        send(engine, new)
        ended = engine.control(EndWeightUpdateReqInput)
        assert ended.success and ended.data["placement_adopted"], ended
        assert ended.data["placement_note"].startswith("adopted by"), "D6: of this update, not of a refused begin"
        assert ended.data["placement_epoch"] == 1 == engine.scheduler.runner.state.epoch.placement_epoch
        assert not torch.equal(placements[0].metadata.physical_to_logical_map, was)
        now, there = (placement.metadata.physical_to_logical_map for placement in placements)
        assert torch.equal(now, there)
        check_content(engine, new)
        same_as_one_rank(engine, new, old)
        some = {n: new[n] * 2 for n in sorted(new) if "experts.5." in n}
        partial = refresh(engine, some, "v2", coverage="partial", adopt_placement=True)
        assert partial.success and not partial.data["placement_adopted"]
        check_content(engine, new | some)


def test_a_sender_that_goes_by_a_map_is_refused_when_it_changed(old: Path, new: Tensors) -> None:
    with ParallelHarness(old, **LAYOUTS["tp2 ep2"]) as engine:
        refused = engine.control(BeginWeightUpdateReqInput, placement_epoch=3)
        assert not refused.success and refused.status_code == 409 and "placement epoch 0" in refused.message
        both = engine.control(BeginWeightUpdateReqInput, placement_epoch=0, adopt_placement=True)
        assert not both.success and both.status_code == 400
        ended = refresh(engine, new, "v1", placement_epoch=0)
        assert ended.success and ended.data["placement_epoch"] == 0


def test_a_bucket_whose_arguments_are_refused_fails_its_update(old: Path, new: Tensors) -> None:
    """Each rank refuses it before it reads anything, so that no rank tells another to fail the update."""
    update = {"update_id": uuid.uuid4().hex}
    content = bytearray(save({name: new[name].contiguous() for name in sorted(new)[:3]}))
    segment = {"shm_name": "lockstep_none", "shm_bytes": 64, "shm_unlink": True}
    with ParallelHarness(old, **LAYOUTS["tp2, experts split"]) as engine:
        assert engine.control(BeginWeightUpdateReqInput, coverage="partial", **update).success
        assert engine.control(UpdateWeightsFromTensorReqInput, format="safetensors", payload=content, **update).success
        refused = engine.control(UpdateWeightsFromTensorReqInput, format="safetensors", **segment, **update)
        assert refused.status_code == 400 and "shm_unlink is for an engine of one rank" in refused.message
        ended = engine.control(EndWeightUpdateReqInput, **update)
    assert ended.status_code == 409 and "shm_unlink" in ended.message, ended.message


def test_nothing_to_adopt_on_one_rank(old: Path) -> None:
    refused = Harness(old).control(BeginWeightUpdateReqInput, adopt_placement=True)
    assert not refused.success and "--ep-size" in refused.message
