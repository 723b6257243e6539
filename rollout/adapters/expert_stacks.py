"""Adapters of all routed experts of a layer in one pair of tensors: whose they are, and what they do to each expert.

    written by              module                          A               B
    PEFT's ParamWrapper     ..experts.base_layer, inner     [E * r, D]      [O, r * E]: of a rank all experts
                            ..experts, outer
    Megatron-Bridge         ..experts.gate_up_proj          [E, r, D]       [E, O, r]
                            ..experts.down_proj
    Tinker, SGLang          ..experts.w1, w3, w2            [E or 1, r, D]  [E or 1, O, r]: 1 is shared by all

PEFT wraps gate_up_proj first, so that it is the inner one of two; of one alone the configuration tells which it is.

Shapes: E experts, r rank, D input features, O output features.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch

from rollout.core.errors import AdapterError
from weight_sync.fused_experts import FusedLayout

_STACK = re.compile(r".*\bexperts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)")
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
WRAPPED = ".base_layer"
"""The end of the name of a module that PEFT has put a wrapper around."""


def is_stack(module: str) -> bool:
    """Return whether this is the name of a projection of all experts, as `stack_name` returns it."""
    return _STACK.fullmatch(module) is not None


def stack_name(module: str, modules: Collection[str], target_parameters: Sequence[str]) -> str | None:
    """Return the name of the parameter that PEFT's wrapper `module` adapts; None for another module.

    `modules`: all of the adapter.  Raises `AdapterError` where nothing tells which parameter it is.
    """
    if module.endswith(f".experts{WRAPPED}"):
        return module.removesuffix(WRAPPED) + ".gate_up_proj"
    if not module.endswith(".experts"):
        return None
    if module + WRAPPED in modules:
        return module + ".down_proj"
    kinds = {target.rpartition(".")[2] for target in target_parameters} & {"gate_up_proj", "down_proj"}
    if len(kinds) != 1:
        raise AdapterError(
            f"{module}: target_parameters of adapter_config.json must name gate_up_proj or down_proj, or there must be "
            f"tensors of both"
        )
    return f"{module}.{kinds.pop()}"


def stacked(module: str, a: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PEFT's A [E * r, D] and B [O, r * E] as [E, r, D] and [E, O, r].  Raises `AdapterError`."""
    if a.shape[0] % rank or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not of experts of rank {rank}, which "
            f"adapter_config.json gives them"
        )
    num_experts = a.shape[0] // rank
    return a.view(num_experts, rank, -1), b.view(b.shape[0], rank, num_experts).permute(2, 0, 1)


def parts_of(module: str) -> tuple[str, list[str]]:
    """Return the experts' name of a stack, and the projections that it adapts."""
    experts, _, kind = module.rpartition(".")
    return experts, ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [_PARTS.get(kind, kind)]


def of_expert(
    tensors: tuple[torch.Tensor, torch.Tensor], expert: int, part: int, num_parts: int, layout: FusedLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r, D] and B [O, r] of one projection of an expert: `part` of the `num_parts` in these stacks."""
    a_RD, b_OR = (stack[expert if stack.shape[0] > 1 else 0] for stack in tensors)
    if num_parts == 1:
        return a_RD, b_OR
    return a_RD, b_OR[part::2] if layout == "interleaved" else b_OR.chunk(2)[part]
