"""Compares one sample, under one reading of its spans, with the reference: tokens, log-probabilities and experts.

KV that a retraction gave up was computed again by the weights of that time.  The answer counts retractions, but does
not state before which token each came: the reading searches for it.  The positions from one retraction to the next
are a *life*.  Position p holds token p; its forward gives row p and samples token p + 1.

Shapes: T positions with rows, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from rollout.core.sampling_params import SamplingParams
from rollout.sampling.batch_info import SamplingRow
from rollout.sampling.torch_sampler import uniform
from tests.history.reference import MixedOutput, MixedReference
from tests.sampler_reference import can_be_drawn, kept_tokens
from tests.soak.known import Known
from tests.soak.samples import Epoch, Sample, Span, Violation, places

TOLERANCE = 2e-4
"""Nats: the engine computes in float32, the reference in float64.  Of 1,100,000 tokens 700 are further off than 1e-5
and one than 3e-5.  Another version's tokens are off by tenths, and one key too few or too many by thousandths."""
TIE = 1e-4
"""The distance of two experts' probabilities below which the engine may have taken either."""
LIKELY_TIE = 1e-5
"""The distance below which the engine may well have taken either in a life whose rows it does not return."""
ROUNDING = 1e-5  # tolerance in the cumulative distribution
MAX_TRIED = 6
MAX_FORWARDS = 1500  # in search of lives


@dataclass(frozen=True)
class Explanation:
    """`epochs`: all that the sample used; `lives`: the number of times that its KV was computed.

    `decided` is false if two experts were so close that the engine's choice is unknown, as it does not return the rows
    of that life.
    """

    epochs: frozenset[Epoch]
    lives: int
    decided: bool = True


