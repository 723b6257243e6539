"""`Sampler` in plain torch: every device, float32 and float64; half precision is widened to float32.

Of equally probable tokens, torch decides which one a filter keeps and which one comes first among the best.

Shapes: as in `base`; F rows with filters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.sampling.base import SampledTokens, Sampler, ScoredTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.edits import apply_edits
from rollout.sampling.filters import filtered_candidates
from rollout.sampling.noise import uniform
from rollout.sampling.row_logprobs import RowLogprobs

_ALMOST_ONE = 1.0 - 2.0**-53


class TorchSampler(Sampler):
    """The reference for the compiled one."""

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        logits_NV = apply_edits(_widened(logits_NV), info, positions_N)
        if info.scales:
            logits_NV.div_(info.temperatures[:, None].to(logits_NV.dtype))
        logprobs = RowLogprobs(logits_NV)
        token_ids = logits_NV.argmax(-1)
        if not info.all_greedy:
            drawn = _draw(logits_NV, info, positions_N)
            token_ids = torch.where(info.greedy | ~logprobs.is_distribution, token_ids, drawn)
        return SampledTokens(
            token_ids,
            logprobs.of(token_ids[:, None]).squeeze(1).masked_fill_(~info.wants_logprob, torch.nan),
            *_best(logprobs, info),
            logprobs.of_each([(i, row.chosen_ids) for i, row in info.rows_with_lists]),
        )

    def score(
        self, logits_NV: torch.Tensor, target_ids_N: torch.Tensor, temperature: float, chosen_ids: list[int], top_n: int
    ) -> ScoredTokens:
        logits_NV = _widened(logits_NV)
        logprobs = RowLogprobs(logits_NV / temperature if temperature != 1.0 else logits_NV)
        chosen = torch.tensor(chosen_ids, dtype=torch.int64, device=logits_NV.device)
        return ScoredTokens(
            logprobs.of(target_ids_N.to(logits_NV.device)[:, None]).squeeze(1),
            *logprobs.best(top_n),
            logprobs.of(chosen.expand(logits_NV.shape[0], -1)),
        )


def _widened(logits_NV: torch.Tensor) -> torch.Tensor:
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()


def _best(logprobs: RowLogprobs, info: SamplingBatchInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities [N, n] with -1 and NaN in the places that a row did not ask for."""
    ids, values = logprobs.best(info.top_n)
    missing = info.top_n - ids.shape[1]
    unwanted = torch.arange(info.top_n, device=info.device) >= info.top_logprobs[:, None]
    return (
        F.pad(ids, (0, missing), value=-1).masked_fill_(unwanted, -1),
        F.pad(values, (0, missing), value=torch.nan).masked_fill_(unwanted, torch.nan),
    )


def _draw(logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> torch.Tensor:
    """A token for every row [N], as if none were greedy."""
    noise = torch.from_numpy(uniform(info.settings["seed"], positions_N.numpy())).to(info.device)
    probs = torch.softmax(logits_NV, dim=-1)
    token_ids = _invert_cdf(probs, noise)
    if info.filtered_rows is not None:
        rows = info.filtered_rows
        values, ids = filtered_candidates(probs[rows], info.top_k, info.top_p, info.min_p)
        kept_FV = torch.zeros(len(rows), probs.shape[1], dtype=values.dtype, device=info.device)
        token_ids[rows] = _invert_cdf(kept_FV.scatter_(1, ids, values), noise[rows])
    return token_ids


def _invert_cdf(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Index [N] drawn in proportion to `weights` [N, V] (not normalised) by `noise` [N] in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(noise[:, None] * total, total * _ALMOST_ONE)
    # the first index whose cumulative weight exceeds the target: never one of weight zero
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
