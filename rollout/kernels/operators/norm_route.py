"""`norm_route`: `add_rms_norm` [T, D], and the best K experts by its router logits, best first.

The experts are weights [T, K] and logical ids [T, K] int64.  Rows of `forced_ids` [T, K] that begin with a natural
number take the place of the best K.  Ids have no gradient: the weights have the gradient for the chosen ids.

Shapes: as in `operators`; G groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from rollout.kernels.operator import Gradient, operator
from rollout.kernels.operators.add_rms_norm import add_rms_norm


class RouterRule(NamedTuple):
    """The way from logits to experts.

    `normalise`: the weights of the chosen experts sum to one before `scaling`.  `scoring`: "softmax" over all experts,
    "softmax_of_chosen" or "sigmoid".  With "sigmoid" there are groups, and experts are chosen in the best `top_groups`.
    """

    num_experts: int
    top_k: int
    normalise: bool = True
    scoring: str = "softmax"
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


@operator(
    "(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor weight, int num_experts, int top_k, "
    "bool normalise, str scoring, float scaling, int num_groups, int top_groups, Tensor? correction_bias=None, "
    "Tensor? forced_ids=None, float? weight_offset=None, Tensor? bias=None) -> (Tensor, Tensor, Tensor)",
    Gradient(flows=("residual", "hidden"), sums=True, weights=("norm_weight", "weight", "bias"), chosen="forced_ids"),
    rule=RouterRule,
)
def norm_route(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    rule: RouterRule,
    correction_bias: torch.Tensor | None = None,
    forced_ids: torch.Tensor | None = None,
    weight_offset: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed_TD = add_rms_norm.plain(residual, hidden, norm_weight, eps, weight_offset)
    work_dtype = torch.float64 if normed_TD.dtype == torch.float64 else torch.float32
    if rule.scoring == "softmax":
        scores_TE = choices_TE = F.linear(normed_TD, weight, bias).softmax(dim=-1, dtype=work_dtype)
        least = 0.0
    elif rule.scoring == "softmax_of_chosen":
        scores_TE = choices_TE = F.linear(normed_TD, weight, bias)
        least = 0.0
    else:
        assert rule.scoring == "sigmoid" and bias is None, rule.scoring
        scores_TE = F.linear(normed_TD.to(work_dtype), weight.to(work_dtype)).sigmoid()
        choices_TE = scores_TE if correction_bias is None else scores_TE + correction_bias
        choices_TE = of_best_groups(choices_TE, rule.num_groups, rule.top_groups)
        least = 1e-20  # DeepSeek-V3's guard against a sum of zero
    ids_TK = choices_TE.topk(rule.top_k, dim=-1).indices
    if forced_ids is not None:
        ids_TK = torch.where(forced_ids[:, :1] >= 0, forced_ids, ids_TK)
    weights_TK = scores_TE.gather(1, ids_TK)
    if rule.scoring == "softmax_of_chosen":
        weights_TK = weights_TK.softmax(dim=-1, dtype=work_dtype)
    elif rule.normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + least)
    return normed_TD, (weights_TK * rule.scaling).to(normed_TD.dtype), ids_TK


def of_best_groups(choices_TE: torch.Tensor, num_groups: int, top_groups: int) -> torch.Tensor:
    """Replace choices outside of the best groups by -inf; a group counts as much as its two best experts together."""
    if num_groups == 1:
        return choices_TE
    by_group_TGN = choices_TE.unflatten(1, (num_groups, -1))
    totals_TG = by_group_TGN.topk(min(2, by_group_TGN.shape[-1]), dim=-1).values.sum(dim=-1)
    best_TG = torch.zeros_like(totals_TG, dtype=torch.bool).scatter_(1, totals_TG.topk(top_groups).indices, True)
    return by_group_TGN.masked_fill(~best_TG.unsqueeze(-1), float("-inf")).flatten(1)
