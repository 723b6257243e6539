"""A trainer's small MoE model, of the shape of the engine in `tests.routes_judge`."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from capture.replay import find_routers


def trainer_model(
    seed: int = 0, norm_topk_prob: bool = True, dtype: torch.dtype = torch.float32
) -> Qwen3MoeForCausalLM:
    """Build a model of three layers, the first dense, with routers scaled up so that their choices are decisive."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_only_layers=[0],
        norm_topk_prob=norm_topk_prob,
        experts_implementation="eager" if dtype == torch.float64 else None,  # the default kernel has no float64
    )
    model = Qwen3MoeForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for router in find_routers(model):
            router.weight.normal_(std=1.0)  # type: ignore[operator, union-attr]
    return model
