"""Plain torch in which a row's result has the same bits whatever other rows there are, at the price of speed.

A matrix product of BLAS takes other kernels for the last rows than for the first ones; here every row is a product of
its own.  So two ways to deal out the same tokens can be compared bit for bit.

Shapes: T tokens, D input features, O output features, K slots of a row, P experts, I expert intermediate.
"""

from __future__ import annotations

import torch

from rollout.layers.activation import silu_and_mul
from rollout.layers.ops.torch_ops import TorchOps, weighted_sum


class RowOps(TorchOps):
    """`TorchOps`, row by row."""

    def linear(self, hidden_TD: torch.Tensor, weight: torch.Tensor, out_features: int) -> torch.Tensor:
        out_TO = hidden_TD.new_empty(hidden_TD.shape[0], out_features)
        for row, out in zip(hidden_TD, out_TO, strict=True):
            torch.mv(weight, row.contiguous(), out=out)
        return out_TO

    def experts(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
        inner: int,
    ) -> torch.Tensor:
        out_TKD = hidden_TD.new_empty(*physical_ids_TK.shape, hidden_TD.shape[1])
        for row, ids_K, out_KD in zip(hidden_TD, physical_ids_TK.tolist(), out_TKD, strict=True):
            for expert, out in zip(ids_K, out_KD, strict=True):
                assert 0 <= expert < w13.shape[0]
                torch.mv(w2[expert], silu_and_mul(torch.mv(w13[expert], row.contiguous())), out=out)
        return out_TKD if weights_TK is None else weighted_sum(out_TKD, weights_TK)
