"""Norm, rotation and projections equal transformers' Qwen3 bit for bit where the arithmetic is the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from rollout.core.specs.layer_specs import NormSpec
from rollout.core.specs.model_config import rotary_of
from rollout.kernels.operators.qk_norm_rope_store import qk_norm_rope_store, rotate
from rollout.layers.norm_rotary import QueryKeyNorm, RMSNorm, RotaryTable
from tests.kernels import angles, plain_build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs, ours = Qwen3RMSNorm(64, eps=1e-6).to(dtype), RMSNorm(64, NormSpec(eps=1e-6), plain_build(dtype))
    theirs.weight.data = torch.randn(64, generator=generator).to(dtype)
    ours.weight.copy_(theirs.weight.data)
    hidden = (3 * torch.randn(50, 64, generator=generator)).to(dtype)
    with torch.no_grad():
        expected = theirs(hidden)
    # The mean of squares may be summed in another order: at most one unit in the last place of the rounded norm.
    torch.testing.assert_close(ours(hidden, None), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert (ours(hidden, None) == expected).float().mean() > (0.99 if dtype != torch.float32 else 0.5)


def test_add_and_norm_is_add_then_norm() -> None:
    norm = RMSNorm(8, NormSpec(eps=1e-6), plain_build(torch.float64))
    norm.weight.copy_(torch.randn(8))
    hidden, residual = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    expected_residual = residual + hidden
    normed = norm(residual, hidden)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(normed, norm(expected_residual, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rotation_equals_rotate_half(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(9, 3, 16, generator=generator).to(dtype)
    positions = torch.tensor([0, 1, 2, 5, 17, 100, 511, 4096, 30000])
    rotary = angles(16, 30001, dtype, positions)
    cos, signed_sin = rotary.unsqueeze(2).unbind(1)
    half = signed_sin.shape[-1] // 2
    sin = torch.cat((-signed_sin[..., :half], signed_sin[..., half:]), dim=-1)
    expected, _ = apply_rotary_pos_emb(
        heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos.transpose(0, 1), sin.transpose(0, 1)
    )
    assert torch.equal(rotate(heads, rotary), expected[0].transpose(0, 1))


def test_float64_angles_are_float64() -> None:
    table = angles(4, 12346, torch.float64, torch.tensor([12345]))
    expected = torch.tensor([12345.0, 123.45], dtype=torch.float64).cos()
    torch.testing.assert_close(table[0, 0, :2], expected, atol=1e-10, rtol=0)


def test_float32_angles_are_rounded_correctly() -> None:
    """torch's angles are not: in some starts on two threads the cosines of half the positions were off by 1.5e-4."""
    positions = torch.arange(5000)
    table = angles(64, 5000, torch.float32, positions)
    radians = positions.float()[:, None] * (1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64))
    exact_cos = torch.tensor([[math.cos(x) for x in row] for row in radians[4990:].tolist()])
    assert torch.equal(table[4990:, 0, :32], exact_cos) and torch.equal(table[4990:, 0, 32:], exact_cos)
    for part, function in ((0, torch.cos), (1, torch.sin)):
        torch.testing.assert_close(table[:, part, 32:], function(radians.double()).float(), atol=1e-7, rtol=0)


def test_queries_and_keys_have_norms_of_their_own() -> None:
    layer = QueryKeyNorm(4, 2, 8, plain_build(torch.float64))
    q_norm, k_norm = torch.rand(8, dtype=torch.float64) + 0.5, torch.rand(8, dtype=torch.float64) + 2.5
    entries = {entry.name: entry for entry in layer.weight_entries("layer.self_attn.qk_norm")}
    for name, value in (("layer.self_attn.q_norm.weight", q_norm), ("layer.self_attn.k_norm.weight", k_norm)):
        assert entries[name].shape == (8,)
        for place in entries[name].places():
            place.write(value)
    heads = torch.randn(5, 6, 8, dtype=torch.float64)
    rotary = angles(8, 1, torch.float64, torch.zeros(5, dtype=torch.int64))
    pools = [torch.zeros(5, 2, 8, dtype=torch.float64) for _ in range(2)]
    qkv = torch.cat((heads, heads[:, :2]), dim=1).flatten(1)
    query = qk_norm_rope_store.plain(qkv, layer.weight, rotary, *pools, torch.arange(5), 1e-6)
    unit = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = torch.cat((unit[:, :4] * q_norm, unit[:, 4:] * k_norm), dim=1)
    torch.testing.assert_close(torch.cat((query, pools[0]), dim=1), expected, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("mscales", [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": 1.25}])
def test_yarn_angles_equal_the_angles_of_transformers(truncate: bool, mscales: dict[str, float]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": truncate, **mscales}
    rope |= {"original_max_position_embeddings": 128, "beta_fast": 24.0, "beta_slow": 1.5}
    config = GptOssConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=rope)
    theirs = GptOssRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 77, 4095])
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), positions[None])
    spec = rotary_of({"rope_parameters": rope, "max_position_embeddings": 4096}, 64, ("yarn",))
    ours = RotaryTable(spec, 4096, plain_build(torch.float32)).angles(positions)
    torch.testing.assert_close(ours[:, 0, :32], cos[0], rtol=0, atol=3e-4)
    torch.testing.assert_close(ours[:, 1, 32:], sin[0], rtol=0, atol=3e-4)
    unscaled = RotaryTable(replace(spec, scaling=None), 4096, plain_build(torch.float32)).angles(positions)
    assert (unscaled - ours).abs().max() > 0.1
