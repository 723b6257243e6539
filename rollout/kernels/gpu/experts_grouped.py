"""`fused_experts` by torch's grouped matrix product: the host reads no value, as in the Triton kernels.

Shapes: T tokens, D hidden, K slots, A = T K assignments, P experts stored here, I expert intermediate.
"""

from __future__ import annotations

import torch

from rollout.kernels.operators.fused_experts import Assignments, ExpertForm, grouped, weighted_sum


def grouped_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Compute the same as `fused_experts` of `experts`, empty slots too, where `has_grouped` allows it.

    Empty slots are sorted behind the slots of the last expert, where no product reads or writes, and then masked.
    """
    (num_tokens, top_k), experts = ids.shape, w13.shape[0]
    filled_TK = (ids >= 0) & (ids < experts)
    out_TKD = hidden.new_zeros(num_tokens, top_k, hidden.shape[1])
    if num_tokens:
        ids_A = ids.masked_fill(~filled_TK, experts).flatten()
        sorted_A, order_A = ids_A.sort(stable=True)
        counts = ids_A.new_zeros(experts + 1).scatter_add_(0, ids_A, torch.ones_like(ids_A))
        # Rows that are masked below get the bias of the last expert.
        assigned = Assignments(order_A, sorted_A.clamp(max=experts - 1), counts[:experts], top_k)
        counts_on_host: list[int] = []  # which `grouped` does not read
        form = ExpertForm(w13_bias, w2_bias, limit, alpha)
        out_AD = grouped(hidden, assigned, counts_on_host, w13, w2, form)
        out_TKD = torch.where(filled_TK.unsqueeze(-1), out_AD.view_as(out_TKD), out_TKD)
    return out_TKD if weights is None else weighted_sum(out_TKD, weights.masked_fill(~filled_TK, 0.0))
