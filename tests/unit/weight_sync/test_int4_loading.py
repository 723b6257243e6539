"""Checkpoints in INT4 as compressed-tensors packs them: what is loaded, bit for bit, and what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout.core.errors import StartupError
from rollout.families.registry import load_model_config
from tests.fp8_reference import set_config
from tests.held_reference import int4, int4_values
from tests.kernels import native_ops
from tests.model_zoo import load_tiny, logical_tensors, tiny_checkpoint
from tests.pair_forms import int4_config, int4_parts
from tests.scheduler_harness import Harness
from weight_sync.assembly import PairedTensors
from weight_sync.tensor_meta import Pair

Named = dict[str, torch.Tensor]
PROMPTS = [[7, 3, 9], list(range(20, 50)), [5]]
DOWN = "model.layers.1.mlp.experts.0.down_proj.weight"


class Int4Case:
    """A checkpoint in INT4, one with its values, and the integers and scales by name."""

    def __init__(self, folder: Path, group: int) -> None:
        sizes = {"hidden_size": 128, "moe_intermediate_size": 256}
        self.plain = tiny_checkpoint(folder / "plain", "moe_dense_first", dtype="bfloat16", **sizes)
        self.group = group
        tensors = logical_tensors(self.plain)
        experts = [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]
        self.pairs = {name: int4(tensors[name].bfloat16(), group) for name in experts}
        for _, scales in self.pairs.values():  # which no rule of ours gives, so that nothing but a copy has them
            scales.mul_(torch.linspace(1, 1.7, scales.numel()).view_as(scales))
        values = {name: int4_values(*pair, group, torch.bfloat16) for name, pair in self.pairs.items()}
        self.values = written(folder / "values", self.plain, tensors | values)
        self.stored = {name: x for name, x in tensors.items() if name not in experts}
        for name, (integers, scales) in self.pairs.items():
            self.stored |= int4_parts(name, integers, scales)
        self.int4 = written(folder / "int4", self.plain, self.stored)
        set_config(self.int4, int4_config(group))


def written(folder: Path, like: Path, tensors: Named) -> Path:
    """Write a checkpoint of two files with the configuration of another one."""
    folder.mkdir()
    names = sorted(tensors)
    for number, some in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name].contiguous() for name in some}, folder / f"model-{number}.safetensors")
    for item in like.iterdir():
        if item.suffix != ".safetensors" and item.is_file() and "index" not in item.name:
            (folder / item.name).write_bytes(item.read_bytes())
    return folder


@pytest.fixture(scope="module", params=[32, 128])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Int4Case:
    native_ops()
    return Int4Case(tmp_path_factory.mktemp("int4") / "m", request.param)


def samples(harness: Harness) -> list[tuple[list[int], list[float], bytes]]:
    found = harness.generate(PROMPTS, {"max_new_tokens": 8, "temperature": 1.0})
    return [(each.token_ids, each.logprobs, each.routes.tobytes()) for each in found]


def test_a_start_neither_copies_parts_nor_reads_those_of_other_ranks(
    case: Int4Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have all words before all scales: copies of what waits would be copies of whole files."""
    weights = load_tiny(case.plain, torch.bfloat16).weights
    parts = {name: case.stored[name] for name in int4_parts(DOWN, *case.pairs[DOWN])}
    pairs = PairedTensors(weights, at_start=True)
    names = [f"{DOWN}{suffix}" for suffix in ("_shape", "_packed", "_scale")]
    assert pairs.take([(name, parts[name]) for name in names[:2]]) == []
    assert (pairs.num_waiting, pairs.num_bytes) == (2, 0)
    (whole,) = pairs.take([(names[2], parts[names[2]])])
    assert torch.equal(whole.content, int4_values(*case.pairs[DOWN], case.group, torch.bfloat16))
    assert all(part.data_ptr() == parts[f"{DOWN}{suffix}"].data_ptr() for suffix, part in whole.parts.items())
    monkeypatch.setattr(weights, "places", lambda name: [])
    (elsewhere,) = PairedTensors(weights, at_start=True).take([(name, parts[name].to("meta")) for name in names])
    assert elsewhere.content.shape == whole.content.shape and not elsewhere.content.any()


