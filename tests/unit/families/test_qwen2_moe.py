"""The fields that are read of the configuration of Qwen2-MoE."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import AttentionSpec, DenseSpec, LayerSpec, MoESpec, RotarySpec, RouterSpec
from rollout.families.registry import model_config_from_dict

QWEN2_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_keys_that_published_qwen2_moe_checkpoints_have() -> None:
    """The keys are Qwen/Qwen1.5-MoE-A2.7B's; its window has no effect, because the file switches it off."""
    config = model_config_from_dict(QWEN2_MOE)
    rotary = RotarySpec(dim=128, theta=1000000.0)
    attention = AttentionSpec(num_heads=16, num_kv_heads=16, head_dim=128, rotary=rotary, qkv_bias=True)
    router = RouterSpec(num_experts=60, top_k=4, normalise=False)
    experts = MoESpec(router=router, inner=1408, shared_inner=5632, shared_gate=True, shared_name="shared_expert")
    assert set(config.layers) == {LayerSpec(attention=attention, mlp=experts)} and len(config.layers) == 24


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ({"decoder_sparse_step": None, "mlp_only_layers": None}, [0, 1, 2, 3]),
        ({"num_experts": 0}, []),
    ],
)
def test_layers_of_qwen2_moe_that_have_experts(change: dict[str, Any], sparse: list[int]) -> None:
    config = model_config_from_dict({**QWEN2_MOE, "num_hidden_layers": 4, **change})
    assert list(config.moe_layer_ids) == sparse
    assert all(x.mlp == DenseSpec(inner=5632) for i, x in enumerate(config.layers) if i not in sparse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer type 'sliding_attention' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"shared_expert_intermediate_size": None}, "config.json: "),
    ],
)
def test_what_is_not_built_of_qwen2_moe_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        model_config_from_dict({**QWEN2_MOE, **change})


def test_qwen2_moe_without_biases() -> None:
    attention = model_config_from_dict({**QWEN2_MOE, "qkv_bias": False}).layers[0].attention
    assert isinstance(attention, AttentionSpec) and not attention.qkv_bias
