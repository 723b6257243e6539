"""How the routers of `transformers` weigh the experts that were chosen: one formula per kind of router.

A formula maps the logits [T, E] of a forward and any expert ids [T, K] to the scores [T, K] that the family's own
forward gives to these experts, in its operations and dtypes, so that the ids of its own choice give its own bits.
Gradients pass into the logits.  Which experts are chosen (correction bias, groups) plays no part.

Shapes: T tokens, K top-k, E logical experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from capture.errors import UnsupportedRouterError

Formula = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def softmax_of_all(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts in float32, renormalised over the chosen unless `norm_topk_prob` is false."""
    scores_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, ids_TK)
    if getattr(router, "norm_topk_prob", True):
        scores_TK = scores_TK / scores_TK.sum(dim=-1, keepdim=True)
    return scores_TK.to(logits_TE.dtype)


def softmax_of_chosen(_router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Softmax over the logits of the chosen experts, in their dtype."""
    return torch.softmax(logits_TE.gather(1, ids_TK), dim=-1)


def scaled_sigmoid(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Sigmoid of the float32 logits without the correction bias, renormalised with `norm_topk_prob`, then scaled."""
    scores_TK = logits_TE.sigmoid().gather(1, ids_TK)
    if router.norm_topk_prob:
        scores_TK = scores_TK / (scores_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return scores_TK * router.routed_scaling_factor


# Class name of the router -> its formula; a subclass has that of its base.
FORMULAS: dict[str, Formula] = {
    "Qwen3MoeTopKRouter": softmax_of_all,
    "Qwen3NextTopKRouter": softmax_of_all,
    "Qwen3_5MoeTopKRouter": softmax_of_all,
    "GptOssTopKRouter": softmax_of_chosen,
    "Glm4MoeTopkRouter": scaled_sigmoid,
    "Glm4MoeLiteTopkRouter": scaled_sigmoid,
    "DeepseekV3TopkRouter": scaled_sigmoid,
}


def formula_of(router: nn.Module) -> Formula:
    """The formula of the router's class; a class that is not listed but has `norm_topk_prob` is taken for a softmax.

    Raises `UnsupportedRouterError` for others.
    """
    for base in type(router).__mro__:
        if base.__name__ in FORMULAS:
            return FORMULAS[base.__name__]
    if hasattr(router, "norm_topk_prob"):
        return softmax_of_all
    raise UnsupportedRouterError(
        f"how {type(router).__name__} weighs experts is not known, so its routes cannot be forced; known are "
        + ", ".join(FORMULAS)
    )


def check_formula(router: Any, logits_TE: torch.Tensor, scores_TK: torch.Tensor, own_TK: torch.Tensor) -> None:
    """Raise `UnsupportedRouterError` unless the formula gives the router's own scores for its own choice."""
    # Detached: a checkpointed recomputation would otherwise find other saved tensors than the first pass.
    # The tolerance covers bfloat16 and fused kernels; another formula or a missing factor is far outside it.
    formula = formula_of(router)
    ours_TK = formula(router, logits_TE.detach(), own_TK)
    if not torch.allclose(ours_TK.float(), scores_TK.detach().float(), rtol=0.02, atol=1e-4):
        raise UnsupportedRouterError(
            f"{type(router).__name__} does not weigh experts by {formula.__name__}: its routes cannot be forced"
        )
