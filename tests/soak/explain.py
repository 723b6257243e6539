"""Which weights explain a sample: every token, log-probability and row of experts, recomputed in float64.

The answer names the weights of each place; here they are taken from what was really sent.  KV that a retraction gave up
was computed again by then newer weights, and the answer does not say before which token that was: it is looked for, as
often as the answer counts retractions.  A stretch of positions between two retractions is a *life*.

Position p holds token p; its forward gives row p and samples token p + 1.

Shapes: T tokens, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from rollout.core.model_config import ModelConfig
from rollout.core.sampling_params import SamplingParams
from rollout.sampling.batch_info import SamplingRow
from rollout.sampling.noise import uniform
from tests.history.reference import MixedOutput, MixedReference
from tests.sampler_reference import can_be_drawn, kept_tokens
from tests.soak.samples import Epoch, Sample, Span, Violation, places

Tensors = Mapping[str, torch.Tensor]

TOLERANCE = 1e-4
"""Nats: the engine computes in float32, the reference in float64.  Versions differ in the first digits."""
TIE = 1e-5
"""Where two experts' probabilities are closer than this, float32 may take either."""
ROUNDING = 2e-6  # of the cumulative distribution


class Known:
    """`contents[e]`: the tensors that were in force as epoch e; `labels[e]`: the names that it had."""

    def __init__(self) -> None:
        self.contents: dict[Epoch, Tensors] = {}
        self.labels: dict[Epoch, set[str]] = {}

    def epochs_of(self, span: Span, what: str) -> list[Epoch]:
        """The epochs that a span can mean: one, unless a label was given twice.  Raises `Violation`."""
        found = [epoch for epoch, labels in self.labels.items() if span.label in labels]
        if span.epoch is not None:
            found = [epoch for epoch in found if epoch == span.epoch]
        if not found:
            epoch = "" if span.epoch is None else f" of epoch {span.epoch}"
            raise Violation(f"{what} are said to be of {span.label!r}{epoch}, which was never in force")
        return found


@dataclass(frozen=True)
class Explanation:
    """`epochs`: all that the sample used; `lives`: how often its KV was computed; `decided`: false where two experts
    were so close that it cannot be told which of them the engine took in a life whose rows it does not return."""

    epochs: frozenset[Epoch]
    lives: int
    decided: bool = True


class Explainer:
    def __init__(self, config: ModelConfig, known: Known) -> None:
        self._config = config
        self._known = known
        self._reference = MixedReference(config, known.contents)

    def explain(self, sample: Sample) -> Explanation:
        """Raises `Violation`."""
        first: Violation | None = None
        for epochs in self._readings(sample):
            try:
                return _Explained(self._reference, self._known, sample, epochs).explain()
            except Violation as violation:
                first = first or violation
        raise Violation(f"request {sample.rid}: {first}")

    def explain_as(self, sample: Sample, epoch: Epoch) -> Explanation:
        """As if all of it were of one epoch, whatever it says.  Raises `Violation`."""
        return _Explained(self._reference, self._known, sample, [epoch] * len(sample.rows), check_names=False).explain()

    def _readings(self, sample: Sample) -> Iterator[list[Epoch]]:
        """Epochs of the positions that have rows: of the prompt's by their spans, then of the token that each samples."""
        try:
            tokens = self._token_epochs(sample)
            rows = places(sample.row_spans, len(sample.rows), "rows")
            num_prompt = len(sample.prompt_ids)
            expected = num_prompt + len(tokens) - 1
            if tokens and len(sample.rows) != expected:
                raise Violation(f"{len(sample.rows)} rows of experts, {expected} tokens were consumed")
            if sample.finish != "abort" and len(tokens) == 0 and sample.params["max_new_tokens"]:
                raise Violation("it ended without a token")
            for position, span in enumerate(rows[num_prompt:], start=1):
                if tokens[position] not in self._known.epochs_of(span, "rows"):
                    raise Violation(f"token {position} is of epoch {tokens[position]}, the row before it of {span}")
            spans = list(dict.fromkeys(rows[:num_prompt]))
            meanings = [self._known.epochs_of(span, "rows") for span in spans]
        except Violation as violation:
            raise Violation(f"request {sample.rid}: {violation}") from None
        for meaning in product(*meanings):
            of_span = dict(zip(spans, meaning))
            yield [of_span[span] for span in rows[:num_prompt]] + tokens[1:]

    def _token_epochs(self, sample: Sample) -> list[Epoch]:
        """By the content in force under the label, the newest where it was given twice and the answer does not say."""
        spans = places(sample.token_spans, len(sample.output_ids), "tokens")
        epochs = [self._known.epochs_of(span, "tokens")[-1] for span in spans]
        if epochs != sorted(epochs):
            raise Violation(f"the epochs of tokens decrease: {sample.token_spans}")
        return epochs


