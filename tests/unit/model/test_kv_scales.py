"""Scales of keys and values in FP8: from checkpoints and files, every refusal, whole engines, ranks."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.core.specs.stored_format import stored_format_of
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.families.registry import load_model_config
from rollout.layers.attention import Attention
from rollout.memory.kv_pool import KVScale
from rollout.model.kv_scales import KVScales, layer_and_part, read_kv_scales
from tests.model_zoo import tiny_checkpoint
from tests.ranks import run_ranks
from tests.scheduler_harness import Harness

K, V = "model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"
MODELOPT = "model.layers.{}.self_attn.k_proj.k_scale", "model.layers.{}.self_attn.v_proj.v_scale"
VLLM = "model.layers.{}.self_attn.attn.k_scale", "model.layers.{}.self_attn.attn.v_scale"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SCALES = [KVScale(0.25, 2.0), KVScale(0.0131, 3.5)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("plain") / "model", "dense", seed=1)


def with_tensors(folder: Path, plain: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Copy a checkpoint, and add a file with more tensors."""
    shutil.copytree(plain, folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")  # else it is the only file that is read
    save_file(tensors, folder / "scales.safetensors")
    return folder


def tensors_of(scales: list[KVScale], names: tuple[str, str] = (K, V), shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the tensors of the scales of layers 0, 1, .. ."""
    return {
        name.format(layer): torch.full(shape, number)
        for layer, both in enumerate(scales)
        for name, number in zip(names, both, strict=True)
    }


def read(folder: Path, param_path: str | None = None, is_fp8: bool = True) -> KVScales:
    return read_kv_scales(str(folder), param_path, is_fp8, load_model_config(folder), Parallel())


def as_float32(scales: list[KVScale]) -> tuple[KVScale, ...]:
    return tuple(KVScale(*torch.tensor(both).tolist()) for both in scales)


@pytest.mark.parametrize(("names", "shape"), [((K, V), (1,)), (MODELOPT, ()), (VLLM, (1, 1))], ids=str)
def test_a_checkpoint_has_scales_by_any_name(
    plain: Path, tmp_path: Path, names: tuple[str, str], shape: tuple[int, ...]
) -> None:
    folder = with_tensors(tmp_path / "m", plain, tensors_of(SCALES, names, shape))
    found = read(folder)
    assert found.layers == as_float32(SCALES)
    assert found.facts == {
        "source": str(folder),
        "k": torch.tensor([0.0131, 0.25]).tolist(),
        "v": [2.0, 3.5],
    }
    assert read(plain) == KVScales((KVScale(), KVScale()))


def test_names_that_are_no_scales() -> None:
    assert layer_and_part("model.layers.12.self_attn.v_proj.v_scale") == (12, "v")
    assert layer_and_part("m.layers.1.self_attn.k_scale", [("m.", "model.")]) == (1, "k")
    for layer in ("01", "٣", "1" * 5000):
        assert layer_and_part(K.format(layer)) is None
    for name in ("k_proj.v_scale", "k_proj.weight_scale", "q_scale", "kv_scale", "k_scale_inv", "attn.k_proj.k_scale"):
        assert layer_and_part(f"model.layers.0.self_attn.{name}") is None


REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "zero": ({K.format(1): torch.tensor(0.0)}, "layers.1.self_attn.k_scale is 0.0: a scale of keys or values is"),
    "negative": ({V.format(0): torch.tensor(-1.0)}, "v_scale is -1.0: a scale"),
    "NaN": ({V.format(0): torch.tensor(torch.nan)}, "v_scale is nan: a scale"),
    "infinite": ({K.format(0): torch.tensor([torch.inf])}, "k_scale is inf: a scale"),
    "beyond float32": ({K.format(0): torch.tensor(1e300, dtype=torch.float64)}, r"is 1e\+300: a scale"),
    "a head each": ({K.format(0): torch.ones(2)}, r"k_scale is float32 \[2\]: keys and values of a layer have one"),
    "integers": ({K.format(0): torch.tensor(1)}, r"k_scale is int64 \[\]: keys"),
    "no such layer": ({K.format(2): torch.tensor(1.0)}, "k_scale: the model keeps no keys and values in a layer 2"),
    "two numbers": ({VLLM[0].format(0): torch.tensor(9.0)}, r"_scale is .*, and .*_scale of the same layer is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_scale_is_refused_by_name(plain: Path, tmp_path: Path, name: str) -> None:
    tensors, message = REFUSED[name]
    folder = with_tensors(tmp_path / "m", plain, tensors_of(SCALES) | tensors)
    with pytest.raises(StartupError, match=message):
        read(folder)


def test_a_layer_without_a_scale_and_kv_that_is_not_in_fp8(plain: Path, tmp_path: Path) -> None:
    tensors = tensors_of(SCALES)
    del tensors[V.format(1)]
    folder = with_tensors(tmp_path / "m", plain, tensors)
    with pytest.raises(StartupError, match="none for the values of layer 1"):
        read(folder)
    with pytest.raises(StartupError, match=r"such as .*k_scale: start with --kv-cache-dtype fp8_e4m3"):
        read(folder, is_fp8=False)


def params(numbers: Any = None, **changes: Any) -> dict[str, Any]:
    """Return a file of one rank for two layers."""
    factors = {"0": {"0": 0.25, "1": 3}} if numbers is None else numbers
    return {"model_type": None, "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}} | changes


def test_a_file_has_a_scale_for_each_layer_and_wins(plain: Path, tmp_path: Path) -> None:
    folder, path = with_tensors(tmp_path / "m", plain, tensors_of(SCALES)), tmp_path / "scales.json"
    for content in (params(), params(model_type="qwen3")):
        path.write_text(json.dumps(content))
        found = read(folder, str(path))
        assert found.layers == (KVScale(0.25, 0.25), KVScale(3.0, 3.0))
        assert found.facts == {"source": str(path), "k": [0.25, 3.0], "v": [0.25, 3.0]}


FILES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "cannot be read"),
    "nested too deep": ("[" * 100_000, "cannot be read"),
    "a list": ([1], "is not of the form"),
    "another dtype": (params(kv_cache={"dtype": "int8", "scaling_factor": {}}), "has scales for int8, not"),
    "another model": (params(model_type="llama"), "has scales for model type llama, not for qwen3"),
    "two ranks": (params({"0": {}, "1": {}}), "has scales of ranks 0, 1, and 1 ranks share the heads"),
    "a layer is missing": (params({"0": {"0": 1.0}}), "rank 0 has scales of layers 0, and .* in 0, 1"),
    "a layer too many": (params({"0": {"0": 1.0, "1": 1.0, "2": 1.0}}), "of layers 0, 1, 2, and"),
    "text": (params({"0": {"0": 1.0, "1": "1"}}), "layer 1 of rank 0 is 1: a scale of keys or values is a positive"),
    "true": (params({"0": {"0": 1.0, "1": True}}), "layer 1 of rank 0 is True: a scale"),
    "beyond all floats": (params({"0": {"0": 10**400, "1": 1.0}}), "layer 0 of rank 0 is 10{59}: a scale"),
    "too small": (params({"0": {"0": 1e-60, "1": 1.0}}), "layer 0 of rank 0 is 1e-60: a scale"),
    "NaN": ('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": NaN, "1": 1}}}}', "is nan: a scale"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_form_is_refused(plain: Path, tmp_path: Path, name: str) -> None:
    content, message = FILES[name]
    path = tmp_path / "scales.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(StartupError, match=message) as error:
        read(plain, str(path))
    assert "\n" not in str(error.value) and str(error.value).startswith(f"--quantization-param-path {path}")


def test_a_file_for_a_model_without_keys_and_values_has_no_scales(plain: Path, tmp_path: Path) -> None:
    """The refusal of FP8 for latents comes later, by a message of its own."""
    config, path = dataclasses.replace(load_model_config(plain), layers=()), tmp_path / "scales.json"
    path.write_text(json.dumps(params({"0": {}})))
    assert read_kv_scales(str(plain), str(path), True, config, Parallel()) == KVScales(())


def test_a_file_needs_kv_in_fp8(plain: Path) -> None:
    with pytest.raises(StartupError, match="give --kv-cache-dtype fp8_e4m3"):
        check_settings(ServerArgs(model_path=str(plain), quantization_param_path="x"))


def test_ranks_take_their_own_numbers_and_fail_together(plain: Path, tmp_path: Path) -> None:
    config, layout, path = load_model_config(plain), ParallelLayout(tp_size=2), tmp_path / "scales.json"
    path.write_text(json.dumps(params({"0": {"0": 1, "1": 2}, "1": {"0": 3, "1": 4}})))

    def found(parallel: Parallel) -> KVScales:
        return read_kv_scales(str(plain), str(path), True, config, parallel)

    scales = run_ranks(layout, found)
    assert [rank.layers for rank in scales] == [(KVScale(1, 1), KVScale(2, 2)), (KVScale(3, 3), KVScale(4, 4))]
    assert scales[0].facts == scales[1].facts == {"source": str(path), "k": [1, 4], "v": [1, 4]}
    other = with_tensors(tmp_path / "other", plain, tensors_of(SCALES))
    broken = with_tensors(tmp_path / "broken", plain, {K.format(0): torch.tensor(0.0)})

    def fault(parallel: Parallel, folder: Path) -> str:
        with pytest.raises(StartupError) as error:
            mine = folder if parallel.position.world_rank else plain
            read_kv_scales(str(mine), None, True, config, parallel)
        return str(error.value)

    assert all("have different scales" in text for text in run_ranks(layout, lambda rank: fault(rank, other)))
    first, second = run_ranks(layout, lambda rank: fault(rank, broken))
    assert first.startswith("another rank cannot read the scales") and "k_scale is 0.0" in second


def logprobs(harness: Harness) -> torch.Tensor:
    """Score a prompt."""
    rid = harness.submit(PROMPT * 4, params={"max_new_tokens": 0, "temperature": 1.0}, logprob_start_len=0)
    harness.run()
    finished = harness.results[rid].finished
    assert finished is not None and finished.prompt_logprobs is not None
    return torch.tensor(finished.prompt_logprobs.values[1:])


def engine(folder: Path, stored: str = "fp8_e4m3", **settings: Any) -> Harness:
    return Harness(folder, kv_cache_dtype=stored, enable_return_routed_experts=False, **settings)


def reads_without_scales(harness: Harness) -> Harness:
    """Make an engine store with its scales, and read as if they were 1."""
    runner = harness.scheduler.runner
    runner.recorded, right = None, runner.kv_pool.scales
    runner.kv_pool.scales = (KVScale(),) * len(right)
    for _, layer in runner.state.model.named_layers():
        if isinstance(layer, Attention):
            store, scales = layer.ops.qk_norm_rope_store, right[layer.layer_id]
            layer.ops = layer.ops.replace(
                qk_norm_rope_store=lambda *given, store=store, scales=scales: store(*given[:8], *scales)
            )
    return harness


def test_an_engine_serves_with_the_scales_and_states_them(plain: Path, tmp_path: Path) -> None:
    """Scales of 1 have the bits of none; others do not.  An engine that reads without them is far off."""
    exact, rounded = logprobs(engine(plain, "auto")), logprobs(engine(plain))
    ones = with_tensors(tmp_path / "ones", plain, tensors_of([KVScale()] * 2))
    assert torch.equal(logprobs(engine(ones)), rounded)
    folder = with_tensors(tmp_path / "m", plain, tensors_of(SCALES))
    harness = engine(folder)
    assert harness.control(GetStateReqInput).data["kv_scales"]["source"] == str(folder)
    assert engine(plain).control(GetStateReqInput).data["kv_scales"] is None
    scaled, wrong = logprobs(harness), logprobs(reads_without_scales(engine(folder)))
    assert not torch.equal(scaled, rounded)
    errors = [(found - exact).abs().mean().item() for found in (rounded, scaled, wrong)]
    assert errors[1] < 2 * errors[0] and errors[2] > 4 * errors[0], errors


def test_a_refresh_with_scales_is_refused_by_name(plain: Path, tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "m", plain, tensors_of(SCALES))
    harness = engine(folder, weight_version="v1")
    before = logprobs(harness)
    answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folder), weight_version="v2")
    assert not answer.success and "self_attn.k_scale is a scale of keys and values, which only" in answer.message
    assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
    answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(plain), weight_version="v2")
    assert answer.success and torch.equal(logprobs(harness), before)


def scheme(**changes: Any) -> dict[str, Any]:
    kv_cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "format": "dense",
            "ignore": [],
            "kv_cache_scheme": kv_cache | {"observer": "minmax"} | changes,
            "quantization_status": "frozen",
        }
    }


def test_config_json_may_state_the_scales() -> None:
    assert stored_format_of(scheme()) == "plain"
    for key, value in (("num_bits", 4), ("type", "int"), ("strategy", "channel"), ("dynamic", True), ("symmetric", 0)):
        with pytest.raises(StartupError, match=f"{key} '{value}' is not supported"):
            stored_format_of(scheme(**{key: value}))
