"""Self-attention with grouped query heads: projections, query and key norm, rotation, and the backend between them.

Does not know how queries attend: that is the backend's.

Shapes: T tokens, D hidden, H query heads, Hkv key/value heads, hd head size.
"""

from __future__ import annotations

import torch

from rollout.core.model_config import ModelConfig
from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm_rotary import QueryKeyNormRotary, RMSNorm
from rollout.layers.ops.base import LayerOps


class Attention(Layer):
    """`layer_id` is the hidden layer, which is also the layer of the KV pool."""

    def __init__(
        self, config: ModelConfig, layer_id: int, dtype: torch.dtype, device: torch.device | str, ops: LayerOps
    ) -> None:
        self.layer_id = layer_id
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, dtype, device, ops)
        self.qk_norm = QueryKeyNormRotary(
            self.num_heads, self.num_kv_heads, self.head_dim, config.rms_norm_eps, dtype, device, ops
        )
        self.o_proj = Linear(q_size, config.hidden_size, dtype, device, ops)

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        norm: RMSNorm,
        angles: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Of the norm of `residual += hidden`.  `angles` [T, 2, hd]."""
        kv = context.attention.kv
        pools = kv.k[self.layer_id], kv.v[self.layer_id]
        qkv = self.qkv_proj(residual_TD, hidden_TD, norm)
        query = self.qk_norm(qkv, angles, *pools, context.batch.out_cache_loc)
        return self.o_proj(context.attention.attend(self.layer_id, query))
