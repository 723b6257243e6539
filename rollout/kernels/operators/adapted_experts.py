"""`adapted_experts`: `fused_experts` whose matrices have the adapter of each row, or none.

`slots` [T] int64 is the adapter of each row, -1 for none: such a row has the bits of `fused_experts`.  Matrices are
a13 [P, S, 2, D, R] and b13 [P, S, R, 2I], gate first, a2 [P, S, I, R] and b2 [P, S, R, D].  `ranks` [P, S, 3] int64
counts the ranks that gate, up and down have; the others are not read, and 0 means that nothing is added.  The scale of
an adapter is in B (Hu et al., 2021).

For bfloat16 and float16 products with A stay in float32, and the input of down's A is rounded as the input of down is.
The plain form adds products with B to results that were rounded once, the compiled form to sums in float32.

Shapes: T rows, K expert slots of a row, N rows of one expert and one adapter, P experts stored here, S adapters,
D hidden, I expert intermediate, R greatest rank, O output features.
"""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator
from rollout.kernels.operators.fused_experts import ExpertForm, fused_experts, weighted_sum


@operator(
    "(Tensor hidden, Tensor ids, Tensor? weights, Tensor w13, Tensor w2, int inner_size, Tensor? w13_bias, "
    "Tensor? w2_bias, float? limit, float alpha, Tensor slots, Tensor a13, Tensor b13, Tensor a2, Tensor b2, "
    "Tensor ranks) -> Tensor",
    Gradient(
        flows=("hidden", "weights"),
        weights=("w13", "w2", "w13_bias", "w2_bias", "a13", "b13", "a2", "b2"),
        copied=("ranks",),
    ),
)
def adapted_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    limit: float | None,
    alpha: float,
    slots: torch.Tensor,
    a13: torch.Tensor,
    b13: torch.Tensor,
    a2: torch.Tensor,
    b2: torch.Tensor,
    ranks: torch.Tensor,
) -> torch.Tensor:
    pairs_A2 = torch.stack((ids, slots.unsqueeze(1).expand_as(ids)), -1).flatten(0, 1)
    form, outputs, places = ExpertForm(w13_bias, w2_bias, limit, alpha), [], []
    for expert, slot in pairs_A2.unique(dim=0).tolist():
        if slot < 0:
            continue
        of_gate, of_up, of_down = ranks[expert, slot].tolist()
        places_N = (pairs_A2 == pairs_A2.new_tensor((expert, slot))).all(dim=1).nonzero().squeeze(1)
        x_ND, experts_N = hidden.index_select(0, places_N // ids.shape[1]), torch.full_like(places_N, expert)
        b_gate_RI, b_up_RI = b13[expert, slot].split(inner_size, dim=1)
        gate_NI, up_NI = (x_ND @ w13[expert].t()).split(inner_size, dim=1)
        gate_NI = _plus(gate_NI, x_ND, a13[expert, slot, 0], b_gate_RI, of_gate)
        up_NI = _plus(up_NI, x_ND, a13[expert, slot, 1], b_up_RI, of_up)
        inner_NI = form.inner(torch.cat((gate_NI, up_NI), dim=1), experts_N)
        down_ND = _plus(inner_NI @ w2[expert].t(), inner_NI, a2[expert, slot], b2[expert, slot], of_down)
        outputs.append(form.out(down_ND, experts_N))
        places.append(places_N)
    if bool((slots >= 0).all()):
        out_TKD = hidden.new_zeros(*ids.shape, hidden.shape[1])
    else:
        out_TKD = fused_experts.plain(hidden, ids, None, w13, w2, inner_size, w13_bias, w2_bias, limit, alpha)
    if outputs:
        out_TKD = out_TKD.flatten(0, 1).index_copy(0, torch.cat(places), torch.cat(outputs)).view_as(out_TKD)
    return out_TKD if weights is None else weighted_sum(out_TKD, weights)


def _plus(out_NO: torch.Tensor, x_NF: torch.Tensor, a_FR: torch.Tensor, b_RO: torch.Tensor, rank: int) -> torch.Tensor:
    """Return `out` plus the product of rows with an adapter of `rank`; F: the features of a row."""
    if rank == 0:
        return out_NO
    wide = torch.promote_types(x_NF.dtype, torch.float32)
    product_NO = (x_NF.to(wide) @ a_FR[:, :rank].to(wide)) @ b_RO[:rank].to(wide)
    return (out_NO.to(wide) + product_NO).to(out_NO.dtype)
