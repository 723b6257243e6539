"""Random adapters of tiny models, which PEFT makes and saves.

PEFT's own forward of the saved folder is the judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file

from tests.family_zoo import family_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = ("gate_proj", "up_proj", "down_proj")
MIXED_RANKS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 64)


def save_adapter(folder: Path, family: str, model_seed: int, seed: int = 1, **settings: Any) -> Path:
    """Save a random adapter of the family's tiny model; `settings` are of PEFT's `LoraConfig`.  Returns the folder."""
    model = peft.get_peft_model(family_model(family, model_seed), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def logprobs_of(family: str, model_seed: int, adapter: Path | None, ids: list[int]) -> list[float]:
    """Return the log-probabilities of tokens 1 .. of `ids` that transformers computes, with PEFT where asked."""
    model = family_model(family, model_seed)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    return _logprobs(model, ids)


def _logprobs(model: Any, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


Matrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def write_adapter(folder: Path, modules: Matrices, scale: float) -> Path:
    """Write an adapter of one rank as PEFT does: `modules` have their A [r, D] and B [O, r].  Returns the folder."""
    rank = next(iter(modules.values()))[0].shape[0]
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": []})
    )
    tensors = {}
    for name, sides in modules.items():
        for side, tensor in zip("AB", sides, strict=True):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_modules(checkpoint: Path, endings: Sequence[str], rank: int, seed: int) -> Matrices:
    """Return random A and B of the matrices in `checkpoint` whose names end so, routed experts one by one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, weight in sorted(load_file(file).items()):
            module = name.removesuffix(".weight")
            if module.endswith(tuple(endings)):
                shapes = ((rank, weight.shape[1]), (weight.shape[0], rank))
                a_RD, b_OR = (0.2 * torch.randn(shape, generator=generator) for shape in shapes)
                found[module] = a_RD, b_OR
    return found


def mixed_adapters(checkpoint: Path, folder: Path, targets: Sequence[Sequence[str]]) -> dict[str, Path]:
    """Write an adapter for each rank of `MIXED_RANKS`; they adapt `targets` by turns.  Returns folders by name."""
    return {
        f"a{number}": write_adapter(
            folder / f"a{number}", random_modules(checkpoint, targets[number % len(targets)], rank, number), 0.5
        )
        for number, rank in enumerate(MIXED_RANKS)
    }


def merged_logprobs(family: str, model_seed: int, modules: Matrices, scale: float, ids: list[int]) -> list[float]:
    """Return what transformers computes of `ids` with the products added to its weights."""
    model = family_model(family, model_seed)
    with torch.no_grad():
        for name, (a_RD, b_OR) in modules.items():
            model.get_submodule(name).weight += scale * (b_OR @ a_RD)
    return _logprobs(model, ids)