class _Explained:
    """One reading of one sample.  `epochs[p]`: of the first forward over position p."""

    def __init__(
        self,
        reference: MixedReference,
        known: Known,
        sample: Sample,
        epochs: Sequence[Epoch],
        check_names: bool = True,
    ) -> None:
        self._reference, self._known, self._sample = reference, known, sample
        self._epochs = list(epochs)
        self._check_names = check_names
        self._num_prompt = len(sample.prompt_ids)
        self._ids = sample.sequence[: len(epochs)]
        self._rows = torch.from_numpy(sample.rows)
        self._noise = uniform(
            np.full(len(sample.output_ids), sample.seed, dtype=np.uint64), np.arange(len(sample.output_ids))
        )

    def explain(self) -> Explanation:
        used: list[list[Epoch]] = []
        start, lives, why = 0, iter([self._epochs]), ""
        while start < len(self._ids):
            life, until, why = self._next_life(start, lives, why)
            if life is None:
                return Explanation(frozenset(self._epochs), len(used) + 1, decided=False)
            used.append(life[:until])
            self._check_lag(start, until, life)
            start = until
            lives = self._lives_from(start) if len(used) <= self._sample.retractions else iter(())
        if self._check_names:
            self._check_kv(used)
        return Explanation(frozenset(epoch for life in used for epoch in life), max(len(used), 1))

    def _next_life(self, start: int, lives: Iterator[list[Epoch]], why: str) -> tuple[list[Epoch] | None, int, str]:
        """The first of `lives` that explains position `start`, which the life before did not, for the reason `why`; up
        to where it does, and why not further.

        None: none does, but one of them met a tie.  Raises `Violation`.
        """
        tied = False
        for life in lives:
            output = self._forward(life, start)
            wrong, reason = self._first_wrong(output, start)
            if wrong > start:
                return life, wrong, reason
            why, tied = why or reason, tied or output.margin < TIE
        if tied:
            return None, start, why
        told = f"{self._sample.retractions} retractions, epochs {_runs(self._epochs)}"
        raise Violation(f"{why}; {told}{self._who_explains(start)}")

    def _lives_from(self, start: int) -> Iterator[list[Epoch]]:
        """What KV may have been computed again before position `start`: all of it by the weights of its own forward, or
        a first part of it by others that were in force on the way there."""
        mine = self._epochs[start]
        before = self._epochs[start - 1]
        yield [mine] * start + self._epochs[start:]
        for other in sorted(epoch for epoch in self._known.contents if before <= epoch < mine):
            for cut in range(1, start + 1):
                yield [other] * cut + [mine] * (start - cut) + self._epochs[start:]

    def _forward(self, life: list[Epoch], start: int) -> MixedOutput:
        missing = sorted({*life} - self._known.contents.keys())
        if missing:
            raise Violation(f"nothing is known of epochs {missing}")
        given = self._rows.clone()
        given[:start] = -1  # the rows that came are of an earlier life
        return self._reference.forward(self._ids, life, given, TIE)

    def _first_wrong(self, output: MixedOutput, start: int) -> tuple[int, str]:
        """The first position from `start` on that these forwards do not explain, and why; the end, if there is none."""
        same_T = (output.routes == self._rows).flatten(1).all(1)
        for position in range(start, len(self._ids)):
            if not same_T[position]:
                return position, f"row {position} of experts is not the router's choice"
            why = self._wrong_at(output.logits[position], position)
            if why:
                return position, why
        return len(self._ids), ""

    def _wrong_at(self, logits_V: torch.Tensor, position: int) -> str:
        sample = self._sample
        temperature = sample.params.get("temperature", 1.0)
        greedy = temperature < 1e-6
        index = position + 1 - self._num_prompt
        if index < 0 and position + 1 >= len(sample.prompt_logprobs):
            return ""
        scaled_V = logits_V if greedy else logits_V / temperature
        logprobs_V = scaled_V.log_softmax(-1)
        if index < 0:
            said, real = sample.prompt_logprobs[position + 1], float(logprobs_V[sample.prompt_ids[position + 1]])
            return "" if _close(said, real) else f"prompt token {position + 1} has {said}, not {real:.6f}"
        token, said = sample.output_ids[index], sample.logprobs[index]
        if not _close(said, float(logprobs_V[token])):
            return f"token {index} has log-probability {said:.6f}, not {float(logprobs_V[token]):.6f}"
        if greedy:
            far = float(logits_V.max() - logits_V[token]) > TOLERANCE
            return f"token {index} is not the most probable one" if far else ""
        return "" if token in self._drawable(scaled_V, index) else f"token {index} is not the one that its seed draws"

    def _drawable(self, scaled_V: torch.Tensor, index: int) -> set[int]:
        """Tokens that the noise of this place can draw, give or take rounding."""
        scaled = scaled_V.numpy()
        params = self._sample.params
        top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
        if top_k <= 0 and top_p >= 1.0:
            return can_be_drawn(scaled, set(range(len(scaled))), self._noise[index])
        row = cast(SamplingRow, SimpleNamespace(params=SamplingParams(top_k=top_k)))
        found: set[int] = set()
        for near in (1 - ROUNDING, 1 + ROUNDING):
            kept = kept_tokens(scaled, row, min(top_p * near, top_p**0.5), 0.0)
            found |= can_be_drawn(scaled, kept, self._noise[index])
        return found

    def _check_lag(self, start: int, until: int, life: Sequence[Epoch]) -> None:
        """No token on KV further behind than the request allows."""
        lag = self._sample.lag
        for position in range(max(start, self._num_prompt - 1), until if lag >= 0 else 0):
            behind = life[position] - min(life[: position + 1])
            if behind > lag:
                raise Violation(f"token {position + 1 - self._num_prompt} was sampled on KV {behind} commits old")

    def _check_kv(self, used: Sequence[Sequence[Epoch]]) -> None:
        """What is said of the age of KV."""
        sample, epochs = self._sample, [epoch for life in used for epoch in life]
        if sample.oldest is not None:
            named = self._known.epochs_of(Span(sample.oldest, None, 0, 0), "the oldest KV")
            if epochs and (min(named) > min(epochs) or (not sample.retractions and min(epochs) not in named)):
                raise Violation(f"the oldest KV is said to be of {sample.oldest!r}; it is of epoch {min(epochs)}")
        if sample.retractions:
            return  # then the prompt's spans are of KV that was computed since
        count = self._num_prompt if sample.output_ids else sum(span.end - span.start for span in sample.prompt_spans)
        spans = places(sample.prompt_spans, count, "the prompt's KV")
        for position, span in enumerate(spans[: len(self._epochs)]):
            if self._epochs[position] not in self._known.epochs_of(span, "the prompt's KV"):
                raise Violation(f"KV of position {position} is said to be of {span}, not {self._epochs[position]}")

    def _who_explains(self, position: int) -> str:
        """For the message: which single known version would explain the position."""
        for epoch in self._known.contents:
            output = self._forward([epoch] * len(self._ids), 0)
            if self._first_wrong(output, position)[0] > position:
                return f"; epoch {epoch} alone would explain it"
        return "; no known epoch explains it alone"


def _close(said: float | None, real: float) -> bool:
    return said is not None and abs(said - real) <= TOLERANCE  # false for NaN


def _runs(epochs: Sequence[Epoch]) -> str:
    values, counts = torch.unique_consecutive(torch.tensor(epochs, dtype=torch.int64), return_counts=True)
    return " ".join(f"{value}x{count}" for value, count in zip(values.tolist(), counts.tolist()))
