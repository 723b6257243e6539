"""The formulas by which routers of Hugging Face models weigh chosen experts, for each kind, with gradients.

    e_score_correction_bias    sigmoids of the logits, without the bias, which is for the choice alone; renormalised
                               if norm_topk_prob is true; times routed_scaling_factor: DeepSeek-V3, GLM
    bias                       a softmax over the chosen experts: GPT-OSS
    neither                    a softmax over all experts in float32, renormalised unless norm_topk_prob is false:
                               Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5

Shapes: T tokens, K top-k, E logical experts.
"""

from __future__ import annotations

from typing import Any

import torch

LEAST_SUM = 1e-20  # DeepSeek-V3's guard against a division by zero


def weights_of(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Compute the weights [T, K] of experts `ids_TK` from the router's logits, in the dtype that the router gives."""
    if hasattr(router, "e_score_correction_bias"):
        scores_TK = logits_TE.sigmoid().gather(1, ids_TK)
        if router.norm_topk_prob:
            scores_TK = scores_TK / (scores_TK.sum(dim=-1, keepdim=True) + LEAST_SUM)
        scaled_TK: torch.Tensor = scores_TK * router.routed_scaling_factor
        return scaled_TK
    if hasattr(router, "bias"):
        return torch.softmax(logits_TE.gather(1, ids_TK), dim=-1)
    scores_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, ids_TK)
    if getattr(router, "norm_topk_prob", True):
        scores_TK = scores_TK / scores_TK.sum(dim=-1, keepdim=True)
    return scores_TK.to(logits_TE.dtype)
