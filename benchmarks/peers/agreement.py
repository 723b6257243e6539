"""The check that two systems compute one model: their likeliest next tokens, and what they generate greedily.

With random weights the leading log-probabilities lie close together, so bfloat16 picks another first token now and
then.  The overlap of the 20 likeliest distinguishes rounding (most are shared) from other weights (hardly any is).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOP = 20
MIN_OVERLAP = 0.5

Top = Sequence[Sequence[Any]]  # pairs of token id and log-probability, likeliest first


@dataclass(frozen=True)
class Agreement:
    """The agreement of one system with the reference, over some prompts."""

    prompts: int
    same_first: int
    near_ties: int
    """Prompts with another first token that the reference puts behind its own by twice `logprob_error` at most."""
    overlap: float
    """Mean share of the likeliest tokens that are among the reference's."""
    logprob_error: float
    """Largest |difference| over the shared tokens."""
    same_tokens: float
    """Mean number of generated tokens before the first that differs."""
    generated: int

    @property
    def same_model(self) -> bool:
        return self.overlap >= MIN_OVERLAP


def compare(
    tops: Sequence[Top], tokens: list[list[int]], reference: Sequence[Top], expected: list[list[int]]
) -> Agreement:
    """Compare one system's `tops` and `tokens`, an entry for each prompt, with those entries of the reference."""
    assert len(tops) == len(reference) == len(tokens) == len(expected)
    overlaps, errors = [], [0.0]
    for top, ref in zip(tops, reference, strict=True):
        theirs, ours = _logprobs(top), _logprobs(ref)
        shared = theirs.keys() & ours.keys()
        overlaps.append(len(shared) / len(ours))
        errors += [abs(theirs[token] - ours[token]) for token in shared]
    others = [(top, ref) for top, ref in zip(tops, reference, strict=True) if top[0][0] != ref[0][0]]
    return Agreement(
        prompts=len(tops),
        same_first=len(tops) - len(others),
        near_ties=sum(_near_tie(top[0][0], ref, 2 * max(errors)) for top, ref in others),
        overlap=sum(overlaps) / len(overlaps),
        logprob_error=max(errors),
        same_tokens=sum(map(_common_prefix, tokens, expected)) / len(tokens),
        generated=len(expected[0]),
    )


def _logprobs(top: Top) -> dict[int, float]:
    return {int(token): float(logprob) for token, logprob in top}


def _near_tie(token: int, reference: Top, tolerance: float) -> bool:
    logprobs = _logprobs(reference)
    return token in logprobs and reference[0][1] - logprobs[token] <= tolerance


def _common_prefix(tokens: list[int], expected: list[int]) -> int:
    pairs = enumerate(zip(tokens, expected, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(expected))