class Reading:
    """`epochs[p]`: the epoch of the first forward over position p.  `says_whose`: also check the stated age of KV."""

    def __init__(
        self,
        reference: MixedReference,
        known: Known,
        sample: Sample,
        epochs: Sequence[Epoch],
        says_whose: bool = True,
    ) -> None:
        self._reference, self._known, self._sample = reference, known, sample
        self._says_whose = says_whose
        self._num_prompt = len(sample.prompt_ids)
        self.epochs = list(epochs)
        self.ids = sample.sequence[: len(epochs)]
        self.rows = torch.from_numpy(sample.rows)  # [T, L, K]
        self._num_forwards = 0
        self._furthest = (-1, "")
        self._tied = False  # a life was refused that met a tie, or there were too many to try

    @property
    def num_own(self) -> int:
        """Positions behind the prompt."""
        return max(len(self.ids) - self._num_prompt, 0)

    @property
    def prompt_facts(self) -> object:
        """A value that is equal for samples whose prompts were computed alike."""
        return tuple(self.epochs[: self._num_prompt]), self.rows[: self._num_prompt].numpy().tobytes()

    def explain(self, first: MixedOutput | None = None) -> Explanation:
        """Explain the sample.  `first`: the forwards under `epochs`, where they are known.  Raises `Violation`."""
        used = self._lives(0, iter([self.epochs]), self._sample.retractions, first) if self.ids else []
        if used is None and self._tied:
            return Explanation(frozenset(self.epochs), 1 + self._sample.retractions, decided=False)
        if used is None:
            at, why = self._furthest
            told = f"{self._sample.retractions} retractions, epochs {_runs(self.epochs)}"
            raise Violation(f"{why}; {told}{self._who_explains(at)}")
        if self._says_whose:
            self._check_scored()
            self._check_kv(used)
        return Explanation(frozenset(epoch for life in used for epoch in life), max(len(used), 1))

    def _lives(
        self, start: int, lives: Iterator[list[Epoch]], retractions: int, first: MixedOutput | None = None
    ) -> list[list[Epoch]] | None:
        """Return the lives from position `start` to the end, each up to the beginning of the next.

        The first is one of `lives`; at most `retractions` others follow.  A life may fit some positions by chance, so
        others are tried where nothing follows it.  None: nothing fits.
        """
        for life in lives:
            if self._num_forwards == MAX_FORWARDS:
                self._tied = True
                return None
            output = first or self._forward(life, start)
            until, why = self._first_wrong(output, start, life)
            if until == len(self.ids):
                return [life]
            self._furthest = max(self._furthest, (until, why), key=lambda found: found[0])
            self._tied = self._tied or (until == start > 0 and output.margin < LIKELY_TIE)
            if until > start and retractions:
                rest = self._lives(until, self._lives_from(until), retractions - 1)
                if rest is not None:
                    return [life[:until], *rest]
        return None

    def _lives_from(self, start: int) -> Iterator[list[Epoch]]:
        """Yield the ways in which KV may have been computed again before position `start`.

        First, the weights of the position's own forward computed all of it.  Second, the weights that the answer names
        computed the prompt, and the last of them some tokens.  Third, other weights that were in force on the way
        computed a first part.
        """
        mine, before, rest = self.epochs[start], self.epochs[start - 1], self.epochs[start:]
        yield [mine] * start + rest
        prompt = [self._known.epochs_of(span, "the prompt's KV")[-1] for span in self._prompt_places()]
        if 0 < len(prompt) <= start and before <= max(prompt) <= mine:
            for cut in range(start, len(prompt) - 1, -1):
                yield prompt + prompt[-1:] * (cut - len(prompt)) + [mine] * (start - cut) + rest
        for other in sorted(epoch for epoch in self._known.contents if before <= epoch < mine):
            for cut in range(start, 0, -1):
                yield [other] * cut + [mine] * (start - cut) + rest

    def _forward(self, life: list[Epoch], start: int) -> MixedOutput:
        self._num_forwards += 1
        given = self.rows.clone()
        given[:start] = -1  # the rows that came are of an earlier life
        return self._reference.forward(self.ids, life, given, TIE)

    def _first_wrong(self, output: MixedOutput, start: int, life: Sequence[Epoch]) -> tuple[int, str]:
        """Return the first position from `start` on that these forwards do not explain, and why; or the end.

        No token may be on KV further behind than the request allows.
        """
        same_T = (output.routes == self.rows).flatten(1).all(1).tolist()
        wrong_tokens = self._wrong_tokens(output.logits, start)
        oldest = list(accumulate(life, min))
        for position in range(start, len(self.ids)):
            behind = life[position] - oldest[position] if position >= self._num_prompt - 1 else 0
            if behind > self._sample.lag >= 0:
                return position, f"token {position + 1 - self._num_prompt} was sampled on KV {behind} commits old"
            if not same_T[position]:
                return position, f"row {position} of experts is not the router's choice"
            if position in wrong_tokens:
                return position, wrong_tokens[position]
        return len(self.ids), ""

    def _wrong_tokens(self, logits_TV: torch.Tensor, start: int) -> dict[int, str]:
        """Return, by position, the fault of the token after it: a wrong log-probability, or a wrong choice."""
        sample, found = self._sample, dict[int, str]()
        first = max(start, 0 if sample.prompt_logprobs else self._num_prompt - 1)
        temperature = sample.params.get("temperature", 1.0)
        greedy = temperature < 1e-6
        scaled_NV = logits_TV[first:] / (1.0 if greedy else temperature)
        next_N = torch.tensor(sample.sequence[first + 1 : len(self.ids) + 1], dtype=torch.int64)
        scaled_NV = scaled_NV[: len(next_N)]
        real = scaled_NV.log_softmax(-1).gather(1, next_N[:, None])[:, 0].tolist()
        scored = sample.prompt_logprobs + [None] * (self._num_prompt - len(sample.prompt_logprobs))
        said = [*scored, *sample.logprobs][first + 1 :]
        drawn = greedy or self._can_be_drawn(scaled_NV, next_N, first)
        best = scaled_NV.amax(1) - scaled_NV.gather(1, next_N[:, None])[:, 0]
        for number, (a, b) in enumerate(zip(said, real)):
            position = first + number
            index = position + 1 - self._num_prompt
            if (a is not None or index >= 0) and not (a is not None and abs(a - b) <= TOLERANCE):
                name = f"token {index}" if index >= 0 else f"prompt token {position + 1}"
                found[position] = f"{name} has log-probability {a}, not {b:.6f}"
            elif index >= 0 and greedy and best[number] > TOLERANCE:
                found[position] = f"token {index} is not the most probable one"
            elif index >= 0 and drawn is not True and not drawn[number]:
                found[position] = f"token {index} is not the one that its seed draws"
        return found

    def _can_be_drawn(self, scaled_NV: torch.Tensor, next_N: torch.Tensor, first: int) -> list[bool]:
        """Return whether the noise of each place draws the token there, give or take rounding."""
        params = self._sample.params
        places_N = np.arange(first, first + len(next_N)) + 1 - self._num_prompt
        noise = uniform(np.full(len(next_N), self._sample.seed, dtype=np.uint64), np.maximum(places_N, 0))
        if params.get("top_k", -1) > 0 or params.get("top_p", 1.0) < 1.0:
            tokens = zip(scaled_NV.numpy(), next_N.tolist(), noise)
            return [token in _drawable(scaled, params, float(at)) for scaled, token, at in tokens]
        share_NV = scaled_NV.softmax(-1)
        end_N = share_NV.cumsum(-1).gather(1, next_N[:, None])[:, 0]
        begin_N, at_N = end_N - share_NV.gather(1, next_N[:, None])[:, 0], torch.from_numpy(noise)
        return ((begin_N - ROUNDING <= at_N) & (at_N <= end_N + ROUNDING)).tolist()

    def _check_scored(self) -> None:
        """Check the weights named for the prompt's log-probabilities: entry p is of the forward over position p - 1."""
        for span in self._sample.scored_spans:
            named = self._known.epochs_of(span, "prompt log-probabilities")
            if not set(self.epochs[span.start - 1 : span.end - 1]) <= set(named):
                raise Violation(f"prompt log-probabilities are said to be of {span}")

    def _check_kv(self, used: Sequence[Sequence[Epoch]]) -> None:
        """Check the ages of KV that the answer states."""
        sample, epochs = self._sample, [epoch for life in used for epoch in life]
        if sample.oldest is not None:
            named = self._known.epochs_of(sample.oldest, "the oldest KV")
            if epochs and (min(named) > min(epochs) or (not sample.retractions and min(epochs) not in named)):
                raise Violation(f"the oldest KV is said to be of {sample.oldest}; it is of epoch {min(epochs)}")
        if sample.retractions:
            return  # then the prompt's spans are of KV that was computed later
        for position, span in enumerate(self._prompt_places()[: len(self.epochs)]):
            if self.epochs[position] not in self._known.epochs_of(span, "the prompt's KV"):
                raise Violation(f"KV of position {position} is said to be of {span}, not {self.epochs[position]}")

    def _prompt_places(self) -> list[Span]:
        """Return, for each position of the prompt, the weights named for its KV at the end.  Raises `Violation`."""
        sample = self._sample
        count = self._num_prompt if sample.output_ids else sum(span.end - span.start for span in sample.prompt_spans)
        return places(sample.prompt_spans, count, "the prompt's KV")

    def _who_explains(self, position: int) -> str:
        """Return, for the message, which single version of the last few would explain the position."""
        for epoch in list(self._known.contents)[-MAX_TRIED:]:
            output = self._forward([epoch] * len(self.ids), 0)
            if self._first_wrong(output, position, [epoch] * len(self.ids))[0] > position:
                return f"; epoch {epoch} alone would explain it"
        return "; no other epoch explains it alone"


def _drawable(scaled_V: np.ndarray, params: object, noise: float) -> set[int]:
    """Return the tokens within top-k and top-p that this noise can draw."""
    top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)  # type: ignore[attr-defined]
    ranked = np.sort(scaled_V)[::-1]
    tied = 0 < top_k < len(ranked) and ranked[top_k - 1] - ranked[top_k] < TIE
    found: set[int] = set()
    for count in {top_k, top_k + tied}:
        row = cast(SamplingRow, SimpleNamespace(params=SamplingParams(top_k=count)))
        for near in (1 - ROUNDING, 1 + ROUNDING):
            kept = kept_tokens(scaled_V, row, min(top_p * near, top_p**0.5), 0.0)
            for at in (noise - ROUNDING, noise, noise + ROUNDING):
                found |= can_be_drawn(scaled_V, kept, at)
    return found


def _runs(epochs: Sequence[Epoch]) -> str:
    values, counts = torch.unique_consecutive(torch.tensor(epochs, dtype=torch.int64), return_counts=True)
    return " ".join(f"{value}x{count}" for value, count in zip(values.tolist(), counts.tolist()))
