"""The checks of samples and events of a run.  Pure functions; each problem is a line that states what and where.

Shapes: P prompt tokens, O output tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from examples.fleet.events import (
    AT_VERSION,
    COMMITTED,
    FAILED,
    FIRST_SAMPLE,
    KILLED,
    NOTICED,
    REGISTERED,
    STARTED,
    Event,
)
from examples.fleet.sample import Sample


@dataclass(frozen=True, eq=False)
class Score:
    """The scores of a sample's first tokens under weights of one version.

    `logprobs` of output tokens, as many as were scored; `rows_TLK`: experts of every token but the last of them.
    """

    logprobs: list[float | None]
    rows_TLK: np.ndarray


@dataclass(frozen=True)
class Scored:
    """Span `number` of a sample, scored under `version`: its own, or the one before."""

    sample: Sample
    number: int
    version: int
    score: Score


@dataclass
class Rescoring:
    """The result of scoring samples again.  `mixed`: spans that differ in any bit from the scores of their version.

    `distinct` of `comparable` tokens have another log-probability under the version before: they would show a mixture.
    """

    spans: int = 0
    tokens: int = 0
    mixed: list[str] = field(default_factory=list)
    distinct: int = 0
    comparable: int = 0


def lost(asked: Sequence[int], samples: Iterable[Sample]) -> list[str]:
    """Return a line for each sample that was asked for and is not there exactly once, or was never asked for."""
    counts = Counter(sample.prompt.index for sample in samples)
    wrong = sorted({index for index in {*asked, *counts} if counts[index] != 1 or index not in set(asked)})
    return [f"sample {index}: {counts[index]} answers" for index in wrong]


def malformed(sample: Sample) -> Iterator[str]:
    """Yield a line for each of log-probabilities, rows of experts and spans that do not fit the sample's tokens."""
    where, tokens = f"sample {sample.prompt.index}", len(sample.output_ids)
    rows = len(sample.prompt.token_ids) + tokens - 1
    if not 1 <= tokens <= sample.prompt.max_tokens:
        yield f"{where}: {tokens} tokens, {sample.prompt.max_tokens} at most"
    if len(sample.logprobs) != tokens:
        yield f"{where}: {tokens} tokens and {len(sample.logprobs)} log-probabilities"
    if not all(math.isfinite(logprob) and logprob <= 0 for logprob in sample.logprobs):
        yield f"{where}: log-probabilities that are none"
    if len(sample.routed_experts) != rows or not sample.routed_experts.complete:
        yield f"{where}: {len(sample.routed_experts)} rows of experts, {rows} expected"
    edges = [(0, 0), *((span.start, span.end) for span in sample.spans), (tokens, tokens)]
    if any(end != start for (_, end), (start, _) in pairwise(edges)) or any(a >= b for a, b in edges[1:-1]):
        yield f"{where}: spans {sample.spans} do not cover {tokens} tokens once"


def outdated(sample: Sample, committed: Collection[int]) -> Iterator[str]:
    """Yield versions that never were in force, that go back, or that were over when the sample was sent."""
    versions = [sample.asked_at_version, *(span.version for span in sample.spans)]
    where = f"sample {sample.prompt.index} of {sample.engine}"
    if unknown := sorted(set(versions) - set(committed)):
        yield f"{where}: versions {unknown} were never committed"
    if any(later < earlier for earlier, later in pairwise(versions)):
        yield f"{where}: sent at version {versions[0]}, sampled by {versions[1:]}"


def rescore(scored: Iterable[Scored]) -> Rescoring:
    """Compare every span with its scores."""
    result = Rescoring()
    for item in scored:
        span = item.sample.spans[item.number]
        if item.version != span.version:
            given, again = item.sample.logprobs[span.start : span.end], item.score.logprobs[span.start : span.end]
            result.distinct += sum(a != b for a, b in zip(given, again))
            result.comparable += len(given)
            continue
        result.spans += 1
        result.tokens += span.end - span.start
        if what := _difference(item.sample, item.number, item.score):
            where = f"sample {item.sample.prompt.index} of {item.sample.engine}, tokens {span.start} to {span.end}"
            result.mixed.append(f"{where}: other {what} than version {span.version} gives")
    return result


def _difference(sample: Sample, number: int, score: Score) -> str | None:
    """Name the part of a span that differs from its score; None if nothing differs.

    The forward that sampled output token j wrote the row of token P - 1 + j.  The first forward wrote all rows before
    its own, too.
    """
    span, last_of_prompt = sample.spans[number], len(sample.prompt.token_ids) - 1
    tokens = slice(span.start, span.end)
    rows = slice(last_of_prompt + span.start if span.start else 0, last_of_prompt + span.end)
    if sample.logprobs[tokens] != score.logprobs[tokens]:
        return "log-probabilities"
    if not np.array_equal(sample.routed_experts.logical_ids_TLK[rows], score.rows_TLK[rows]):
        return "experts"
    return None


def unreplaced(events: Sequence[Event], samples: Iterable[Sample]) -> list[str]:
    """Return what is wrong with the replacement of an engine that was killed."""
    killed = next((event for event in events if event.what == KILLED), None)
    if killed is None:
        return ["no engine was killed"]
    after = events[events.index(killed) :]
    if not any(event.what == NOTICED and event.engine == killed.engine for event in after):
        return [f"the kill of {killed.engine} was not noticed"]
    name = replacement_of(events)
    if name is None:
        return [f"{killed.engine} was not replaced"]
    own = [event for event in after if event.engine == name and event.what != COMMITTED]
    if [event.what for event in own] != [STARTED, AT_VERSION, REGISTERED, FIRST_SAMPLE]:
        return [f"{name}: {', then '.join(event.what for event in own)}"]
    return [*_late(after, own), *_left_behind(own, samples)]


def replacement_of(events: Sequence[Event]) -> str | None:
    """Return the engine that replaced the killed one: the first that was started after the kill and came up."""
    kills = [number for number, event in enumerate(events) if event.what == KILLED]
    failed = {event.engine for event in events if event.what == FAILED}
    starts = [event.engine for event in events[kills[0] :] if event.what == STARTED] if kills else []
    return next((name for name in starts if name not in failed), None)


def _late(after: Sequence[Event], own: Sequence[Event]) -> Iterator[str]:
    """Yield a line if the replacement was not at the version in force.

    It must be there before the router knows it, and from its first sample on.
    """
    _, ready, registered, first = own
    before = [event.version for event in after[: after.index(registered)] if event.what == COMMITTED]
    in_force = before[-1] if before else after[0].version
    if not ready.version == registered.version == in_force:
        yield f"{ready.engine} was at version {ready.version} when the router got to know it, not at {in_force}"
    if first.version is None or in_force is None or first.version < in_force:
        yield f"the first sample of {ready.engine} has version {first.version}, expected {in_force} or later"


def _left_behind(own: Sequence[Event], samples: Iterable[Sample]) -> Iterator[str]:
    name, version = own[0].engine, own[2].version
    served = {span.version for sample in samples if sample.engine == name for span in sample.spans}
    if version is None or not any(each > version for each in served):
        yield f"{name} took part in no refresh after version {version}"
