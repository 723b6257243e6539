"""Reading of adapters: PEFT's folders, the quirks of other writers, and one line for everything that is not served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.adapters.config import LoraConfig
from rollout.adapters.peft_folder import read_adapter
from rollout.core.errors import AdapterError
from tests.adapters import save_adapter

Q = "model.layers.1.self_attn.q_proj"
PREFIX = "base_model.model."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return save_adapter(folder, "qwen3", 3, target_modules=["q_proj", "down_proj"], r=4, lora_alpha=8)


def edited(
    saved: Path, folder: Path, config: dict[str, Any] | None = None, tensors: Callable[[Tensors], Tensors] | None = None
) -> Path:
    """Write a copy of the adapter with these settings and tensors changed."""
    raw = json.loads((saved / "adapter_config.json").read_text()) | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    content = load_file(saved / "adapter_model.safetensors")
    save_file(tensors(content) if tensors else content, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_read_as_it_was_saved(saved: Path) -> None:
    adapter, stored = read_adapter(saved), load_file(saved / "adapter_model.safetensors")
    assert len(adapter.modules) == 6 and adapter.rank == 4
    a, b, scale = adapter.modules[Q]
    assert torch.equal(a, stored[f"{PREFIX}{Q}.lora_A.weight"]) and torch.equal(b, stored[f"{PREFIX}{Q}.lora_B.weight"])
    assert scale == 2.0


def test_other_writers_names_mean_the_same(saved: Path, tmp_path: Path) -> None:
    """Names without PEFT's prefix, with the adapter's name, and with the wrappers of compilers and FSDP."""

    def renamed(tensors: Tensors) -> Tensors:
        spelt = {}
        for name, tensor in tensors.items():
            name = name.removeprefix(PREFIX).replace("lora_A.weight", "lora_A.default.weight")
            spelt[name.replace("self_attn.", "_fsdp_wrapped_module.self_attn._orig_mod.")] = tensor
        return spelt

    assert read_adapter(edited(saved, tmp_path, tensors=renamed)).digest == read_adapter(saved).digest


def test_the_digest_names_tensors_and_scales(saved: Path, tmp_path: Path) -> None:
    def one_bit(tensors: Tensors) -> Tensors:
        name = f"{PREFIX}{Q}.lora_A.weight"
        tensors[name].view(torch.int32)[0, 0] ^= 1
        return tensors

    changes: list[dict[str, Any]] = [
        {},
        {"tensors": one_bit},
        {"config": {"lora_alpha": 9}},
        {"config": {"alpha_pattern": {"layers.2.mlp.down_proj": 9}}},
        {"config": {"use_rslora": True}},
    ]
    assert len({read_adapter(edited(saved, tmp_path, **change)).digest for change in changes}) == len(changes)


@pytest.mark.parametrize("pattern", ["q_proj", "layers.1.self_attn.q_proj", r".*\.1\..*q_proj", Q])
def test_patterns_match_as_in_peft(pattern: str) -> None:
    raw = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    config = LoraConfig.of(raw | {"rank_pattern": {pattern: 4}, "alpha_pattern": {pattern: 2}})
    assert (config.rank_of(Q), config.scale_of(Q)) == (4, 0.5)
    other = Q.replace("q_proj", "xq_proj").replace(".1.", ".11.")
    assert (config.rank_of(other), config.scale_of(other)) == (8, 2.0)
    stabilised = LoraConfig.of(raw | {"use_rslora": True, "r": 4})
    assert stabilised.scale_of(Q) == 8.0


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "only LORA"),
    "DoRA": ({"use_dora": True}, "use_dora"),
    "biases": ({"bias": "all"}, "bias is 'all'"),
    "biases of B": ({"lora_bias": True}, "lora_bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "parameters in no list": ({"target_parameters": "mlp.experts"}, "target_parameters must be a list of names"),
    "an initialisation that changes the base": ({"init_lora_weights": "pissa"}, "changes the base model"),
    "a setting of tomorrow": ({"use_squared": True}, "use_squared is not known"),
    "alpha 0": ({"lora_alpha": 0}, "lora_alpha must be a positive"),
    "alpha 0 of a module": ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern"),
    "no number": ({"lora_alpha": "NaN"}, "lora_alpha"),
    "rank 0": ({"r": 0}, "r must be"),
    "another rank": ({"r": 5}, "not of rank 5"),
    "another rank of a module": ({"rank_pattern": {"q_proj": 2}}, f"{Q.replace('1', '0')}.*not of rank 2"),
    "a broken pattern": ({"rank_pattern": {"(": 2}}, "cannot be read as a pattern"),
    "flags within a pattern": ({"rank_pattern": {"q(?i)_proj": 2}}, "rank_pattern"),
    "a pattern of no bound": ({"rank_pattern": {"(q+)+x": 2}}, "too many repeats"),
    "repeats behind a comment": ({"rank_pattern": {"(?#[)(q+)+(?#])": 2}}, "too many repeats"),
    "many repeats": ({"rank_pattern": {".*.*.*.*x": 2}}, "too many repeats"),
    "many alternatives": ({"rank_pattern": {"(q|qq)" * 30: 2}}, "too many repeats"),
    "a long pattern": ({"rank_pattern": {"q" * 600: 2}}, "is too long"),
    "a repeat of too many": ({"rank_pattern": {"q{99999999999999999999}": 2}}, "cannot be read as a pattern"),
    "patterns in a list": ({"rank_pattern": []}, "rank_pattern must be an object"),
    "a great alpha": ({"lora_alpha": 10**400}, "lora_alpha must be a positive"),
    "a text for a switch": ({"use_rslora": "false"}, "use_rslora must be true or false"),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_settings_that_are_not_served_are_refused_by_name(saved: Path, tmp_path: Path, what: str) -> None:
    config, reason = BAD_SETTINGS[what]
    with pytest.raises(AdapterError, match=reason) as caught:
        read_adapter(edited(saved, tmp_path, config))
    assert "\n" not in str(caught.value)


def with_value(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[f"{PREFIX}{Q}.{name}"][0, 0] = value
        return tensors

    return change


def renaming(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


BAD_TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "NaN": (with_value("lora_A.weight", float("nan")), f"{Q}: lora_A has values that are not finite"),
    "infinity": (with_value("lora_B.weight", float("inf")), f"{Q}: lora_B has values"),
    "half of a module": (
        lambda x: {k: v for k, v in x.items() if "1.self_attn.q_proj.lora_B" not in k},
        "no tensor lora_B",
    ),
    "nothing": (lambda x: {}, "holds no tensors"),
    "an embedding": (renaming("lora_A", "lora_embedding_A"), "adapts an embedding"),
    "a magnitude": (renaming("lora_A", "lora_magnitude_vector"), "DoRA"),
    "another name": (renaming("lora_A.weight", "ia3_l"), "is not the name"),
    "integers": (lambda x: {k: v.to(torch.int32) for k, v in x.items()}, "must be a matrix of floats"),
    "a vector": (lambda x: {k: v.flatten() for k, v in x.items()}, "must be a matrix"),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_tensors_that_are_not_served_are_refused_by_name(saved: Path, tmp_path: Path, what: str) -> None:
    tensors, reason = BAD_TENSORS[what]
    with pytest.raises(AdapterError, match=reason) as caught:
        read_adapter(edited(saved, tmp_path, tensors=tensors))
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_damaged(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config.json is missing"):
        read_adapter(tmp_path)
    edited(saved, tmp_path)
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match="is a pickle"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(AdapterError, match="not a JSON object"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="cannot be parsed as JSON"):
        read_adapter(tmp_path)


def test_patterns_of_the_most_repeats_end_soon() -> None:
    """A failed match of three repeats with the longest name must take seconds at most, not for ever."""
    config = LoraConfig.of({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {".*a+.*x": 4}})
    assert config.rank_of("a" * 200) == 2
