"""`Sampler` in plain torch: every device, float32 and float64; half precision is widened to float32.

A row's logits pass through `apply_edits` (bias, penalties, minimum length, restriction) and temperature.  A random row
then passes through filters (`filtered_candidates`: top-k, top-p, min-p), and one number from `uniform` draws its token.
Of equally probable tokens, torch decides which one a filter keeps and which one comes first among the best.

Shapes: as in `base`; F rows with filters, K candidates kept by a partial sort.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from rollout.core.host_copy import to_device
from rollout.sampling.base import PlainRows, PlainTokens, SampledTokens, Sampler, ScoredTokens
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow

_ALMOST_ONE = 1.0 - 2.0**-53
_FIRST_TRY = 1024  # candidates of the partial sort
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class TorchSampler(Sampler):
    """Sampling in plain torch, the reference for the compiled sampler."""

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        logits_NV = apply_edits(_widened(logits_NV), info, positions_N)
        if info.scales:
            logits_NV.div_(info.temperatures[:, None].to(logits_NV.dtype))
        logprobs = RowLogprobs(logits_NV)
        token_ids = logits_NV.argmax(-1)
        weights_NV: torch.Tensor | None = None
        settled_N = info.greedy | ~logprobs.is_distribution
        if not info.all_greedy:
            drawn, weights_NV = _draw(logits_NV, info, positions_N)
            token_ids = torch.where(settled_N, token_ids, drawn)
        return SampledTokens(
            token_ids,
            logprobs.of(token_ids[:, None]).squeeze(1).masked_fill_(~info.wants_logprob, torch.nan),
            *_best(logprobs, info),
            logprobs.of_each(*info.chosen),
            *_kept(logits_NV, weights_NV, token_ids, settled_N, logprobs.is_distribution, info),
        )

    def plain_rows(self, info: SamplingBatchInfo, device: torch.device | str) -> PlainRows | None:
        """Return the rows where none has filters or wants its mask: both wait for the device."""
        rows = None if info.has_filters or info.masked_rows else info.plain_rows
        return None if rows is None else PlainRows(*(part.to(device) for part in rows))

    def sample_plain(
        self, logits_NV: torch.Tensor, rows: PlainRows, positions_N: torch.Tensor, out: PlainTokens
    ) -> None:
        logits_NV = _widened(logits_NV)
        logits_NV = logits_NV / rows.temperatures[:, None].to(logits_NV.dtype)
        logprobs = RowLogprobs(logits_NV)
        drawn = _invert_cdf(torch.softmax(logits_NV, dim=-1), uniform_of_bits(rows.seeds, positions_N))
        settled_N = rows.greedy | ~logprobs.is_distribution
        out.token_ids.copy_(torch.where(settled_N, logits_NV.argmax(-1), drawn))
        out.logprobs.copy_(logprobs.of(out.token_ids[:, None]).squeeze(1))

    def score(
        self, logits_NV: torch.Tensor, target_ids_N: torch.Tensor, temperature: float, chosen_ids: list[int], top_n: int
    ) -> ScoredTokens:
        logits_NV = _widened(logits_NV)
        logprobs = RowLogprobs(logits_NV / temperature if temperature != 1.0 else logits_NV)
        chosen = to_device(torch.tensor(chosen_ids, dtype=torch.int64), logits_NV.device)
        return ScoredTokens(
            logprobs.of(target_ids_N.to(logits_NV.device)[:, None]).squeeze(1),
            *logprobs.best(top_n),
            logprobs.of(chosen.expand(logits_NV.shape[0], -1)),
        )


def apply_edits(logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> torch.Tensor:
    """Apply to the logits in place: bias, repetition, frequency and presence, minimum length, restriction.

    Frequency and presence penalties count output tokens (OpenAI's definition); the repetition penalty counts prompt
    and output (Keskar et al., "CTRL", 2019).
    """
    for i, row in info.rows_with_lists:
        _edit_row(logits_NV[i], row, int(positions_N[i]))
        if (allowed_V := info.allowed(i)) is not None:
            logits_NV[i].masked_fill_(~allowed_V, -torch.inf)
    return logits_NV


def _edit_row(logits_V: torch.Tensor, row: SamplingRow, position: int) -> None:
    params, device, shared = row.params, logits_V.device, row.shared
    if params.logit_bias:
        logits_V[shared.on("bias_ids", device)] += shared.on("bias_values", device).to(logits_V.dtype)
    if params.has_penalties:
        output, counts = np.unique(np.array(row.output_ids, dtype=np.int64), return_counts=True)
        if params.repetition_penalty != 1.0:
            others = output[~_among(shared.distinct, output)]
            for seen in (shared.on("distinct", device), to_device(torch.from_numpy(others), device)):
                values, penalty = logits_V[seen], params.repetition_penalty
                logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if len(output) and (params.frequency_penalty or params.presence_penalty):
            lowered_by = params.frequency_penalty * torch.from_numpy(counts).to(logits_V.dtype)
            lowered_by += params.presence_penalty
            logits_V[to_device(torch.from_numpy(output), device)] -= to_device(lowered_by, device)
    if position < params.min_new_tokens:
        ends = torch.from_numpy(shared.ends(logits_V.shape[0]))
        logits_V.index_fill_(0, to_device(ends, device), -torch.inf)


def _among(ascending: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return whether each of `ids` [n] is one of `ascending` [m]: bool [n]."""
    places = ascending.searchsorted(ids)
    found = places < len(ascending)
    found[found] = ascending[places[found]] == ids[found]
    return found


def filtered_candidates(
    probs_NV: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    largest_top_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the candidates by top-k, top-p and min-p, and return them in descending order.

    They are probabilities [N, K], zero where filtered out, and token ids [N, K].  Order and meaning: keep the `top_k`
    most probable tokens and renormalise; keep the smallest set of the most probable whose mass reaches `top_p` and
    renormalise; drop tokens under `min_p` times the most probable.  A full sort is avoided where it can be.  `top_k_N`
    holds V where there is no limit; a caller that knows its maximum can save a wait for the device.
    """
    vocab = probs_NV.shape[1]
    width = min(vocab, _FIRST_TRY)
    values, ids = probs_NV.topk(width, dim=-1)
    if width < vocab if largest_top_k is None else width < min(vocab, largest_top_k):
        # the partial sort is enough where top-k, top-p's mass or min-p's threshold ends inside it
        enough = (top_k_N <= width) | ((top_p_N < 1.0) & (values.sum(-1, dtype=torch.float64) >= top_p_N))
        enough |= values[:, -1] < values[:, 0] * min_p_N
        if not bool(enough.all()):
            values, ids = probs_NV.sort(dim=-1, descending=True)
    rank = torch.arange(values.shape[1], device=values.device)
    kept = values.double() * (rank < top_k_N[:, None])
    whole = probs_NV.sum(-1, keepdim=True, dtype=torch.float64)
    kept /= torch.where(top_k_N[:, None] < vocab, kept.sum(-1, keepdim=True), whole)
    mass_before = kept.cumsum(-1) - kept
    kept = kept * (mass_before < top_p_N[:, None])
    return kept * (kept >= kept[:, :1] * min_p_N[:, None]), ids


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform numbers [N] float64 in [0, 1), of 53 bits, from seeds [N] uint64 and positions [N] alone.

    No generator state is shared, so the same seed gives the same tokens whatever else is in the batch.  The mix is
    SplitMix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniform_of_bits(seeds_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Return `uniform` of seeds and positions on their device, which does not wait for the host.

    Both are int64 [N]; the seeds have the bits of unsigned numbers.
    """
    gamma = _signed(_GAMMA)
    return (_shifted(_mix_bits(_mix_bits(seeds_N + gamma) + (positions_N + 1) * gamma), 11)).double() * 2.0**-53


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill with zeros from the left; torch alone would repeat the sign of negative numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: np.uint64) -> int:
    return int(x.astype(np.int64))


class RowLogprobs:
    """Log-probabilities of rows of adjusted logits [N, V], normalised once.

    All values of a row without a distribution (see `base`) are NaN.
    """

    def __init__(self, logits_NV: torch.Tensor) -> None:
        self._logits_NV = logits_NV
        normaliser = logits_NV.logsumexp(-1, keepdim=True)
        self.is_distribution = normaliser.isfinite().squeeze(1)  # [N]
        self._normaliser = normaliser.masked_fill(~normaliser.isfinite(), torch.nan)  # [N, 1]

    def of(self, token_ids_NC: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [N, C] of the tokens [N, C] int64."""
        return self._logits_NV.gather(1, token_ids_NC) - self._normaliser

    def of_each(self, rows_C: torch.Tensor, token_ids_C: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [C] of pairs of a row and a token, both int64 [C]."""
        return self._logits_NV[rows_C, token_ids_C] - self._normaliser[rows_C, 0]

    def best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and log-probabilities [N, n], best first; n is `count`, or V if this is less."""
        values, ids = self._logits_NV.topk(min(count, self._logits_NV.shape[1]), dim=-1)
        first = torch.arange(ids.shape[1], device=ids.device)
        return torch.where(self.is_distribution[:, None], ids, first), values - self._normaliser


def _widened(logits_NV: torch.Tensor) -> torch.Tensor:
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()


def _best(logprobs: RowLogprobs, info: SamplingBatchInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best ids and log-probabilities [N, n], -1 and NaN in the places that a row did not ask for."""
    ids, values = logprobs.best(info.top_n)
    missing = info.top_n - ids.shape[1]
    unwanted = torch.arange(info.top_n, device=info.device) >= info.top_logprobs[:, None]
    return (
        F.pad(ids, (0, missing), value=-1).masked_fill_(unwanted, -1),
        F.pad(values, (0, missing), value=torch.nan).masked_fill_(unwanted, torch.nan),
    )


def _draw(
    logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for every row [N], as if none were greedy, and return it with the weights [N, V] of the draw."""
    noise = to_device(torch.from_numpy(uniform(info.settings["seed"], positions_N.numpy())), info.device)
    weights_NV = torch.softmax(logits_NV, dim=-1)
    if info.filtered_rows is not None:
        rows = info.filtered_rows
        values, ids = filtered_candidates(weights_NV[rows], info.top_k, info.top_p, info.min_p, info.largest_top_k)
        kept_FV = torch.zeros(len(rows), weights_NV.shape[1], dtype=values.dtype, device=info.device)
        weights_NV = weights_NV.to(values.dtype)
        weights_NV[rows] = kept_FV.scatter_(1, ids, values)
    return _invert_cdf(weights_NV, noise), weights_NV


def _kept(
    logits_NV: torch.Tensor,
    weights_NV: torch.Tensor | None,
    token_ids_N: torch.Tensor,
    settled_N: torch.Tensor,
    is_distribution_N: torch.Tensor,
    info: SamplingBatchInfo,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `kept_counts`, `kept_ids` and `kept_logprobs` of `SampledTokens`.

    Rows that are `settled` have one token; without a distribution, that token has no log-probability.  Greedy rows with
    a restriction have all tokens that it leaves.
    """
    counts = torch.zeros(len(logits_NV), dtype=torch.int64)
    ids: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for i in info.masked_rows:
        if i in info.restricted and bool(settled_N[i] & is_distribution_N[i]):
            ids.append(torch.softmax(logits_NV[i], dim=-1).nonzero().squeeze(1))
            logprobs.append(torch.log_softmax(logits_NV[i, ids[-1]], dim=-1))
        elif bool(settled_N[i]):
            ids.append(token_ids_N[i : i + 1])
            logprobs.append(torch.full((1,), 0.0 if bool(is_distribution_N[i]) else torch.nan, dtype=logits_NV.dtype))
        else:
            assert weights_NV is not None
            ids.append(weights_NV[i].nonzero().squeeze(1))
            logprobs.append(torch.log_softmax(logits_NV[i, ids[-1]], dim=-1))
        counts[i] = len(ids[-1])
    if not ids:
        return counts, torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=logits_NV.dtype)
    return counts, torch.cat(ids).to(torch.int32), torch.cat([values.to(logits_NV.device) for values in logprobs])


def _invert_cdf(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return indices [N] drawn in proportion to `weights` [N, V] (not normalised) by `noise` [N] in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(noise[:, None] * total, total * _ALMOST_ONE)
    # the first index whose cumulative weight exceeds the target: never one of weight zero
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
