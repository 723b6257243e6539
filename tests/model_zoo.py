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

from eplb.expert_location import ExpertLocationMetadata, trivial_location
from eplb.placement import ExpertPlacement
from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.families.registry import load_model_config
from rollout.kernels.ops import Ops, plain_ops
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.load import load_model
from weight_sync.sender import split_fused_experts

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


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint by name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def logical_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of `stored_tensors`, with the experts' tensors apart."""
    return dict(split_fused_experts(stored_tensors(folder).items()))


def trivial_placement(config: ModelConfig, parallel: Parallel | None = None) -> ExpertPlacement:
    return placed(trivial_location(len(config.moe_layer_ids), config.num_experts), parallel)


def placed(metadata: ExpertLocationMetadata, parallel: Parallel | None = None) -> ExpertPlacement:
    """Return the map as one rank sees it."""
    parallel = parallel or Parallel()
    return ExpertPlacement(metadata, ep_rank=parallel.position.ep_rank, ep_size=parallel.layout.ep_size)


def load_tiny(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    placement: ExpertPlacement | None = None,
    ops: Ops | None = None,
    parallel: Parallel | None = None,
    moe_a2a_backend: str = "none",
) -> DecoderForCausalLM:
    """Load the engine's model of a checkpoint; trivial placement and plain torch by default."""
    config = load_model_config(folder)
    placement = placement or trivial_placement(config, parallel)
    return load_model(
        folder,
        config,
        dtype,
        "cpu",
        placement,
        ops or plain_ops(),
        parallel=parallel,
        moe_backend=MoeBackend(moe_a2a_backend),
    )
