"""RMSNorm, rotary position embedding, and the pair of both that queries and keys go through.

Knows the weights and the angles.  Does not know the arithmetic: that is `LayerOps`.

Shapes: T tokens, D hidden, H query heads, Hkv key/value heads, hd head size, S slots of the KV pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from rollout.layers.ops.base import LayerOps, Rotary
from rollout.layers.weight_entry import SingleWeightLayer, WeightEntry, empty_parameter


class RMSNorm(SingleWeightLayer):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str, ops: LayerOps) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(hidden_TD, self.weight, self.eps)

    def add_and_norm(self, hidden_TD: torch.Tensor, residual_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual += hidden`, then the norm of it.  Returns (normed, residual); `residual_TD` is changed in place."""
        return self.ops.add_rms_norm(hidden_TD, residual_TD, self.weight, self.eps), residual_TD


class RotaryTable:
    """Rotary embedding (Su et al., 2021) in the rotate-half form: angles once per step, for all layers."""

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        self._work_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, head_dim, 2, dtype=self._work_dtype, device=device) / head_dim
        self._inverse_frequencies = 1.0 / theta**exponents

    def angles(self, positions_T: torch.Tensor) -> Rotary:
        """cos and sign-folded sin, each [T, 1, hd]."""
        angles = positions_T.to(self._work_dtype)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


class QueryKeyNormRotary(SingleWeightLayer):
    """Per-head RMSNorm of queries and keys, and their rotation, in one pass; keys and values go to the KV pool.

    The two norm weights live in one table of a row per head, so that both are applied by one multiplication;
    `q_norm.weight` is every one of the first H rows and `k_norm.weight` every one of the rest.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)

    def forward(
        self, qkv: torch.Tensor, rotary: Rotary, k_pool: torch.Tensor, v_pool: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """[T, (H + 2 Hkv) * hd] -> queries [T, H, hd]; keys and values are in slots `slots_T` [T] of [S, Hkv, hd]."""
        return self.ops.heads_to_pool(qkv, self.weight, rotary, self.eps, k_pool, v_pool, slots_T)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        parent = prefix.rpartition(".")[0]
        for part, rows in (("q_norm", slice(0, self.num_heads)), ("k_norm", slice(self.num_heads, None))):
            views = partial(self._head_rows, rows)
            yield WeightEntry(f"{parent}.{part}.weight", (self.head_dim,), self.weight.dtype, views)

    def _head_rows(self, rows: slice) -> list[torch.Tensor]:
        return list(self.weight[rows])
