"""`AnswerLog`: what the answers of the last requests were like, and the last samples themselves.

It observes the manager.  Everything is bounded, and a sample costs some microseconds: lists are cut, not walked.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rollout.core.messages.req_output import VersionSpan
from rollout.tokenizer_manager.sample import SampleRecord

LENGTHS_KEPT = 1000
SAMPLES_KEPT = 24
OUTPUT_TOKENS_KEPT = 384
PROMPT_TOKENS_KEPT = 64
ALTERNATIVES_READ = 256
"""Tokens of a sample whose likeliest alternatives are read for the entropy."""


class KeptSample(msgspec.Struct, frozen=True, kw_only=True):
    """One of the last samples.  Of long ones the end of the prompt and the beginning of the output.

    `spans`: which weights explain the output tokens.  `weight_epoch`: of the weights in force when it ended.
    """

    number: int
    at: float
    rid: str
    session_id: str | None
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    spans: list[VersionSpan]
    weight_epoch: int
    reason: str
    seconds: float


@dataclass
class Sums:
    """Sums over the samples that ended since the last look."""

    num_finished: int = 0
    num_aborted: int = 0
    aged_tokens: int = 0
    age_sum: int = 0
    max_age: int = 0
    logprob_sum: float = 0.0
    logprob_tokens: int = 0
    entropy_sum: float = 0.0
    entropy_tokens: int = 0


@dataclass
class AnswerLog:
    """Use from the manager's event loop.  `keeps_samples`: whether tokens are kept at all.

    `weight_epoch`: the one in force, set by who knows the scheduler's state.
    """

    keeps_samples: bool
    weight_epoch: int = 0
    sums: Sums = field(default_factory=Sums)
    _ended: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LENGTHS_KEPT))
    _samples: deque[KeptSample] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    _count: int = 0

    def on_first_token(self, record: SampleRecord) -> None:
        """Do nothing: the metrics count it."""

    def on_finished(self, record: SampleRecord) -> None:
        """Add a sample that has ended to the sums, and keep it."""
        finished = record.finished
        assert finished is not None
        self._ended.append((len(record.output_ids), finished.reason.type))
        self.sums.num_finished += 1
        self.sums.num_aborted += finished.reason.type == "abort"
        self._add_ages(finished.weight_versions)
        if record.output_logprobs:
            self._add_logprobs(record)
        if self.keeps_samples and record.output_ids:
            self._keep(record)

    def taken(self) -> Sums:
        """Return the sums since the last call, and begin new ones."""
        found, self.sums = self.sums, Sums()
        return found

    def shown(self) -> dict[str, Any]:
        """Return the lengths and finish reasons of the last samples, and the number of the last one kept."""
        lengths = [length for length, _ in self._ended]
        edges = length_edges(max(lengths, default=0))
        counts = np.histogram(lengths, edges)[0].tolist() if lengths else []
        return {
            "num_samples": len(lengths),
            "reasons": dict(Counter(reason for _, reason in self._ended)),
            "length_edges": edges,
            "length_counts": counts,
            "keeps_samples": self.keeps_samples,
            "last_sample": self._count,
        }

    def samples(self) -> list[KeptSample]:
        """Return the last samples, newest first."""
        return list(reversed(self._samples))

    def _add_ages(self, spans: list[VersionSpan]) -> None:
        """Add the ages of tokens: how many versions came into force since the one that explains each of them."""
        if not spans:
            return
        self.weight_epoch = max(self.weight_epoch, spans[-1].weight_epoch)
        for span in spans:
            age, num_tokens = self.weight_epoch - span.weight_epoch, span.end - span.start
            self.sums.age_sum += age * num_tokens
            self.sums.aged_tokens += num_tokens
            self.sums.max_age = max(self.sums.max_age, age)

    def _add_logprobs(self, record: SampleRecord) -> None:
        num_tokens, total = len(record.output_logprobs), sum(record.output_logprobs)
        params = record.source.sampling_params
        if not np.isfinite(total):
            return
        self.sums.logprob_sum += total
        self.sums.logprob_tokens += num_tokens
        if record.source.top_logprobs_num > 0:
            count = min(num_tokens, ALTERNATIVES_READ)
            self.sums.entropy_sum += entropy_of(record.output_alternatives.arrays(count).top_logprobs)
            self.sums.entropy_tokens += count
        elif params.temperature == 1.0 and not params.filters:
            self.sums.entropy_sum -= total
            self.sums.entropy_tokens += num_tokens

    def _keep(self, record: SampleRecord) -> None:
        finished = record.finished
        assert finished is not None and record.finished_at is not None
        self._count += 1
        self._samples.append(
            KeptSample(
                number=self._count,
                at=round(time.time(), 3),
                rid=record.rid[:80],
                session_id=None if record.session_id is None else record.session_id[:80],
                prompt_ids=record.prompt_ids[-PROMPT_TOKENS_KEPT:],
                output_ids=record.output_ids[:OUTPUT_TOKENS_KEPT],
                logprobs=record.output_logprobs[:OUTPUT_TOKENS_KEPT],
                num_prompt_tokens=len(record.prompt_ids),
                num_output_tokens=len(record.output_ids),
                num_cached_tokens=finished.cached_tokens,
                spans=finished.weight_versions[:OUTPUT_TOKENS_KEPT],
                weight_epoch=self.weight_epoch,
                reason=finished.reason.type,
                seconds=round(record.finished_at - record.created_at, 3),
            )
        )


def entropy_of(top_logprobs_nK: np.ndarray) -> float:
    """Return the sum over tokens of the entropy of the K likeliest ones and of all others as one, in nats.

    The true entropy is at least this.
    """
    logprobs_nK = top_logprobs_nK.astype(np.float64)
    shares_nK = np.exp(logprobs_nK)
    known = -np.where(shares_nK > 0, shares_nK * np.where(shares_nK > 0, logprobs_nK, 0.0), 0.0).sum()
    rest_n = np.clip(1.0 - shares_nK.sum(axis=1), 1e-12, 1.0)
    return float(known - (rest_n * np.log(rest_n)).sum())


def length_edges(longest: int) -> list[int]:
    """Return up to 25 round edges of equal bins from 0 to beyond `longest`."""
    least = max(1, -(-(longest + 1) // 24))
    width = next(step for power in range(10) for step in (10**power, 2 * 10**power, 5 * 10**power) if step >= least)
    return list(range(0, longest + 1 + width, width))
