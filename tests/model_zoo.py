"""Tiny random checkpoints of every supported kind, for everyone's tests.  Written by `make_checkpoint`.

moe_dense_first   Qwen3-MoE, its first layer dense, norm_topk_prob on, untied
moe               Qwen3-MoE, every layer sparse, norm_topk_prob off, tied
dense             Qwen3, dense, untied
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eplb.expert_location import trivial_location
from eplb.placement import ExpertPlacement
from rollout.core.model_config import ModelConfig, load_model_config
from rollout.entrypoints.make_checkpoint import CheckpointSpec, make_checkpoint
from rollout.layers.ops.base import LayerOps
from rollout.layers.ops.torch_ops import TorchOps
from rollout.models.decoder import DecoderForCausalLM
from rollout.models.load import load_model

KINDS: dict[str, dict[str, Any]] = {
    "moe_dense_first": {"layers": 3, "dense_first": 1},
    "moe": {"layers": 2, "dense_first": 0, "norm_topk_prob": False, "tie": True},
    "dense": {"layers": 2, "dense": True},
}
_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "experts": 8,
    "top_k": 3,
    "moe_intermediate_size": 32,
    "context_length": 512,
    "dtype": "float32",
}


def tiny_spec(kind: str = "moe_dense_first", seed: int = 0, **overrides: Any) -> CheckpointSpec:
    return CheckpointSpec(**{**_TINY, **KINDS[kind], "seed": seed, **overrides})


def tiny_checkpoint(folder: Path, kind: str = "moe_dense_first", seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint into `folder`, which must be new or empty, and return it."""
    return make_checkpoint(folder, tiny_spec(kind, seed, **overrides))


def logical_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def trivial_placement(config: ModelConfig) -> ExpertPlacement:
    return ExpertPlacement(trivial_location(len(config.moe_layer_ids), config.num_experts))


def load_tiny(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    placement: ExpertPlacement | None = None,
    ops: LayerOps | None = None,
) -> DecoderForCausalLM:
    """The engine's model of a checkpoint, cold-loaded; trivial placement and plain torch unless told otherwise."""
    config = load_model_config(folder)
    return load_model(folder, config, dtype, "cpu", placement or trivial_placement(config), ops or TorchOps())
