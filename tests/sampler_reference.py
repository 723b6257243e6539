"""A sampler in float64, one row at a time, from the definitions; and the objections that it has to an answer.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingRow
from rollout.sampling.torch_sampler import uniform

ROUNDING = 2e-6  # of float32 weights, as a share of the total
LOGPROB_ERROR = 4e-6


def scaled_logits(logits_V: torch.Tensor, row: SamplingRow) -> np.ndarray:
    """Return logits after bias, penalties, minimum length and temperature."""
    params, scaled = row.params, logits_V.double().numpy().copy()
    for token, bias in params.logit_bias.items():
        scaled[token] += bias
    for token in {*row.prompt_ids, *row.output_ids}:
        better = scaled[token] > 0
        scaled[token] *= 1 / params.repetition_penalty if better else params.repetition_penalty
    for token, count in Counter(row.output_ids).items():
        scaled[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(row.output_ids) < params.min_new_tokens:
        scaled[list(row.end_ids)] = -np.inf
    return scaled / params.effective_temperature


def order_of(scaled: np.ndarray) -> list[int]:
    """Sort token ids, the best first, and of equal logits the lower id."""
    return sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))


def kept_tokens(scaled: np.ndarray, row: SamplingRow, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that top-k, top-p and min-p leave."""
    weights, order = np.exp(scaled - scaled.max()), order_of(scaled)
    if row.params.top_k > 0:
        order = order[: row.params.top_k]
    whole = weights[order].sum()
    kept, mass = set(), 0.0
    for token in order:
        if top_p < 1.0 and mass >= top_p * whole:
            break
        if weights[token] >= min_p:
            kept.add(token)
        mass += weights[token]
    return kept


def can_be_drawn(scaled: np.ndarray, kept: set[int], noise: float) -> set[int]:
    """Return the tokens whose share of the cumulative distribution over `kept` contains the noise, up to rounding."""
    weights = np.exp(scaled - scaled.max())
    weights[[token for token in range(len(scaled)) if token not in kept]] = 0.0
    ends = weights.cumsum() / weights.sum()
    begins = ends - weights / weights.sum()
    near = (begins - ROUNDING <= noise) & (noise <= ends + ROUNDING) & (weights > 0)
    return set(np.flatnonzero(near).tolist())


def complaints(logits_NV: torch.Tensor, rows: Sequence[SamplingRow], tokens: SampledTokens) -> list[str]:
    """Return what is wrong with `tokens`, sampled from these logits; empty if nothing is."""
    found: list[str] = []
    chosen_at, begins = 0, tokens.kept_begins().tolist()
    kept_ids, kept_logprobs = tokens.kept_ids.flatten(), tokens.kept_logprobs.flatten()
    for i, row in enumerate(rows):
        params, scaled = row.params, scaled_logits(logits_NV[i], row)
        logprobs = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        token = int(tokens.token_ids[i])
        if params.is_greedy:
            allowed = {order_of(scaled)[0]}
        else:
            noise = uniform(np.array([row.seed], dtype=np.uint64), np.array([len(row.output_ids)]))[0]
            allowed = set()
            for near in (1 - ROUNDING, 1 + ROUNDING):
                kept = kept_tokens(scaled, row, min(params.top_p * near, params.top_p**0.5), params.min_p * near)
                allowed |= can_be_drawn(scaled, kept, noise)
        if token not in allowed:
            found.append(f"row {i}: token {token}, not of {sorted(allowed)[:5]}")

        if row.wants_logprob and _differ(tokens.logprobs[i : i + 1], logprobs[[token]]):
            found.append(f"row {i}: log-probability {tokens.logprobs[i]:.7f}, not {logprobs[token]:.7f}")
        best = order_of(scaled)[: row.top_logprobs]
        if tokens.top_ids[i, : len(best)].tolist() != best:
            found.append(f"row {i}: best tokens {tokens.top_ids[i].tolist()}, not {best}")
        elif _differ(tokens.top_logprobs[i, : len(best)], logprobs[best]):
            found.append(f"row {i}: log-probabilities of the best tokens")
        chosen = list(row.chosen_ids)
        if _differ(tokens.chosen_logprobs[chosen_at : chosen_at + len(chosen)], logprobs[chosen]):
            found.append(f"row {i}: log-probabilities of chosen tokens")
        chosen_at += len(chosen)
        count = int(tokens.kept_counts[i])
        mask = slice(begins[i], begins[i] + count)
        ids = kept_ids[mask].tolist()
        if row.wants_mask:
            found += [
                f"row {i}: {complaint}" for complaint in mask_complaints(scaled, row, token, ids, kept_logprobs[mask])
            ]
        elif count:
            found.append(f"row {i}: a mask that was not asked for")
    return found


def mask_complaints(
    scaled: np.ndarray, row: SamplingRow, token: int, ids: list[int], logprobs: torch.Tensor
) -> list[str]:
    """Return what is wrong with the mask of a row."""
    params = row.params
    if params.is_greedy:
        return [] if ids == [token] and logprobs.tolist() == [0.0] else [f"mask {ids[:5]} of a greedy row"]
    if token not in ids or ids != sorted(set(ids)):
        return [f"mask {ids[:5]} does not hold token {token}, or its ids do not ascend"]
    fewer, more = (
        kept_tokens(scaled, row, min(params.top_p * near, params.top_p**0.5), params.min_p / near)
        for near in (1 - ROUNDING, 1 + ROUNDING)
    )
    drawable = {int(token) for token in np.flatnonzero(scaled > scaled.max() - 80)}  # float32 has weights for them
    if not (fewer & drawable <= set(ids) <= more):
        return [f"mask of {len(ids)} ids, not of {len(fewer)} to {len(more)}"]
    exact = scaled[ids] - scaled.max() - np.log(np.exp(scaled[ids] - scaled.max()).sum())
    return ["log-probabilities of the mask"] if _differ(logprobs, exact) else []


def _differ(values: torch.Tensor, exact: np.ndarray) -> bool:
    finite = np.isfinite(exact)
    tolerance = LOGPROB_ERROR + 2e-7 * np.abs(exact[finite])
    got = values.double().numpy()
    if got.shape != exact.shape or not np.array_equal(got[~finite], exact[~finite]):
        return True
    return not bool((np.abs(got[finite] - exact[finite]) <= tolerance).all())
