"""Feed-forward blocks that every token goes through: SwiGLU (Shazeer, 2020).

Ranks that share tokens have some of the inner features each.

Shapes: T tokens, D hidden, I intermediate, here on this rank.
"""

from __future__ import annotations

import torch

from rollout.core.specs.layer_specs import DenseSpec
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.shard import Shard


class SwiGLU(Layer):
    """`down(silu(gate(x)) * up(x))`.  `what` is the block, as an error names it.

    With `is_whole` every rank has all inner features, because it brings tokens of its own.  Raises `StartupError` for
    an inner size that does not divide over the ranks.
    """

    def __init__(self, inner_size: int, hidden_size: int, build: Build, what: str, *, is_whole: bool = False) -> None:
        self.ops = build.ops
        self._ranks = None if is_whole else build.parallel.attn_tp
        inner = Shard.whole(inner_size)
        if self._ranks is not None:
            size = f"--tp-size {build.parallel.layout.tp_size}: intermediate size of {what}"
            inner = Shard.equal(inner_size, self._ranks.rank, self._ranks.size, size)
        self.gate_up_proj = MergedLinear(hidden_size, {"gate_proj": inner, "up_proj": inner}, build)
        self.down_proj = Linear(inner, hidden_size, build)

    def _down(self, gate_up_T2I: torch.Tensor, adapters_T: torch.Tensor | None) -> torch.Tensor:
        out_TD = self.down_proj(self.ops.silu_and_mul(gate_up_T2I), adapters_T)
        return out_TD if self._ranks is None else self._ranks.all_reduce(out_TD)


class DenseMLP(SwiGLU):
    """The feed-forward block of a layer without experts."""

    def __init__(self, spec: DenseSpec, hidden_size: int, build: Build) -> None:
        super().__init__(spec.inner, hidden_size, build, "the dense layers")

    def __call__(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, context: ForwardContext
    ) -> torch.Tensor:
        """Apply the MLP to the norm of `residual += hidden`, where each rank has a part of the sum `hidden`."""
        assert self._ranks is not None
        adapters = context.batch.adapters
        return self._down(self.gate_up_proj(residual_TD, self._ranks.all_reduce(hidden_TD), norm, adapters), adapters)


class SharedExpert(SwiGLU):
    """The expert that every token of a MoE layer goes through in addition to its routed experts.

    It is not in the placement: it is never moved and its tokens are not counted.
    """

    def __init__(self, inner_size: int, hidden_size: int, build: Build, *, is_whole: bool) -> None:
        super().__init__(inner_size, hidden_size, build, "the shared expert", is_whole=is_whole)

    def __call__(self, normed_TD: torch.Tensor, adapters_T: torch.Tensor | None = None) -> torch.Tensor:
        """Apply it to the same normed tokens as the routed experts: [T, D]."""
        return self._down(self.gate_up_proj.of_normed(normed_TD, adapters_T), adapters_T)
