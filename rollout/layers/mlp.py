"""The dense feed-forward block of a decoder layer: SwiGLU (Shazeer, 2020).

Ranks that share tokens have some of the inner features each.

Shapes: T tokens, D hidden, I intermediate, here on this rank.
"""

from __future__ import annotations

import torch

from rollout.core.layer_specs import DenseSpec
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.shard import Shard


class DenseMLP(Layer):
    """`down(silu(gate(x)) * up(x))`.  Raises `StartupError` for an inner size that does not divide over the ranks."""

    def __init__(self, spec: DenseSpec, hidden_size: int, build: Build) -> None:
        self.ops = build.ops
        self._ranks = build.parallel.attn_tp
        what = f"--tp-size {build.parallel.layout.tp_size}: intermediate size of the dense layers"
        inner = Shard.equal(spec.inner, self._ranks.rank, self._ranks.size, what)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(hidden_size, parts, build)
        self.down_proj = Linear(inner, hidden_size, build)

    def __call__(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, context: ForwardContext
    ) -> torch.Tensor:
        """Of the norm of `residual += hidden`, where `hidden` is a sum over the ranks of which each has a part."""
        gate_up_T2I = self.gate_up_proj(residual_TD, self._ranks.all_reduce(hidden_TD), norm)
        return self._ranks.all_reduce(self.down_proj(self.ops.silu_and_mul(gate_up_T2I)))
