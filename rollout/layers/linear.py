"""Linear layers without bias, plain and merged.

Knows how several projections of the same input share one weight.  Does not know what is projected.

Shapes: T tokens, D input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.layers.ops.base import LayerOps
from rollout.layers.weight_entry import SingleWeightLayer, WeightEntry, empty_parameter


class Linear(SingleWeightLayer):
    """`x @ weight.T` with weight [O, D]."""

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device | str, ops: LayerOps
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(hidden_TD, self.weight)


class MergedLinear(SingleWeightLayer):
    """Several projections of one input as one matrix; a checkpoint names each of them as a sibling of this layer.

    `self_attn.qkv_proj` with parts `{"q_proj": 64, "k_proj": 32, "v_proj": 32}` holds
    `self_attn.q_proj.weight` in rows 0..63, and so on.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.parts = dict(parts)
        self.weight = empty_parameter(sum(parts.values()), in_features, dtype=dtype, device=device)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """All parts side by side: [T, sum of the parts' sizes]."""
        return self.ops.linear(hidden_TD, self.weight)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        parent = prefix.rpartition(".")[0]
        start = 0
        for part, size in self.parts.items():
            yield self.rows_entry(f"{parent}.{part}.weight", slice(start, start + size))
            start += size
