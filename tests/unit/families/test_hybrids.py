"""Configurations of Qwen3-Next and Qwen3.5: the fields that are read and the ones that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import AttentionSpec, DenseSpec, GatedDeltaSpec, YarnScaling
from rollout.families.registry import model_config_from_dict

# As published, but for sizes.
NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
DELTA = GatedDeltaSpec(
    num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_size=4, merged_by_key_head=True
)
TEXT = {key: value for key, value in NEXT.items() if key not in ("architectures", "model_type", "num_experts")}


def test_every_fourth_layer_attends() -> None:
    config = model_config_from_dict(NEXT)
    mixers = [layer.attention for layer in config.layers]
    assert [isinstance(mixer, AttentionSpec) for mixer in mixers] == 2 * [False, False, False, True]
    assert mixers[0] == DELTA
    attention = mixers[3]
    assert isinstance(attention, AttentionSpec) and attention.rotary is not None
    assert (attention.rotary.dim, attention.output_gate, attention.qk_norm) == (8, True, True)
    assert config.norm.weight_offset == 1.0
    assert config.moe is not None
    assert (config.moe.shared_inner, config.moe.shared_gate, config.moe.shared_name) == (48, True, "shared_expert")
    assert config.moe_layer_ids == tuple(range(8))


def test_layer_types_and_dense_layers_where_they_are_named() -> None:
    names = ["full_attention", *["linear_attention"] * 7]
    config = model_config_from_dict({**NEXT, "layer_types": names, "mlp_only_layers": [2], "decoder_sparse_step": 2})
    assert [type(layer.attention) for layer in config.layers[:2]] == [AttentionSpec, GatedDeltaSpec]
    assert config.moe_layer_ids == (1, 3, 5, 7)
    assert config.layers[2].mlp == DenseSpec(inner=96)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_the_text_model_of_one_that_sees(architecture: str) -> None:
    """The configuration of the text model gives the same model alone and as a part of the whole."""
    is_moe = "Moe" in architecture
    text = {**TEXT, "num_experts": 16} if is_moe else {k: v for k, v in TEXT.items() if k != "moe_intermediate_size"}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    text |= {"rope_parameters": rope, "dtype": "float32", "eos_token_id": 5}
    alone = model_config_from_dict({**text, "architectures": [architecture], "tie_word_embeddings": True})
    sees = architecture.replace("CausalLM", "ConditionalGeneration")
    whole = {"architectures": [sees], "text_config": text, "vision_config": {"depth": 27}, "tie_word_embeddings": True}
    inside = model_config_from_dict(whole)
    assert replace(inside, architecture=architecture) == alone
    assert (alone.is_moe, alone.tie_word_embeddings, alone.torch_dtype) == (is_moe, True, "float32")
    assert alone.eos_token_ids == (5,)
    assert alone.layers[0].attention == replace(DELTA, merged_by_key_head=False)


def test_the_yarn_scaling_of_a_longer_context_is_read() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 128}
    config = model_config_from_dict({**NEXT, "rope_scaling": rope})
    rotary = config.layers[3].attention.rotary
    assert rotary is not None and isinstance(rotary.scaling, YarnScaling) and rotary.dim == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer type 'sliding_attention' is not supported"),
        ({"layer_types": ["linear_attention"] * 7}, "layer_types has 7 entries, but num_hidden_layers is 8"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim 9 is not supported"),
        ({"linear_num_value_heads": 3}, "3 linear value heads are not a multiple of 2 key heads"),
    ],
)
def test_an_unsupported_or_contradictory_setting_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        model_config_from_dict({**NEXT, **change})
