"""Quantised weights in engines of several ranks: blocks are of whole tensors, and moves carry the values of them."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.core.messages.io_struct import FlushCacheReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from tests.fp8_checkpoints import DTYPE, FAMILIES, QuantisedCase
from tests.fp8_reference import Named
from tests.pair_forms import FP8_FORM, INT4_FORM
from tests.parallel_harness import ParallelHarness
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_encoded
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.fp8_blocks import requantised
from weight_sync.tensor_meta import TensorMeta

PROMPTS = [[7, 3, 9], list(range(20, 50)), [5]]
SIX = {"max_new_tokens": 6}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2, experts split": {"tp_size": 2},
    "tp2 ep2": {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 4},
}


@pytest.fixture(scope="module", params=[*FAMILIES, "int4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantisedCase:
    family, form = ("qwen3_moe", INT4_FORM) if request.param == "int4" else (request.param, FP8_FORM)
    return QuantisedCase(tmp_path_factory.mktemp("quantised"), family, form=form)


def quantises(case: QuantisedCase) -> dict[str, Any]:
    """Return the setting of an engine that quantises bf16 to the form of its checkpoint, where there is one."""
    return {"dtype": "bfloat16", "quantize_weight_updates": case.form is FP8_FORM}


def check_content(harness: ParallelHarness, values: Named) -> set[bool]:
    """Check that every place of every rank holds its part of the values.

    It returns whether there are places that hold a part, and places that hold a whole tensor.
    """
    kinds = set()
    for scheduler in harness.schedulers:
        weights = scheduler.runner.state.model.weights
        for name, whole in values.items():
            for place in weights.places(name):
                part = place.region.of(whole) if place.region else whole
                assert torch.equal(place.read(), part), f"{name} on {scheduler.parallel.position}"
                kinds.add(place.region is not None)
    return kinds


def refresh(harness: ParallelHarness, tensors: Named, version: str) -> dict[str, Any]:
    update_id = uuid.uuid4().hex
    assert harness.control(BeginWeightUpdateReqInput, weight_version=version, update_id=update_id).success
    names = sorted(tensors)
    for part in range(2):
        payload = save({name: tensors[name].contiguous() for name in names[part::2]})
        verb = {"payload": bytearray(payload), "format": "safetensors", "update_id": update_id}
        answer = harness.control(UpdateWeightsFromTensorReqInput, **verb)
        assert answer.success, answer.message
    ended = harness.control(EndWeightUpdateReqInput, update_id=update_id)
    assert ended.success, ended.message
    return ended.data


def digest_of(tensors: Named) -> str:
    return digest((TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items())


def facts(harness: ParallelHarness) -> list[Any]:
    return [(result.token_ids, result.logprobs) for result in harness.generate(PROMPTS, SIX)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_of_whole_quantised_tensors(case: QuantisedCase, layout: str, tmp_path: Path) -> None:
    """Matrices of 136 rows are cut at 68, within a block; a cold load, parts sent, and bf16 sent lead to the same."""
    sent, stored, values = case.newer(1)
    assert case.form is INT4_FORM or not torch.equal(
        torch.cat([requantised(half) for half in sent["model.layers.1.mlp.experts.0.up_proj.weight"].split(68)]),
        values["model.layers.1.mlp.experts.0.up_proj.weight"],
    ), "quantised by its halves it would be another"
    folder = case.written(tmp_path / "newer", stored)
    with ParallelHarness(folder, dtype="bfloat16", **LAYOUTS[layout]) as started:
        assert True in check_content(started, values)
        expected = facts(started)
    with ParallelHarness(case.stored, **quantises(case), **LAYOUTS[layout]) as harness:
        check_content(harness, case.values)
        assert facts(harness) != expected
        for version, tensors in (("parts", stored), ("bf16", sent))[: 2 if case.form is FP8_FORM else 1]:
            refresh(harness, case.tensors, "old")
            check_content(harness, case.values)
            answer = refresh(harness, tensors, version)
            check_content(harness, values)
            assert (answer["content_digest"], answer["held_digest"]) == (digest_of(tensors), digest_of(values))
            assert facts(harness) == expected
            checked = harness.control(WeightsCheckerReqInput, action="checksum").data
            assert checked["digest"] == checked["expected_digest"] == digest_of(tensors)
            assert checked["held_digest"] == digest_of(values)


@pytest.mark.parametrize("option", [False, True])
def test_published_deltas_of_parts(case: QuantisedCase, tmp_path: Path, option: bool) -> None:
    """A delta may change one part: version 1 changes only scales, version 2 only weights, version 3 both."""
    versions = [case.tensors]
    weight, scale = (f".weight{suffix}" for suffix in case.form.suffixes[:2])
    for suffix in ((scale,), (weight,), (scale, weight)):
        last, other = versions[-1], case.newer(10 + len(versions))[1]
        is_changed = {name: name.endswith(suffix) and last[name].dtype == other[name].dtype for name in last}
        versions.append({name: other[name] if is_changed[name] else last[name] for name in last})
    source, local = tmp_path / "source", tmp_path / "local"
    encoder = DeltaEncoder(case.tensors.items())
    for number, tensors in enumerate(versions[1:], 1):
        delta = encoder.encode(tensors.items())
        publish_encoded(source, number, delta)
        encoder.advance(delta)
    settings = (quantises(case) if option else {"dtype": "bfloat16"}) | LAYOUTS["tp2 ep2"]
    with ParallelHarness(case.stored, **settings) as harness:
        for number in (1, 3):
            verb = {"local_checkpoint_dir": str(local), "source_dir": str(source), "target_version": number}
            pulled = harness.control(PullWeightsReqInput, **verb, update_memory=True)
            assert pulled.success, pulled.message
            assert pulled.data["memory"] == "delta"
            check_content(harness, case.form.values_of(versions[number], DTYPE))


def test_a_move_carries_the_values(case: QuantisedCase, tmp_path: Path) -> None:
    """Memory holds no quantised form: the move of an expert copies all of it.

    Sums over ranks have another order in another placement.  So the judge is an engine that started in this one.
    """
    settings = {"enable_eplb": True, **quantises(case), **LAYOUTS["tp2 ep2"]}
    sent, stored, values = case.newer(2)
    with ParallelHarness(case.stored, eplb_rebalance_num_iterations=100_000, **settings) as harness:
        answer = refresh(harness, sent if case.form is FP8_FORM else stored, "v1")
        before = facts(harness)
        config = harness.schedulers[0].runner.state.model.config
        backwards = list(reversed(range(config.num_experts)))
        mirrored = [backwards + backwards[:4]] * len(config.moe_layer_ids)
        moved = harness.control(EplbRebalanceReqInput, physical_to_logical_map=mirrored)
        assert moved.success and moved.data["rebalanced"], moved.message
        check_content(harness, values)
        checked = harness.control(WeightsCheckerReqInput, action="checksum").data
        assert checked["digest"] == answer["content_digest"]
        assert checked["held_digest"] == answer["held_digest"] == digest_of(values)
        assert harness.control(FlushCacheReqInput).success  # its keys and values are of the old order
        after = facts(harness)
    if case.form is FP8_FORM:  # with the weights of INT4 the other order decides between near candidates
        assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]
    settings["init_expert_location"] = json.dumps({"physical_to_logical_map": mirrored})
    with ParallelHarness(case.written(tmp_path / "newer", stored), **settings) as started:
        assert facts(started) == after != before
    assert all(tensor.dtype in (DTYPE, torch.float32) for tensor in values.values())
