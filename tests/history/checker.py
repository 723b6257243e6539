"""Compares every number that an engine returned about a request with the reference.

A `Trace` follows one request from step to step.  It records the step that sampled each token, and the version that was
in force when each position's KV was computed.  From the engine it takes only the numbers of positions, tokens
and retractions; `Expected` states which version was in force.  So a version that the engine
names, and every number that it returns, is a claim to be checked.

A retraction gives up KV and begins a new *life* of the request.  The record keeps the rows of the first life that
computed a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from rollout.core.messages.req_output import VersionSpan
from rollout.core.specs.model_config import ModelConfig
from tests.history.actions import Dtype, Submit
from tests.history.expected import Expected, Violation
from tests.history.reference import MixedOutput, MixedReference
from tests.scheduler_harness import Result

# Two computations of one thing differ by the order of their sums; versions differ in the first digit.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
# Where two experts are closer than this, float32 may take the other one, and all later numbers differ.
CLOSEST = {"float64": 1e-13, "float32": 1e-5}


@dataclass(frozen=True)
class Sampled:
    """The origin of a token: the life, the version and the label under which it was sampled."""

    life: int
    version: int
    label: str


@dataclass
class Trace:
    """`lives[i][p]`: the version in force when life i computed position p, or found it in the prefix cache."""

    submit: Submit
    lives: list[list[int]] = field(default_factory=lambda: [[]])
    tokens: list[Sampled] = field(default_factory=list)
    is_over: bool = False  # the request had to be aborted
    streamed: list[tuple[int, str]] = field(default_factory=list)  # tokens so far, label of the last

    def advance(self, expected: Expected, retractions: int, computed: int, tokens: int) -> None:
        """Take in a step.  `computed`: positions with KV; `tokens`: tokens sampled so far."""
        while len(self.lives) <= retractions:
            self.lives.append([])
        life = self.lives[-1]
        life += [expected.current] * (computed - len(life))
        new = tokens - len(self.tokens)
        if new > 1:
            raise Violation(f"{new} tokens in one step")
        if new and expected.is_torn:
            raise Violation("a token was sampled from weights of which a part is new")
        if new and self.is_over:
            raise Violation("a token was sampled for a request that had to be aborted")
        lag = self.submit.lag
        if new and lag is not None and 0 <= lag < expected.current - min(life):
            raise Violation(f"a token was sampled on KV {expected.current - min(life)} versions old; {lag} are allowed")
        if new and expected.paused:
            raise Violation("a token was sampled while paused")
        if new:
            self.tokens.append(Sampled(len(self.lives) - 1, expected.current, expected.label))

    def abort_below(self, version: int) -> None:
        """Apply `abort_below_weight_version`: no more tokens if anything of the request is older."""
        used = [token.version for token in self.tokens] + [version for life in self.lives for version in life]
        self.is_over |= min(used, default=version) < version

    def end(self, expected: Expected, result: Result) -> None:
        """Take in the last step of a finished request."""
        record = result.finished
        assert record is not None
        computed = len(self.lives[-1]) if record.num_retractions < len(self.lives) else 0
        if record.reason.type != "abort":
            computed = len(result.prompt_ids) + max(len(result.token_ids) - 1, 0)
        self.advance(expected, record.num_retractions, computed, len(result.token_ids))


@dataclass
class Tally:
    """The numbers of checks, and of events in the histories: a checker that sees nothing finds nothing."""

    histories: int = 0
    tokens: int = 0
    on_mixed_kv: int = 0  # tokens sampled on KV of more than one version
    rows: int = 0  # rows of routes
    retractions: int = 0
    commits: int = 0
    refusals: int = 0  # weight verbs that had to be refused
    poisonings: int = 0
    undecided: int = 0  # requests whose numbers the engine's precision leaves open

    def add(self, other: Tally) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, item.name)} {item.name.replace('_', ' ')}" for item in fields(self))


class Checker:
    """Raises `Violation` for the first thing that is wrong with a finished request, its tokens first."""

    def __init__(self, config: ModelConfig, expected: Expected, dtype: Dtype) -> None:
        self._expected = expected
        self._tolerance, self._closest = TOLERANCE[dtype], CLOSEST[dtype]
        self._reference = MixedReference(config, expected.versions)  # type: ignore[arg-type]
        self.tally = Tally()

    def check(self, result: Result, trace: Trace) -> None:
        record = result.finished
        assert record is not None
        if record.reason.status_code is not None:
            return  # refused or given up with an error: there is nothing to check
        sequence = result.prompt_ids + result.token_ids
        lives = [self._forward(sequence, versions) for versions in trace.lives]
        try:
            self._check_spans(result, trace)
            self._check_kv_versions(result, trace)
            if min(life.margin for life in lives) < self._closest:
                self.tally.undecided += 1
                return
            self._check_tokens(result, trace, lives)
            self._check_prompt(result, trace, lives)
            self._check_routes(result, trace, lives)
        except Violation as violation:
            raise Violation(f"request {result.rid} ({len(result.prompt_ids)} prompt tokens): {violation}") from None
        first = len(result.prompt_ids)
        self.tally.tokens += len(trace.tokens)
        self.tally.on_mixed_kv += sum(
            len(set(trace.lives[token.life][: first + index])) > 1 for index, token in enumerate(trace.tokens)
        )
        self.tally.rows += record.routed_experts.num_rows if record.routed_experts else 0
        self.tally.retractions += record.num_retractions

    def _forward(self, sequence: list[int], versions: list[int]) -> MixedOutput:
        return self._reference.forward(sequence[: len(versions)], versions)

    def _check_spans(self, result: Result, trace: Trace) -> None:
        claimed = _labels(result.finished.weight_versions, len(result.token_ids))  # type: ignore[union-attr]
        for index, (label, token) in enumerate(zip(claimed, trace.tokens, strict=True)):
            if label != token.label:
                known = "" if label in self._expected.labels else ", which was never committed"
                raise Violation(f"token {index} is labelled {label}{known}; in force was {token.label}")
        for count, label in trace.streamed:
            if count and label != trace.tokens[count - 1].label:
                raise Violation(f"token {count - 1} was streamed as of {label}, not {trace.tokens[count - 1].label}")

    def _check_tokens(self, result: Result, trace: Trace, lives: list[MixedOutput]) -> None:
        temperature = trace.submit.temperature
        first = len(result.prompt_ids) - 1
        for index, token in enumerate(trace.tokens):
            logits = lives[token.life].logits[first + index]
            logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
            token_id, claimed = result.token_ids[index], result.logprobs[index]
            if not self._close(claimed, float(logprobs[token_id])):
                raise Violation(
                    f"token {index} has log-probability {claimed:.6f}; under {token.label}, with KV of "
                    f"{_runs(trace.lives[token.life][: first + index + 1])}, it is {float(logprobs[token_id]):.6f}; "
                    + self._explanation(result, index, temperature, claimed)
                )
            if not temperature and float(logits.max() - logits[token_id]) > self._tolerance:
                raise Violation(f"token {index} is not the most probable one")

    def _explanation(self, result: Result, index: int, temperature: float, claimed: float) -> str:
        """Return which single version, if any, would give this log-probability."""
        sequence = result.prompt_ids + result.token_ids[:index]
        for version, content in enumerate(self._expected.versions):
            if content is not None:
                logits = self._forward(sequence, [version] * len(sequence)).logits[-1] / (temperature or 1.0)
                if self._close(claimed, float(logits.log_softmax(-1)[result.token_ids[index]])):
                    return f"version {version} alone would give it"
        return "no committed version gives it"

    def _check_prompt(self, result: Result, trace: Trace, lives: list[MixedOutput]) -> None:
        scores = result.finished.prompt_logprobs  # type: ignore[union-attr]
        if scores is None:
            return
        temperature = trace.submit.temperature or 1.0
        for position, claimed in enumerate(scores.values[1:], start=scores.start):
            logits = lives[trace_life(trace, position)].logits[position] / temperature
            real = float(logits.log_softmax(-1)[result.prompt_ids[position + 1]])
            if claimed is None or not self._close(claimed, real):
                raise Violation(f"prompt token {position + 1} has log-probability {claimed}, not {real:.6f}")

    def _check_kv_versions(self, result: Result, trace: Trace) -> None:
        record = result.finished
        assert record is not None
        *earlier, last = trace.lives
        given_up = next((life for life in reversed(earlier) if life), [])
        expected = (last + given_up[len(last) :])[: len(result.prompt_ids)]
        self._same_versions("the prompt's KV", record.prefill_weight_versions, expected)
        everything = [version for life in trace.lives for version in life]
        oldest = record.kv_weight_version_oldest
        if (oldest is None) != (not everything) or (oldest and not self._expected.is_name(oldest, min(everything))):
            raise Violation(f"the oldest KV is labelled {oldest}; it is of {min(everything, default=None)}")

    def _check_routes(self, result: Result, trace: Trace, lives: list[MixedOutput]) -> None:
        payload = result.finished.routed_experts  # type: ignore[union-attr]
        if payload is None:
            raise Violation("routes were asked for and did not come")
        num_rows = min(max(map(len, trace.lives)), max(len(result.prompt_ids) + len(result.token_ids) - 1, 0))
        if payload.num_rows != num_rows:
            raise Violation(f"{payload.num_rows} rows of routes, {num_rows} were computed")
        rows = result.routes
        owners = [trace_life(trace, position) for position in range(num_rows)]
        for position, owner in enumerate(owners):
            if not np.array_equal(rows[position], lives[owner].routes[position].numpy()):
                version = trace.lives[owner][position]
                raise Violation(f"row {position} of the routes is not the router's choice under version {version}")
        self._same_versions("routes", payload.versions, [trace.lives[o][p] for p, o in enumerate(owners)])

    def _close(self, a: float, b: float) -> bool:
        return abs(a - b) <= self._tolerance  # false for NaN

    def _same_versions(self, what: str, spans: Sequence[VersionSpan], versions: Sequence[int]) -> None:
        claimed = _labels(spans, len(versions))
        for place, (label, version) in enumerate(zip(claimed, versions, strict=True)):
            if not self._expected.is_name(label, version):
                raise Violation(f"{what}: place {place} is labelled {label}; all are of {_runs(versions)}")


def trace_life(trace: Trace, position: int) -> int:
    """Return the first life that computed a position: the record keeps its row."""
    return next(index for index, life in enumerate(trace.lives) if len(life) > position)


def _labels(spans: Sequence[VersionSpan], count: int) -> list[str]:
    """Return the label of each place; the spans must cover `0 .. count - 1` without gap or overlap."""
    labels: list[str] = []
    for span in spans:
        if span.start != len(labels) or span.end <= span.start:
            raise Violation(f"spans {[(s.version, s.start, s.end) for s in spans]} do not follow one another")
        labels += [span.version] * (span.end - span.start)
    if len(labels) != count:
        raise Violation(f"spans {[(s.version, s.start, s.end) for s in spans]} do not cover {count} places")
    return labels


def _runs(versions: Sequence[int]) -> str:
    """Describe versions by their runs: `[0, 0, 0, 2]` becomes `version 0 (3), version 2 (1)`."""
    values, counts = torch.unique_consecutive(torch.tensor(versions, dtype=torch.int64), return_counts=True)
    return ", ".join(f"version {v} ({n})" for v, n in zip(values.tolist(), counts.tolist())) or "nothing"
