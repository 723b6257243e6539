"""The judge: Qwen3 and Qwen3-MoE in float64, as plainly as they can be written.

No cache, no batching, no fused weights, no parallelism, and nothing of the engine but its record of the config.
Reads a dict of logical tensors under their checkpoint names.

Shapes: T tokens, D hidden, V vocabulary, L MoE layers, K top-k, hd head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollout.core.specs.model_config import ModelConfig


@dataclass
class ReferenceOutput:
    """`log_probs[t]` is the distribution of token t + 1; `routes[t, l]` the experts of token t, best first."""

    log_probs: torch.Tensor  # [T, V] float64
    routes: torch.Tensor  # [T, L, K] int64, logical ids


def reference_forward(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], input_ids: list[int]
) -> ReferenceOutput:
    """Compute the whole sequence at once."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][input_ids]
    routes = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        normed = _rms_norm(hidden, weights[f"{prefix}.input_layernorm.weight"], config.norm.eps)
        hidden = hidden + _attention(config, weights, f"{prefix}.self_attn", normed)
        normed = _rms_norm(hidden, weights[f"{prefix}.post_attention_layernorm.weight"], config.norm.eps)
        if layer in config.moe_layer_ids:
            update, chosen = _moe(config, weights, f"{prefix}.mlp", normed)
            routes.append(chosen)
        else:
            update = _swiglu(weights, f"{prefix}.mlp", normed)
        hidden = hidden + update
    hidden = _rms_norm(hidden, weights["model.norm.weight"], config.norm.eps)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    empty = torch.empty(len(input_ids), 0, config.num_experts_per_tok, dtype=torch.int64)
    return ReferenceOutput((hidden @ head.T).log_softmax(-1), torch.stack(routes, dim=1) if routes else empty)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _rotate(x_Thd: torch.Tensor, theta: float) -> torch.Tensor:
    tokens, size = x_Thd.shape
    half = size // 2
    frequencies = torch.tensor([theta ** (-2.0 * i / size) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x_Thd[:, :half], x_Thd[:, half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


def _attention(config: ModelConfig, weights: Mapping[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    spec = config.layers[0].attention
    size, tokens, theta = spec.head_dim, x.shape[0], spec.rotary.theta
    heads_per_kv = spec.num_heads // spec.num_kv_heads
    query, key, value = (x @ weights[f"{prefix}.{part}_proj.weight"].T for part in "qkv")
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    outputs = []
    for head in range(spec.num_heads):
        kv_head = head // heads_per_kv
        q = query[:, head * size : (head + 1) * size]
        k = key[:, kv_head * size : (kv_head + 1) * size]
        v = value[:, kv_head * size : (kv_head + 1) * size]
        q = _rotate(_rms_norm(q, weights[f"{prefix}.q_norm.weight"], config.norm.eps), theta)
        k = _rotate(_rms_norm(k, weights[f"{prefix}.k_norm.weight"], config.norm.eps), theta)
        scores = (q @ k.T / size**0.5).masked_fill(future, float("-inf"))
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, dim=1) @ weights[f"{prefix}.o_proj.weight"].T


def _swiglu(weights: Mapping[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ weights[f"{prefix}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T


def _moe(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], prefix: str, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = (x @ weights[f"{prefix}.gate.weight"].T).softmax(-1)
    scores, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
    scores, chosen = scores[:, : config.num_experts_per_tok], chosen[:, : config.num_experts_per_tok]
    if config.moe is not None and config.moe.router.normalise:
        scores = scores / scores.sum(-1, keepdim=True)
    output = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for score, expert in zip(scores[token], chosen[token].tolist(), strict=True):
            output[token] += score * _swiglu(weights, f"{prefix}.experts.{expert}", x[token])
    return output, chosen
