"""A trainer's model whose routes the tests of this folder record and force."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from capture.replay import find_routers
from tests.routes_judge import EXPERTS


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    """A trainer's model of the engine's shape, with decisive routers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        mlp_only_layers=[0],
    )
    made = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for router in find_routers(made):
            router.weight.normal_(std=1.0)  # type: ignore[operator, union-attr]
    return made
