"""Plain torch in which a row's result has the same bits in every batch, at the price of speed.

A matrix product of BLAS takes other kernels for the last rows than for the first ones; here every row is a call of its
own.  So two ways to deal out the same tokens can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.kernels.ops import Ops, plain_ops


def row_ops() -> Ops:
    """Return operators of plain torch that compute row by row."""
    ops = plain_ops()
    return ops.replace(
        linear=_by_rows(ops.linear, 1),
        norm_linear=_by_rows(ops.norm_linear, 2),
        norm_route=_by_rows(ops.norm_route, 2),
        fused_experts=_by_rows(ops.fused_experts, 3),
        latent_query_store=_latents_by_rows(ops.latent_query_store),
        latent_values=_by_rows(ops.latent_values, 1),
    )


def _latents_by_rows(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `latent_query_store` by rows: its shared arguments lie between the ones that have a row a token."""

    def call(query: torch.Tensor, latent: torch.Tensor, *shared_angles_pool: Any) -> torch.Tensor:
        *shared, angles, pool, slots = shared_angles_pool
        rows = [slice(row, row + 1) for row in range(query.shape[0])]
        return torch.cat([operator(query[row], latent[row], *shared, angles[row], pool, slots[row]) for row in rows])

    return call


def _by_rows(operator: Callable[..., Any], num_rowwise: int) -> Callable[..., Any]:
    """Wrap `operator`, whose first arguments have a row a token, to call it for one token at a time."""

    def call(*args: Any) -> Any:
        rowwise, rest = args[:num_rowwise], args[num_rowwise:]
        if rowwise[0].shape[0] == 0:
            return operator(*args)
        slices = [
            operator(*(None if tensor is None else tensor[row : row + 1] for tensor in rowwise), *rest)
            for row in range(rowwise[0].shape[0])
        ]
        if isinstance(slices[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*slices, strict=True))
        return torch.cat(slices)

    return call
