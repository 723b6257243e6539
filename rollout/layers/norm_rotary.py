"""RMSNorm, rotary position embedding, and the pair of both that queries and keys go through.

Numerics are those of transformers' Qwen3: the norm is computed in float32 and rounded to the model's dtype before the
weight is applied, the rotation is done in the model's dtype.  A float64 model stays in float64 throughout.

Shapes: T tokens, D hidden, H query heads, Hkv key/value heads, hd head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from rollout.layers.weight_entry import SingleWeightLayer, WeightEntry, empty_parameter


class RMSNorm(SingleWeightLayer):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        # Without a weight, F.rms_norm rounds once, to the model's dtype; the weight is then applied in that dtype.
        return F.rms_norm(hidden_TD, self.weight.shape, None, self.eps) * self.weight

    def add_and_norm(self, hidden_TD: torch.Tensor, residual_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual += hidden`, then the norm of it.  Returns (normed, residual); `residual_TD` is changed in place."""
        residual_TD += hidden_TD
        return self.forward(residual_TD), residual_TD


class RotaryTable:
    """Rotary embedding (Su et al., 2021) in the rotate-half form: angles once per step, for all layers."""

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        self._work_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, head_dim, 2, dtype=self._work_dtype, device=device) / head_dim
        self._inverse_frequencies = 1.0 / theta**exponents

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sign-folded sin, each [T, 1, hd], for `rotate`."""
        angles = positions_T.to(self._work_dtype)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, hd].  Rolling by half a head and folding the sign into sin equals rotate-half, bit for bit."""
    return heads.roll(heads.shape[-1] // 2, -1).mul_(signed_sin).add_(heads * cos)


class QueryKeyNormRotary(SingleWeightLayer):
    """Per-head RMSNorm of queries and keys, and their rotation, in one pass over [T, H + Hkv, hd].

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
    ) -> None:
        super().__init__()
        self.eps = eps
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)

    def forward(self, heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, H + Hkv, hd] -> the same, normed and rotated."""
        normed = F.rms_norm(heads, (self.head_dim,), None, self.eps).mul_(self.weight)
        return rotate(normed, *rotary)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        parent = prefix.rpartition(".")[0]
        for part, rows in (("q_norm", slice(0, self.num_heads)), ("k_norm", slice(self.num_heads, None))):
            views = partial(self._head_rows, rows)
            yield WeightEntry(f"{parent}.{part}.weight", (self.head_dim,), self.weight.dtype, views)

    def _head_rows(self, rows: slice) -> list[torch.Tensor]:
        return list(self.weight[rows])
