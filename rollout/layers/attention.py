"""Self-attention with grouped query heads: projections, query and key norm, rotation, and the backend between them.

Ranks that share tokens have some heads each; what the block returns is then one rank's part of a sum over them.
Does not know how queries attend: that is the backend's; nor who adds the parts up.

Shapes: T tokens, D hidden, hd head size.
"""

from __future__ import annotations

import torch

from rollout.core.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm_rotary import QueryKeyNorm, RMSNorm
from rollout.layers.ops.base import AttentionWeights, LayerOps
from rollout.layers.shard import kv_heads, query_heads


class Attention(Layer):
    """`layer_id` is the hidden layer, which is also the layer of the KV pool; `norm` comes before the block.

    Raises `StartupError` for heads that do not divide over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        norm: RMSNorm,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        parallel: Parallel,
    ) -> None:
        self.ops = ops
        self.layer_id = layer_id
        head_dim = config.head_dim
        queries, keys = query_heads(config, parallel), kv_heads(config, parallel)
        parts = {"q_proj": queries.times(head_dim), "k_proj": keys.times(head_dim), "v_proj": keys.times(head_dim)}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, dtype, device, ops)
        self.qk_norm = QueryKeyNorm(queries.length, keys.length, head_dim, dtype, device)
        self.o_proj = Linear(queries.times(head_dim), config.hidden_size, dtype, device, ops)
        self.weights = AttentionWeights(
            norm=norm.weight,
            qkv=self.qkv_proj.weight,
            qkv_size=self.qkv_proj.out_features,
            qk_norm=self.qk_norm.weight,
            eps=config.rms_norm_eps,
            out=self.o_proj.weight,
            hidden_size=config.hidden_size,
            head_dim=head_dim,
        )

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        angles: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """This rank's part [T, D], of the norm of `residual += hidden`.  `angles` [T, 2, hd]."""
        if residual_TD.shape[0] == 0:  # a data-parallel rank that only lends its experts to the others
            return torch.empty_like(residual_TD)
        slots_T = context.batch.out_cache_loc
        return self.ops.attention_block(
            residual_TD, hidden_TD, self.weights, angles, context.attention, self.layer_id, slots_T
        )
