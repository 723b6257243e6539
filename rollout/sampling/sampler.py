"""One token a row from logits, with its log-probability.

The log-probability is of the log-softmax after logit bias, penalties and temperature, before top-k, top-p and min-p
(SGLang's default); a greedy row's is of the logits as they are.  A random row takes one uniform number and inverts
the cumulative distribution: no noise tensor of the size of the vocabulary, and nothing that depends on the batch.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.edits import apply_edits
from rollout.sampling.filters import filtered_candidates
from rollout.sampling.noise import uniform

_ALMOST_ONE = 1.0 - 2.0**-53


@dataclass
class SampledTokens:
    """`token_ids` [N] int64 and the scaled logits [N, V] from which log-probabilities are read on demand."""

    token_ids: torch.Tensor
    scaled_logits_NV: torch.Tensor

    def logprobs(self) -> torch.Tensor:
        """Log-probability of each sampled token [N], in the logits' dtype."""
        chosen = self.scaled_logits_NV.gather(1, self.token_ids[:, None]).squeeze(1)
        return chosen - self.scaled_logits_NV.logsumexp(-1)


def sample(logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
    """Sample one token a row.  `logits_NV` is changed in place.

    `positions_N`: index of the output token that each row samples, int64 on the CPU.
    """
    logits_NV = apply_edits(logits_NV, info)
    if info.scales:
        logits_NV.div_(info.temperatures[:, None].to(logits_NV.dtype))
    if info.all_greedy:
        return SampledTokens(logits_NV.argmax(-1), logits_NV)
    noise = torch.from_numpy(uniform(info.settings["seed"], positions_N.numpy())).to(info.device)
    probs = torch.softmax(logits_NV, dim=-1)
    token_ids = _invert_cdf(probs, noise)
    if info.filtered_rows is not None:
        rows = info.filtered_rows
        candidates, ids = filtered_candidates(probs[rows], info.top_k, info.top_p, info.min_p)
        token_ids[rows] = ids.gather(1, _invert_cdf(candidates, noise[rows])[:, None]).squeeze(1)
    return SampledTokens(torch.where(info.greedy, logits_NV.argmax(-1), token_ids), logits_NV)


def _invert_cdf(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Index [N] drawn in proportion to `weights` [N, V] (not normalised) by `noise` [N] in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(noise[:, None] * total, total * _ALMOST_ONE)
    # the first index whose cumulative weight exceeds the target: never one of weight zero
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def top_logprobs(scaled_logits_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest log-probabilities [N, count], best first, and their token ids."""
    normaliser = scaled_logits_NV.logsumexp(-1, keepdim=True)
    values, ids = scaled_logits_NV.topk(min(count, scaled_logits_NV.shape[1]), dim=-1)
    return values - normaliser, ids


def chosen_logprobs(scaled_logits_NV: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities [N, len(token_ids)] of given token ids."""
    index = torch.tensor(token_ids, device=scaled_logits_NV.device)
    return scaled_logits_NV[:, index] - scaled_logits_NV.logsumexp(-1, keepdim=True)
