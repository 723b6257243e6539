"""The claims of one sample: its tokens, their log-probabilities, their experts, and the weights behind each of them.

The client's own reader parses an answer of /generate and checks its form.

Shapes: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rollout.client import generation
from rollout.client.types import GenerationOutput

Epoch = int


class Violation(AssertionError):
    """An answer that is not as promised."""


@dataclass(frozen=True)
class Span:
    """The answer claims this label for the places `start .. end - 1`, and this epoch if it names one."""

    label: str
    epoch: Epoch | None
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """`rows` [T, L, K] are the experts of the first tokens; `params` are as they were sent.

    The spans name the weights of the tokens, the prompt's KV, the rows and the prompt's log-probabilities.
    """

    rid: str
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float | None]
    rows: np.ndarray
    token_spans: tuple[Span, ...]
    prompt_spans: tuple[Span, ...]
    row_spans: tuple[Span, ...]
    scored_spans: tuple[Span, ...]
    oldest: Span | None
    finish: str
    retractions: int
    cached: int
    seed: int
    params: Mapping[str, Any]
    lag: int = -1
    key: str | None = None

    @property
    def sequence(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def question(self) -> bytes:
        """Return a key that is equal for samples whose common part must be equal under the same weights."""
        facts = {name: value for name, value in self.params.items() if name not in ("n", "max_new_tokens", "seed")}
        return hashlib.sha256(msgspec.json.encode([self.prompt_ids, self.seed, sorted(facts.items())])).digest()


def samples_of(body: Mapping[str, Any], answer: bytes) -> list[Sample]:
    """Return every sample of an answer of /generate to a body of one prompt.  Raises `Violation`."""
    try:
        outputs = generation.parse_answer(msgspec.json.decode(answer), body, None)
    except Exception as error:
        raise Violation(f"request {body.get('rid')}: {error}") from error
    several = outputs if isinstance(outputs, list) else [outputs]
    return [_sample(body, output, number) for number, output in enumerate(several)]


def _sample(body: Mapping[str, Any], output: GenerationOutput, number: int) -> Sample:
    meta, params = output.meta_info, body["sampling_params"]
    routed, oldest = output.routed_experts, meta["kv_weight_version_oldest"]
    if routed is None or not routed.complete:
        raise Violation(f"request {output.rid}: rows of routed experts are missing")
    if output.finish_reason is None:
        raise Violation(f"request {output.rid}: the answer has no end")
    return Sample(
        rid=output.rid,
        prompt_ids=list(body["input_ids"]),
        output_ids=output.output_ids,
        logprobs=output.logprobs or [],
        prompt_logprobs=[entry.logprob for entry in output.prompt_logprobs or []],
        rows=np.asarray(routed.logical_ids_TLK).astype(np.int64),
        token_spans=_spans(meta["weight_versions"]),
        prompt_spans=_spans(meta["prefill_weight_versions"]),
        row_spans=tuple(Span(label, None, start, end) for label, start, end in routed.weight_versions),
        scored_spans=_spans(meta.get("input_logprob_weight_versions", ())),
        oldest=None if oldest is None else Span(oldest, meta.get("kv_weight_epoch_oldest"), 0, 1),
        finish=output.finish_reason.type,
        retractions=meta["num_retractions"],
        cached=output.cached_tokens or 0,
        seed=params["seed"] + number,
        params=params,
        lag=body.get("max_kv_version_lag", -1),
        key=body.get("extra_key"),
    )


def _spans(said: Sequence[Mapping[str, Any]]) -> tuple[Span, ...]:
    return tuple(Span(span["version"], span.get("weight_epoch"), span["start"], span["end"]) for span in said)


def places(spans: Sequence[Span], count: int, what: str) -> list[Span]:
    """Return the span of each place; they must cover `0 .. count - 1` without gap or overlap.  Raises `Violation`."""
    found: list[Span] = []
    for span in spans:
        if span.start != len(found) or span.end <= span.start:
            raise Violation(f"the spans of {what} do not follow one another: {spans}")
        found += [span] * (span.end - span.start)
    if len(found) != count:
        raise Violation(f"the spans of {what} do not cover {count} places: {spans}")
    return found
