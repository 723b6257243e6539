"""Checkpoints with FP8 blocks: what is loaded, bit for bit, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.errors import StartupError
from rollout.families.registry import load_model_config
from rollout.model.load import quantised_names
from tests.fp8_checkpoints import FAMILIES, QuantisedCase, fused, more_layers
from tests.fp8_reference import QUANTIZATION_CONFIG, Named, fp8_checkpoint, is_quantised, quantised, set_config
from tests.fp8_reference import values_of as reference_values
from tests.model_zoo import load_tiny, logical_tensors
from weight_sync.tensor_meta import parts_of

WEIGHT = "model.layers.1.mlp.experts.2.down_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantisedCase:
    return QuantisedCase(tmp_path_factory.mktemp("fp8"), request.param)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> QuantisedCase:
    return QuantisedCase(tmp_path_factory.mktemp("fp8"), "qwen3_moe")


def held(folder: Path, dtype: torch.dtype) -> Named:
    weights = load_tiny(folder, dtype).weights
    return {name: parts_of(weights, name)[0].content.clone() for name in weights.metas()}


def assert_same(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_layers_that_are_left_out_may_be_quantised(case: QuantisedCase, tmp_path: Path) -> None:
    folder = fp8_checkpoint(tmp_path / "more", case.plain, lambda tensors: tensors | more_layers(case.family))
    assert_same(held(folder, torch.bfloat16), case.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_values_are_loaded(case: QuantisedCase, dtype: torch.dtype) -> None:
    found = held(case.stored, dtype)
    assert_same(found, reference_values(case.tensors, dtype))
    differing = [name for name, tensor in held(case.plain, dtype).items() if not torch.equal(tensor, found[name])]
    assert differing == [name for name in found if f"{name}_scale_inv" in case.tensors], "only what is quantised"


def test_fused_experts_are_loaded_though_blocks_span_both_halves(case: QuantisedCase, tmp_path: Path) -> None:
    plain = fused(logical_tensors(case.plain))
    tensors = quantised(plain)
    folder = fp8_checkpoint(tmp_path / "fused", case.plain, lambda _: tensors)
    name = next(name for name in tensors if name.endswith("gate_up_proj_scale_inv"))
    assert tensors[name].shape[-2] == 3 < 2 * 2, "272 rows have three rows of blocks, two matrices of 136 have four"
    found, values = held(folder, torch.bfloat16), reference_values(tensors, torch.bfloat16)
    whole = values[name.removesuffix("_scale_inv")]
    layer = name.split(".experts.")[0]
    for expert in range(len(whole)):
        for rows, projection in ((whole[expert, :136], "gate_proj"), (whole[expert, 136:], "up_proj")):
            assert torch.equal(found[f"{layer}.experts.{expert}.{projection}.weight"], rows)


def test_the_names_of_what_is_quantised(case: QuantisedCase) -> None:
    weights = load_tiny(case.stored, torch.bfloat16).weights
    expected = {name for name, tensor in logical_tensors(case.plain).items() if is_quantised(name, tensor)}
    assert quantised_names(case.stored, weights) == expected
    with pytest.raises(StartupError, match="has none"):
        quantised_names(case.plain, weights)


def test_modules_that_are_not_converted_are_plain(moe: QuantisedCase, tmp_path: Path) -> None:
    def not_attention(name: str, tensor: torch.Tensor) -> bool:
        return is_quantised(name, tensor) and "self_attn" not in name

    tensors = quantised(logical_tensors(moe.plain), not_attention)
    folder = fp8_checkpoint(tmp_path / "some", moe.plain, lambda _: tensors)
    set_config(folder, {**QUANTIZATION_CONFIG, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]})
    assert_same(held(folder, torch.bfloat16), reference_values(tensors, torch.bfloat16))


def without(name: str) -> Callable[[Named], Named]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Named], Named]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


# what is wrong with the tensors -> what the one line must state
WRONG: dict[str, tuple[Callable[[Named], Named], str]] = {
    "no scale": (without(SCALE), f"{WEIGHT} is float8_e4m3fn and has no {SCALE}"),
    "no weight": (without(WEIGHT), f"{SCALE} has no float8_e4m3fn {WEIGHT}"),
    "scale of a plain weight": (
        changed(WEIGHT, lambda tensor: tensor.to(torch.bfloat16)),
        f"{SCALE} has no float8_e4m3fn {WEIGHT}",
    ),
    "scale of nothing": (
        lambda tensors: {**tensors, "model.layers.0.nothing.weight_scale_inv": torch.ones(1, 1)},
        "model.layers.0.nothing.weight_scale_inv has no matching weight: the model has no tensor",
    ),
    "transposed": (changed(SCALE, lambda tensor: tensor.repeat(2, 1)), f"{SCALE} has shape [4, 2], expected [2, 2]"),
    "per tensor": (changed(SCALE, lambda tensor: tensor.max().view(1)), f"{SCALE} has shape [1], expected [2, 2]"),
    "float64": (
        changed(SCALE, lambda tensor: tensor.double()),
        f"{SCALE}: scales must be one of float32, bfloat16, float16, got float64",
    ),
    "e5m2": (changed(WEIGHT, lambda tensor: tensor.float().to(torch.float8_e5m2)), "got float8_e5m2"),
    "vector": (
        changed("model.norm.weight", lambda tensor: tensor.to(torch.float8_e4m3fn)),
        "model.norm.weight is float8_e4m3fn but not a matrix",
    ),
    "scale that is not finite": (
        changed(SCALE, lambda tensor: tensor.index_fill(0, torch.tensor([1]), float("inf"))),
        f"{SCALE}: a scale is negative or not finite",
    ),
    "NaN": (
        changed(WEIGHT, lambda tensor: torch.full_like(tensor.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn)),
        f"values that are not finite in {WEIGHT}",
    ),
    "compressed-tensors": (
        lambda tensors: {**tensors, "model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
        "weight_scale'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused_by_name(moe: QuantisedCase, name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    folder = fp8_checkpoint(tmp_path / "wrong", moe.plain, change)
    with pytest.raises(StartupError) as error:
        load_tiny(folder, torch.bfloat16)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_fp8_without_the_config_that_says_so_is_refused(moe: QuantisedCase, tmp_path: Path) -> None:
    folder = fp8_checkpoint(tmp_path / "unsaid", moe.plain)
    set_config(folder, None)
    with pytest.raises(StartupError, match="there is no quantization_config"):
        load_tiny(folder, torch.bfloat16)


CONFIGS: dict[str, tuple[Any, str]] = {
    "other method": ({"quant_method": "awq"}, "quant_method 'awq'"),
    "no method": ({"fmt": "e4m3", "quant_method": None}, "quant_method 'None'"),
    "static": ({"activation_scheme": "static"}, "activation_scheme 'static'"),
    "other blocks": ({"weight_block_size": [64, 128]}, "weight_block_size '[64, 128]'"),
    "per tensor": ({"weight_block_size": None}, "weight_block_size 'None'"),
    "e5m2": ({"fmt": "e5m2"}, "fmt 'e5m2'"),
    "other scales": ({"scale_fmt": "int8"}, "scale_fmt 'int8'"),
    "unknown": ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme 'fp8'"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_other_quantisations_are_refused_by_key(moe: QuantisedCase, name: str, tmp_path: Path) -> None:
    change, message = CONFIGS[name]
    (tmp_path / "config.json").write_bytes((moe.stored / "config.json").read_bytes())
    set_config(tmp_path, QUANTIZATION_CONFIG | change)
    with pytest.raises(StartupError) as error:
        load_model_config(tmp_path)
    assert f"quantization_config with {message} is not supported" in str(error.value)


def test_configs_of_this_kind_are_taken(moe: QuantisedCase, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((moe.stored / "config.json").read_bytes())
    for more in (
        {},
        {"modules_to_not_convert": ["lm_head"]},
        {"scale_fmt": "float", "dequantize": False},
        {"scale_fmt": "ue8m0"},
    ):
        set_config(tmp_path, QUANTIZATION_CONFIG | more)
        assert load_model_config(tmp_path).stored_format == "fp8"
    assert load_model_config(moe.plain).stored_format == "plain"
    set_config(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(StartupError, match="no weight_block_size"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_may_have_16_bits(case: QuantisedCase, kind: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    """B10: the values are the same as with equal scales in float32; Qwen publishes such checkpoints."""
    narrow = with_scales(case.tensors, kind)
    folder = fp8_checkpoint(tmp_path / "narrow", case.plain, lambda _: narrow)
    wide = with_scales(narrow, torch.float32)
    assert_same(held(folder, dtype), reference_values(wide, dtype))
    assert any(not torch.equal(wide[name], case.tensors[name]) for name in wide), "rounding them changed some"


def with_scales(tensors: Named, dtype: torch.dtype) -> Named:
    return {name: tensor.to(dtype) if name.endswith("_scale_inv") else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_may_be_powers_of_two_in_eight_bits(moe: QuantisedCase, dtype: torch.dtype, tmp_path: Path) -> None:
    narrow = with_scales(moe.tensors, torch.float8_e8m0fnu)
    folder = fp8_checkpoint(tmp_path / "e8m0", moe.plain, lambda _: narrow)
    set_config(folder, QUANTIZATION_CONFIG | {"scale_fmt": "ue8m0"})
    wide = with_scales(narrow, torch.float32)
    assert_same(held(folder, dtype), reference_values(wide, dtype))
    assert any(not torch.equal(wide[name], moe.tensors[name]) for name in wide), "rounding them changed some"


def test_other_tensors_in_e8m0_are_refused(moe: QuantisedCase, tmp_path: Path) -> None:
    exponents = torch.full((2, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    folder = fp8_checkpoint(tmp_path / "e8m0", moe.plain, lambda tensors: tensors | {"model.norm.weight": exponents})
    with pytest.raises(StartupError, match="'F8_E8M0'"):
        held(folder, torch.bfloat16)
