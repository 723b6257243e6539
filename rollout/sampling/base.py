"""`Sampler`: the interface of implementations that sample one token for each row of logits, with log-probabilities.

The log-probability is of the log-softmax after logit bias, penalties, restriction and temperature, before top-k, top-p
and min-p (SGLang's default); a greedy row's is of the logits without temperature.  A random row takes one uniform
number and inverts the cumulative distribution in vocabulary order: it needs no noise tensor of the size of the
vocabulary, and does not depend on the batch.  A greedy row takes the largest logit, of equal ones the lowest id.

A row that holds a NaN or +infinity, or nothing above -infinity, is no distribution.  Its token is the id of the first
NaN, else the lowest id of the largest logit.  All its log-probabilities are NaN; its best tokens are the lowest ids.

Where a row wants its mask, it gets the ids of all tokens that could have been sampled, in vocabulary order: the ones
that bias, minimum length, restriction, top-k, top-p and min-p leave, and whose weight in float is not 0.  They come
from the very weights that the token was drawn from.  The mask of a greedy row, or of a row without a distribution, is
its token.  That of a greedy row with a restriction is all that the restriction leaves: its log-probability is of them.

A restriction (a grammar, allowed ids, bad words) is a set of tokens for each step.  Other tokens become -infinity.

Shapes: N rows, V vocabulary, n most log-probabilities of best tokens that a row asks for, C chosen tokens, M kept ones
of all rows together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout.sampling.batch_info import PlainRows, SamplingBatchInfo

__all__ = ["PlainRows", "PlainTokens", "SampledTokens", "Sampler", "ScoredTokens"]


class PlainTokens(NamedTuple):
    """Room for the tokens of plain rows, and for W ids of each mask.

    `token_ids` [N] int64, `logprobs` [N] float32, `kept_counts` [N] int64, `kept_ids` [N, W] int32 and `kept_logprobs`
    [N, W] float32: see `SampledTokens`.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    kept_counts: torch.Tensor
    kept_ids: torch.Tensor
    kept_logprobs: torch.Tensor

    @classmethod
    def empty(cls, count: int, mask_width: int, device: torch.device | str) -> PlainTokens:
        """Return room for `count` rows."""
        integers = torch.empty((2, count), dtype=torch.int64, device=device)
        logprobs = torch.empty(count, dtype=torch.float32, device=device)
        kept_ids = torch.empty((count, mask_width), dtype=torch.int32, device=device)
        return cls(integers[0], logprobs, integers[1], kept_ids, torch.empty_like(kept_ids, dtype=torch.float32))

    def first(self, count: int) -> PlainTokens:
        """Return the room of the first `count` rows."""
        return PlainTokens(*(part[:count] for part in self))


@dataclass(slots=True)
class SampledTokens:
    """The tokens that a step sampled.  Floating-point fields are float32, or float64 for float64 logits.

    `token_ids` [N] int64; `logprobs` [N], NaN for rows that do not want it; `top_ids` [N, n] int64 and `top_logprobs`
    [N, n], best first, -1 and NaN in the places that a row did not ask for; `chosen_logprobs` [C], the chosen ids of
    all rows one after the other.  `kept_counts` [N] int64, 0 for rows that want no mask; `kept_ids` [M] int32 and
    `kept_logprobs` [M], of tokens among the kept ones of their row, one row after the other.  A sampler that does not
    wait for the counts gives both as [N, W], with each row's first: of more than W ids only W are there.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    chosen_logprobs: torch.Tensor
    kept_counts: torch.Tensor
    kept_ids: torch.Tensor
    kept_logprobs: torch.Tensor

    @classmethod
    def plain(cls, tokens: PlainTokens, info: SamplingBatchInfo) -> SampledTokens:
        """Return the tokens of plain rows, with the results that the rows of `info` ask for."""
        token_ids_N, logprobs_N, *masks = tokens
        none = logprobs_N.new_empty(0)
        if not info.masked_rows:
            masks = [torch.zeros(len(token_ids_N), dtype=torch.int64), torch.empty(0, dtype=torch.int32), none]
        return cls(
            token_ids_N,
            logprobs_N.masked_fill(~info.wants_logprob, torch.nan),
            token_ids_N.new_empty((len(token_ids_N), 0)),
            logprobs_N.new_empty((len(token_ids_N), 0)),
            none,
            *masks,
        )

    def kept_begins(self) -> torch.Tensor:
        """Return where the ids of each row begin among all `kept_ids`, flat: [N] int64."""
        if self.kept_ids.dim() == 2:
            return torch.arange(self.kept_ids.shape[0]) * self.kept_ids.shape[1]
        return self.kept_counts.cumsum(0) - self.kept_counts


@dataclass(slots=True)
class ScoredTokens:
    """`logprobs` [N] of the given tokens, `top_ids` and `top_logprobs` [N, n], `chosen_logprobs` [N, C]."""

    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    chosen_logprobs: torch.Tensor


class Sampler(ABC):
    """The interface of a sampler.  It has no state."""

    # Whether a row's token and log-probabilities are the same bits in every batch.
    batch_invariant = False

    mask_limit = 0  # the most ids that `sample_plain` writes of a mask

    @abstractmethod
    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        """Sample one token a row.  `logits_NV` may be changed in place.

        `positions_N`: index of the output token that each row samples, int64 on the CPU.
        """

    def plain_rows(self, info: SamplingBatchInfo, device: torch.device | str) -> PlainRows | None:
        """Return the inputs of `sample_plain` for these rows, on `device`; None where it cannot sample them."""
        return None

    def sample_plain(
        self, logits_NV: torch.Tensor, rows: PlainRows, positions_N: torch.Tensor, out: PlainTokens
    ) -> None:
        """Write tokens, log-probabilities and masks of all rows into `out`; all tensors are on one device.

        Every row has a log-probability.  Masks have room for `mask_limit` ids, or for the vocabulary if that is
        smaller.  The host reads nothing, so that a CUDA graph can hold the call.  The logits stay as they are.
        """
        raise NotImplementedError(f"{type(self).__name__} has no plain rows")

    @abstractmethod
    def score(
        self, logits_NV: torch.Tensor, target_ids_N: torch.Tensor, temperature: float, chosen_ids: list[int], top_n: int
    ) -> ScoredTokens:
        """Return the log-probabilities at `temperature` of given tokens, one of each row.

        Log-probabilities of the same `chosen_ids` in every row are added, and of the `top_n` best tokens (at most V).
        """