@pytest.mark.parametrize("weight_format", ["int4", "int4-128", "plain"])
def test_a_checkpoint_is_held_bit_for_bit_or_served_as_its_values(case: Int4Case, weight_format: str) -> None:
    if (case.group, weight_format) == (32, "int4-128"):
        with pytest.raises(
            StartupError, match=r"has groups of 32, but --cpu-weight-format int4-128 holds groups of 128"
        ):
            Harness(case.int4, dtype="bfloat16", cpu_weight_format=weight_format)
        return
    harness = Harness(case.int4, dtype="bfloat16", cpu_weight_format=weight_format)
    assert samples(harness) == samples(Harness(case.values, dtype="bfloat16"))
    if weight_format == "plain":
        return
    weights = harness.scheduler.runner.state.model.weights
    assert weights.held_formats().keys() == case.pairs.keys()
    for name, (integers, scales) in case.pairs.items():
        pair = weights.places(name)[0].saved()
        assert isinstance(pair, Pair) and torch.equal(pair.weight, integers)
        assert torch.equal(pair.scale[:, :: case.group // pair.block[1]], scales)


def test_float32_serves_the_values_of_bfloat16(case: Int4Case) -> None:
    weights = load_tiny(case.int4, torch.float32).weights
    for name, pair in case.pairs.items():
        expected = int4_values(*pair, case.group, torch.bfloat16).float()
        assert torch.equal(weights.places(name)[0].read(), expected)


@pytest.mark.parametrize("part", ["_packed", "_scale", "_shape"])
def test_a_part_that_is_missing_is_named(case: Int4Case, tmp_path: Path, part: str) -> None:
    left = {name: x for name, x in case.stored.items() if name != f"{DOWN}{part}"}
    set_config(written(tmp_path / "m", case.plain, left), int4_config(case.group))
    with pytest.raises(StartupError, match=rf"{DOWN}{part} is missing, another part of"):
        load_tiny(tmp_path / "m", torch.bfloat16)


def test_parts_that_do_not_belong_together_are_refused(case: Int4Case, tmp_path: Path) -> None:
    wrong = {
        "is not in INT4": {f"{DOWN}_scale": torch.ones(128, 3, dtype=torch.bfloat16)},
        "_shape is": {f"{DOWN}_shape": torch.tensor([128, 255])},
        "not finite": {f"{DOWN}_scale": torch.full_like(case.stored[f"{DOWN}_scale"], float("inf"))},
    }
    for number, (message, change) in enumerate(wrong.items()):
        path = written(tmp_path / str(number), case.plain, case.stored | change)
        set_config(path, int4_config(case.group))
        with pytest.raises(StartupError, match=message):
            load_tiny(path, torch.bfloat16)
    path = written(tmp_path / "unsaid", case.plain, case.stored)
    with pytest.raises(StartupError, match="is in INT4, but the quantization_config does not"):
        load_tiny(path, torch.bfloat16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 8),
        ("symmetric", False),
        ("group_size", 64),
        ("actorder", "group"),
        ("strategy", "channel"),
        ("x", 1),
    ],
)
def test_other_forms_are_refused_by_name(case: Int4Case, tmp_path: Path, key: str, value: object) -> None:
    stated = deepcopy(int4_config(32))
    stated["config_groups"]["group_0"]["weights"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(json.loads((case.plain / "config.json").read_text())))
    set_config(tmp_path, stated)
    with pytest.raises(StartupError, match=rf"quantization_config with {key} .* is not supported"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_other_methods_are_refused_by_name(case: Int4Case, tmp_path: Path, method: str) -> None:
    (tmp_path / "config.json").write_bytes((case.plain / "config.json").read_bytes())
    set_config(tmp_path, {"quant_method": method, "bits": 4, "group_size": 128})
    with pytest.raises(StartupError, match=rf"quant_method '{method}' is not supported"):
        load_model_config(tmp_path)
