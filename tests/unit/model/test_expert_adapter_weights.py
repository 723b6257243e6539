"""Tensors of adapters of routed experts as a weight update takes them: announced, or from the configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout.adapters.config import LoraConfig, target_modules
from rollout.adapters.peft_folder import adapter_of, read_adapter
from rollout.core.errors import AdapterError
from rollout.layers.lora import SlotSizes
from rollout.model.adapter_places import AdapterPlaces, is_dense
from rollout.model.adapter_weights import AdapterWeights, announced_weights, configured_weights
from tests.adapters import save_adapter
from tests.expert_adapters import LAYOUTS, STACKS, rewritten
from tests.family_zoo import family_checkpoint
from tests.model_zoo import load_tiny
from weight_sync.tensor_meta import TensorMeta

SEED, RANK = 3, 2
TARGETS = {
    "both": {"target_parameters": list(STACKS), "target_modules": []},
    "down alone, and attention": {"target_parameters": [STACKS[1]], "target_modules": ["q_proj"]},
    "patterns": {
        "target_parameters": list(STACKS),
        "target_modules": ["o_proj"],
        "rank_pattern": {"experts.down_proj": 1},
    },
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> AdapterPlaces:
    model = load_tiny(family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", SEED))
    return AdapterPlaces(model, SlotSizes(1, 4), wanted=lambda _: True)


def received(weights: AdapterWeights, folder: Path) -> str:
    """Write the tensors of a folder as an update does, and return the digest of the adapter that came."""
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        (piece,) = weights.split(TensorMeta(name, tensor.dtype, tuple(tensor.shape)))
        weights.write(piece.name, tensor)
    return adapter_of(weights.pairs(), LoraConfig.of(config_of(folder))).digest


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "adapter_config.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TARGETS)
def test_a_configuration_says_which_tensors_come(places: AdapterPlaces, name: str, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", "qwen3_moe", SEED, r=RANK, lora_alpha=4, **TARGETS[name])
    raw = config_of(folder)
    weights = configured_weights(LoraConfig.of(raw), target_modules(raw), places)
    assert len(weights.metas()) == len(load_file(folder / "adapter_model.safetensors"))
    adapter = read_adapter(folder)
    assert received(weights, folder) == adapter.digest
    ranks = {module: each.rank for module, each in adapter.modules.items()}
    of_down = TARGETS[name].get("rank_pattern", {}).get("experts.down_proj", RANK)  # type: ignore[attr-defined]
    assert all(rank == (of_down if module.endswith("experts.down_proj") else RANK) for module, rank in ranks.items())
    assert any(module.endswith("experts.down_proj") for module in ranks) and not adapter.unmatched


@pytest.mark.parametrize("layout", ["peft", *LAYOUTS])
def test_a_manifest_may_have_every_layout(places: AdapterPlaces, layout: str, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", "qwen3_moe", SEED, r=RANK, lora_alpha=4, **TARGETS["both"])
    if layout != "peft":
        folder = rewritten(folder, tmp_path / "b", layout, RANK, is_interleaved=False)
    tensors = load_file(folder / "adapter_model.safetensors")
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    assert received(announced_weights(metas, places), folder) == read_adapter(folder).digest


def test_a_server_without_memory_for_experts_takes_none(tmp_path: Path) -> None:
    model = load_tiny(family_checkpoint(tmp_path / "model", "qwen3_moe", SEED))
    without = AdapterPlaces(model, SlotSizes(1, 4), wanted=is_dense)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **TARGETS["both"]}
    with pytest.raises(AdapterError, match="the model has no module that target_modules experts"):
        configured_weights(LoraConfig.of(config), target_modules(config), without)
    stack = {"model.layers.1.mlp.experts.down_proj": {"A": torch.ones(8, 2, 32), "B": torch.ones(8, 64, 2)}}
    with pytest.raises(AdapterError, match=r"start it with --lora-target-modules all$"):
        without.prepared(adapter_of(stack, LoraConfig.of(config)))


def test_experts_that_share_an_adapter_come_once(places: AdapterPlaces) -> None:
    """SkyRL's `share_expert_adapters`: four experts in turn have one adapter, which comes for the first of them."""
    targets = ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig.of({"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": targets})
    generator = torch.Generator().manual_seed(0)
    whole, aliases = dict[str, torch.Tensor](), dict[str, str]()
    for name, meta in configured_weights(config, targets, places).metas().items():
        expert = re.search(r"(?<=\.experts\.)\d+(?=\.)", name)
        first = name if expert is None else name.replace(f".{expert[0]}.", f".{int(expert[0]) // 4 * 4}.", 1)
        if first != name and first in whole:
            aliases[name] = first
        whole[name] = whole[first] if name in aliases else torch.randn(meta.shape, generator=generator)
    assert len(aliases) > len(whole) / 2

    def digest(aliases: dict[str, str]) -> str:
        weights = configured_weights(config, targets, places, aliases)
        for name, tensor in whole.items():
            if name not in aliases:
                for piece in weights.split(TensorMeta(name, tensor.dtype, tuple(tensor.shape))):
                    weights.write(piece.name, piece.of(tensor))
        return adapter_of(weights.pairs(), config).digest

    assert digest(aliases) == digest({})
