"""The dense feed-forward block of a decoder layer: SwiGLU (Shazeer, 2020).

Ranks that share tokens have some of the inner features each.

Shapes: T tokens, D hidden, I intermediate, here on this rank.
"""

from __future__ import annotations

import torch

from rollout.core.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.ops.base import LayerOps
from rollout.layers.shard import Shard


class DenseMLP(Layer):
    """`down(silu(gate(x)) * up(x))`.  Raises `StartupError` for an inner size that does not divide over the ranks."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        parallel: Parallel,
    ) -> None:
        self.ops = ops
        self._ranks = parallel.attn_tp
        what = f"--tp-size {parallel.layout.tp_size}: intermediate size of the dense layers"
        inner = Shard.equal(config.intermediate_size, self._ranks.rank, self._ranks.size, what)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts, dtype, device, ops)
        self.down_proj = Linear(inner, config.hidden_size, dtype, device, ops)

    def __call__(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, context: ForwardContext
    ) -> torch.Tensor:
        """Of the norm of `residual += hidden`, where `hidden` is a sum over the ranks of which each has a part."""
        gate_up_T2I = self.gate_up_proj(residual_TD, self._ranks.all_reduce(hidden_TD), norm)
        return self._ranks.all_reduce(self.down_proj(self.ops.silu_and_mul(gate_up_T2I)))
