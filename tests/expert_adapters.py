"""Adapters of routed experts in every published layout, from the one that PEFT wrote."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
STACKS = ("experts.gate_up_proj", "experts.down_proj")
_PAIR = re.compile(r"(.*\.experts)(\.base_layer)?\.lora_A\.weight")


def _stacks(tensors: Tensors, rank: int) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Return A [E, r, D] and B [E, O, r] by the name of the experts, and "gate_up_proj" or "down_proj"."""
    found = {}
    for name, a in tensors.items():
        if match := _PAIR.fullmatch(name):
            experts, kind = match[1], "gate_up_proj" if match[2] else "down_proj"
            b = tensors[name.replace("lora_A", "lora_B")]
            num_experts = a.shape[0] // rank
            of_expert = [b[:, expert::num_experts] for expert in range(num_experts)]
            found[experts, kind] = a.view(num_experts, rank, -1), torch.stack(of_expert)
    return found


def bridge(stacks: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]], is_interleaved: bool) -> Tensors:
    """Return the tensors as Megatron-Bridge names them."""
    return {
        f"{experts}.{kind}.lora_{side}.weight": tensor.clone(memory_format=torch.contiguous_format)
        for (experts, kind), pair in stacks.items()
        for side, tensor in zip("AB", pair, strict=True)
    }


def _projections(
    stacks: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]], is_interleaved: bool
) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Return the stacks of gate, up and down."""
    found = {}
    for (experts, kind), (a, b) in stacks.items():
        if kind == "down_proj":
            found[experts, kind] = a, b
            continue
        gate, up = (b[:, 0::2], b[:, 1::2]) if is_interleaved else b.chunk(2, dim=1)
        found |= {(experts, "gate_proj"): (a, gate), (experts, "up_proj"): (a, up)}
    return found


def flat(stacks: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]], is_interleaved: bool) -> Tensors:
    """Return a pair of tensors for each projection of each expert."""
    return {
        f"{experts}.{expert}.{part}.lora_{side}.weight": tensor[expert].clone(memory_format=torch.contiguous_format)
        for (experts, part), pair in _projections(stacks, is_interleaved).items()
        for side, tensor in zip("AB", pair, strict=True)
        for expert in range(tensor.shape[0])
    }


def tinker(stacks: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]], is_interleaved: bool) -> Tensors:
    """Return stacks named w1, w3 and w2."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {
        f"{experts}.{names[part]}.lora_{side}.weight": tensor.clone(memory_format=torch.contiguous_format)
        for (experts, part), pair in _projections(stacks, is_interleaved).items()
        for side, tensor in zip("AB", pair, strict=True)
    }


LAYOUTS: dict[str, Callable[..., Tensors]] = {"flat": flat, "Megatron-Bridge": bridge, "Tinker": tinker}


def rewritten(adapter: Path, folder: Path, layout: str, rank: int, is_interleaved: bool) -> Path:
    """Write PEFT's adapter of all experts, of one rank, in another layout.  Returns the folder."""
    shutil.copytree(adapter, folder)
    stacks = _stacks(load_file(adapter / "adapter_model.safetensors"), rank)
    save_file(LAYOUTS[layout](stacks, is_interleaved), folder / "adapter_model.safetensors")
    return folder


def shared(adapter: Path, folder: Path, rank: int) -> tuple[Path, Path]:
    """Write an adapter with the A of gate and up and the B of down shared by all experts, once stacked and once flat.

    Returns the folders of both.
    """
    stacks = _stacks(load_file(adapter / "adapter_model.safetensors"), rank)
    common = {}
    for (experts, kind), (a, b) in stacks.items():
        is_down = kind == "down_proj"
        common[experts, kind] = (a, b[:1]) if is_down else (a[:1], b)
    folders = []
    for name, write in (("stacked", tinker), ("flat", flat)):
        made = common
        if name == "flat":
            count = max(max(a.shape[0], b.shape[0]) for a, b in common.values())
            made = {key: tuple(x.expand(count, -1, -1) for x in pair) for key, pair in common.items()}
        shutil.copytree(adapter, folder / name)
        save_file(write(made, False), folder / name / "adapter_model.safetensors")
        folders.append(folder / name)
    configure(folders[1], target_parameters=None, target_modules=["gate_proj", "up_proj", "down_proj"])
    return folders[0], folders[1]


def configure(folder: Path, **settings: Any) -> None:
    """Change an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
