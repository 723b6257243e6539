"""The shared expert: a feed-forward block that every token of a MoE layer goes through beside its routed experts.

It is not in the placement: it is never moved and its tokens are not counted.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

import torch

from rollout.layers.build import Build
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.shard import Shard


class SharedExpert(Layer):
    """SwiGLU.  Ranks that share tokens have some of the inner features each; `is_whole`: every rank has all of them,
    because it brings tokens of its own.

    Raises `StartupError` for an inner size that does not divide over the ranks.
    """

    def __init__(self, inner_size: int, hidden_size: int, build: Build, *, is_whole: bool) -> None:
        self.ops = build.ops
        self._ranks = None if is_whole else build.parallel.attn_tp
        inner = Shard.whole(inner_size)
        if self._ranks is not None:
            what = f"--tp-size {build.parallel.layout.tp_size}: intermediate size of the shared expert"
            inner = Shard.equal(inner_size, self._ranks.rank, self._ranks.size, what)
        self.gate_up_proj = MergedLinear(hidden_size, {"gate_proj": inner, "up_proj": inner}, build)
        self.down_proj = Linear(inner, hidden_size, build)

    def __call__(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """Of the same norm as the routed experts: [T, D]."""
        out_TD = self.down_proj(self.ops.silu_and_mul(self.gate_up_proj.of_normed(normed_TD)))
        return out_TD if self._ranks is None else self._ranks.all_reduce(out_TD)
