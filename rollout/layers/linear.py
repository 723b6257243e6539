"""Linear layers without bias, plain and merged.

Knows how several projections of the same input share one weight.  Does not know what is projected.

Shapes: T tokens, D input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.ops.base import LayerOps
from rollout.layers.weight_entry import WeightEntry, WeightLayer


class MergedLinear(WeightLayer):
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
        self.ops = ops
        self.parts = dict(parts)
        self.in_features, self.out_features = in_features, sum(parts.values())
        self.weight = ops.empty_matrix(self.out_features, in_features, dtype, device)

    def __call__(self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, norm: RMSNorm) -> torch.Tensor:
        """All parts side by side, of the norm of `residual += hidden`: [T, sum of the parts' sizes]."""
        return self.ops.norm_linear(residual_TD, hidden_TD, norm.weight, norm.eps, self.weight, self.out_features)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        parent = prefix.rpartition(".")[0]
        start = 0
        for part, size in self.parts.items():
            name = f"{parent}.{part}.weight"
            yield matrix_entry(self.ops, name, self.weight, range(start, start + size), self.in_features)
            start += size


class Linear(WeightLayer):
    """`x @ weight.T` with weight [O, D]."""

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device | str, ops: LayerOps
    ) -> None:
        self.ops = ops
        self.in_features, self.out_features = in_features, out_features
        self.weight = ops.empty_matrix(out_features, in_features, dtype, device)

    def __call__(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(hidden_TD, self.weight, self.out_features)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        rows = range(self.out_features)
        yield matrix_entry(self.ops, f"{prefix}.weight", self.weight, rows, self.in_features)


def matrix_entry(ops: LayerOps, name: str, weight: torch.Tensor, rows: range, in_features: int) -> WeightEntry:
    """The entry of a logical tensor that is some rows of a matrix."""
    place = ops.matrix_place(weight, rows, in_features)
    return WeightEntry(name, (len(rows), in_features), weight.dtype, lambda: [place])
