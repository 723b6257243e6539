"""top-k, top-p and min-p over probabilities, without a full sort where one can be avoided.

Order and meaning: keep the `top_k` most probable tokens and renormalise; keep the smallest set of the most probable
whose mass reaches `top_p` and renormalise; drop what is under `min_p` times the most probable.

Shapes: N rows, V vocabulary, C candidates kept by a partial sort.
"""

from __future__ import annotations

import torch

_FIRST_TRY = 1024


def filtered_candidates(
    probs_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor, min_p_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates in descending order: probabilities [N, C] (zero where filtered out) and token ids [N, C].

    `top_k_N` holds V where there is no limit.
    """
    vocab = probs_NV.shape[1]
    width = min(vocab, _FIRST_TRY)
    values, ids = probs_NV.topk(width, dim=-1)
    # the partial sort is enough where top-k, top-p's mass or min-p's threshold ends inside it
    enough = (top_k_N <= width) | ((top_p_N < 1.0) & (values.sum(-1, dtype=torch.float64) >= top_p_N))
    enough |= values[:, -1] < values[:, 0] * min_p_N
    if width < vocab and not bool(enough.all()):
        values, ids = probs_NV.sort(dim=-1, descending=True)
    rank = torch.arange(values.shape[1], device=values.device)
    kept = values.double() * (rank < top_k_N[:, None])
    whole = probs_NV.sum(-1, keepdim=True, dtype=torch.float64)
    kept /= torch.where(top_k_N[:, None] < vocab, kept.sum(-1, keepdim=True), whole)
    mass_before = kept.cumsum(-1) - kept
    kept = kept * (mass_before < top_p_N[:, None])
    return kept * (kept >= kept[:, :1] * min_p_N[:, None]), ids
