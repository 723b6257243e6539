"""From router logits to expert choices and their weights.

Knows the softmax-then-top-k rule of Qwen3-MoE (as in transformers).  Does not know placement or who reads the choices.

Shapes: T tokens, E logical experts, K top-k.
"""

from __future__ import annotations

import torch


def softmax_topk(logits_TE: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest probabilities of each token, best first, and their logical expert ids [T, K] int64.

    The softmax runs in float32 (float64 for float64 logits).  With `normalise` the weights of a token are divided by
    their sum (`norm_topk_prob`).  Weights are returned in the dtype of the logits, which is that of the hidden states.
    """
    work_dtype = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    weights_TK, logical_ids_TK = logits_TE.softmax(dim=-1, dtype=work_dtype).topk(top_k, dim=-1)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype), logical_ids_TK
