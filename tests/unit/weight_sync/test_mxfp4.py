"""MXFP4 against the definition of the format in float64 and against transformers; checkpoints of GPT-OSS in it.

Shapes: E logical experts, R output features, C input features.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rollout.core.errors import StartupError
from rollout.distributed.layout import ParallelLayout
from rollout.families.registry import load_model_config
from tests.family_zoo import FAMILIES, family_model
from tests.model_zoo import load_tiny
from tests.parallel_engine import MIXED, largest_difference, one_rank, several_ranks
from tests.unit.families.test_families import _ids, _ours, _theirs
from weight_sync.errors import CoverageError, ShapeMismatchError, UnknownTensorError
from weight_sync.intake import load_weights
from weight_sync.ledger import WeightLedger
from weight_sync.mxfp4 import dequantise, value_metas
from weight_sync.staging import DirectSink
from weight_sync.tensor_meta import TensorMeta

NAME = "gpt_oss"
QUANTISED = ("gate_up_proj", "down_proj")
INNER = 96


def _element(code: int) -> float:
    """Decode E2M1 by its definition: exponent bias 1, subnormal where the exponent is zero."""
    sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


def _exact(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode blocks and scales in float64, element by element."""
    rows = []
    for codes, scale in zip(blocks.view(-1, 16).tolist(), scales.flatten().tolist(), strict=True):
        power = 2.0 ** (scale - 127)
        rows.append([_element(code) * power for byte in codes for code in (byte & 15, byte >> 4)])
    return torch.tensor(rows, dtype=torch.float64).view(*blocks.shape[:-2], -1)


def _random(*lead: int, low: int = 0, high: int = 252) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (*lead, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(low, high, lead, generator=generator).to(torch.uint8)


def test_values_are_those_of_the_format() -> None:
    every = torch.arange(256).to(torch.uint8).view(1, 16, 16)
    for scale in (0, 1, 120, 127, 134, 251):
        scales = torch.full((1, 16), scale, dtype=torch.uint8)
        values = dequantise(every, scales)
        assert values.dtype == torch.bfloat16
        assert torch.equal(values.double(), _exact(every, scales)), scale
    blocks, scales = _random(3, 7, 5)
    assert torch.equal(dequantise(blocks, scales).double(), _exact(blocks, scales))
    assert dequantise(blocks, torch.full_like(scales, 255)).isnan().all()


def test_values_are_those_of_transformers() -> None:
    blocks, scales = _random(3, 8, 2, low=100, high=140)
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantise(blocks, scales).mT, theirs)


@pytest.mark.mutant
def test_the_comparison_notices_exchanged_halves_and_another_bias() -> None:
    blocks, scales = _random(2, 3, 4, low=100, high=140)
    for wrong in ((blocks >> 4 | blocks << 4, scales), (blocks, scales + 1), (blocks.flip(-1), scales)):
        assert not torch.equal(dequantise(*wrong).double(), _exact(blocks, scales))


# --- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model, whose experts have values of MXFP4."""
    monkeypatch.setitem(FAMILIES, NAME, {**FAMILIES[NAME], "intermediate_size": INNER})
    return family_model(NAME, 4)


def _checkpoint(folder: Path, model: Any) -> Path:
    """Save a checkpoint in its published form: experts in MXFP4, blocks and scales in different files.

    `model` gets the values.
    """
    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for name in [name for name in tensors if name.endswith(QUANTISED)]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = _random(experts, outputs, inputs // 32, low=121, high=125)
        halves[0][f"{name}_scales"], halves[1][f"{name}_blocks"] = scales, blocks
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales))
    path.unlink()
    for number, content in enumerate((tensors | halves[0], halves[1])):
        save_file(content, folder / f"model-{number}.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_is_served_as_its_values_and_takes_a_refresh(model: Any, tmp_path: Path) -> None:
    ours = load_tiny(_checkpoint(tmp_path / "m", model), torch.float32)
    log_probs, routes = _theirs(model, _ids(3))
    got = _ours(ours, _ids(3), "torch_native")
    assert (got.log_probs - log_probs).abs().max() < 1e-4 and torch.equal(got.routes, torch.stack(routes, 1))
    after = family_model(NAME, 5)
    ledger = WeightLedger(ours.weights.metas())
    load_weights(ours.weights, after.state_dict().items(), DirectSink(ours.weights), ledger, cast=True)
    ledger.settle()
    assert (_ours(ours, _ids(3), "torch_native").log_probs - _theirs(after, _ids(3))[0]).abs().max() < 1e-4


def test_ranks_read_what_they_hold(model: Any, tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "m", model)
    for layout in (
        ParallelLayout(2, 1, 1, enable_dp_attention=False),
        ParallelLayout(2, 1, 2, enable_dp_attention=False),
    ):
        found = several_ranks(folder, layout, MIXED, moe_a2a_backend="none")
        assert largest_difference(found, one_rank(folder, MIXED)) < 1e-12


def test_a_refresh_in_mxfp4_is_refused(model: Any, tmp_path: Path) -> None:
    weights = load_tiny(_checkpoint(tmp_path / "m", model), torch.float32).weights
    wire = TensorMeta("model.layers.0.mlp.experts.down_proj_blocks", torch.uint8, (8, 64, 3, 16))
    with pytest.raises(UnknownTensorError, match="down_proj_blocks is in MXFP4, which only a start reads"):
        weights.split(wire)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [(None, "down_proj_blocks is missing"), ((8, 64, 2, 16), "not in MXFP4"), ((8, 60, 3, 16), "not in MXFP4")],
)
def test_halves_that_do_not_fit_are_refused(
    model: Any, tmp_path: Path, blocks: tuple[int, ...] | None, message: str
) -> None:
    folder, name = _checkpoint(tmp_path / "m", model), "model.layers.1.mlp.experts.down_proj_blocks"
    tensors = load_file(folder / "model-1.safetensors")
    del tensors[name]
    if blocks is not None:
        tensors[name] = torch.zeros(blocks, dtype=torch.uint8)
    save_file(tensors, folder / "model-1.safetensors")
    with pytest.raises(StartupError, match=message):
        load_tiny(folder, torch.float32)


def test_scales_that_are_no_number_are_refused(model: Any, tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "m", model)
    tensors = load_file(folder / "model-0.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][5, 3, 1] = 255
    save_file(tensors, folder / "model-0.safetensors")
    with pytest.raises(StartupError, match=r"not finite in model.layers.1.mlp.experts.5.down_proj.weight"):
        load_tiny(folder, torch.float32)


def test_metas_of_halves_become_metas_of_values() -> None:
    blocks = TensorMeta("l.experts.down_proj_blocks", torch.uint8, (4, 64, 3, 16))
    scales = TensorMeta("l.experts.down_proj_scales", torch.uint8, (4, 64, 3))
    other = TensorMeta("l.router_scales", torch.uint8, (4,))
    whole = TensorMeta("l.experts.down_proj", torch.bfloat16, (4, 96, 64))
    assert value_metas([scales, other, blocks]) == [other, whole]
    with pytest.raises(CoverageError):
        value_metas([scales])
    with pytest.raises(ShapeMismatchError):
        value_metas([TensorMeta(scales.name, torch.uint8, (4, 64, 2)), blocks])


def test_other_quantisations_are_refused(model: Any, tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "m", model)
    config = json.loads((folder / "config.json").read_text())
    for wrong in ({"quant_method": "gptq"}, {"quant_method": "mxfp4", "group_size": 16}, "mxfp4"):
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": wrong}))
        with pytest.raises(StartupError, match="quantization_config"):
            load_model_config(folder)
