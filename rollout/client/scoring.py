"""`score`: log-probabilities of given sequences, as arrays.

A call of /generate that generates nothing, with log-probabilities in their compact form.

Shapes: T scored tokens of a sequence, K likeliest ones at each place, C chosen ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capture.errors import CaptureError
from capture.routed_experts import RoutedExperts
from rollout.client import generation
from rollout.client.errors import ResponseFormatError, ServerError
from rollout.client.method import method
from rollout.client.retries import repeated
from rollout.client.types import GenerateOptions, GenerationOutput, RouteLayout, VersionSpan
from rollout.client.wire import Steps
from rollout.core.errors import BadRequest

MAX_ENTRIES = 1 << 22
"""Likely and chosen tokens in one call, whose answer has 6 or 8 bytes for each."""
MAX_TOKENS = 1 << 19
"""Tokens in one call, whose body has some 7 bytes for each."""


@dataclass(frozen=True, eq=False)
class ScoredSequence:
    """The scores of a sequence's tokens from position `start` on: row t belongs to token `start + t`.

    `logprobs` [T], `top_logprobs` and `top_ids` [T, K], best first, `chosen_logprobs` [T, C].  float32, or float64 from
    an engine that computes in it; ids are uint16 up to a vocabulary of 65536 tokens, else int32.  The arrays cannot be
    written to.  `weight_versions` are spans over the rows: the weights that computed them.
    """

    start: int
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    chosen_logprobs: np.ndarray
    weight_versions: list[VersionSpan]
    routed_experts: RoutedExperts | None = None
    meta_info: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.logprobs)


class ScoreCalls:
    """The call of all clients that scores sequences."""

    _layout: RouteLayout | None
    _retry_s: float

    @method
    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        start: int | Sequence[int] = 1,
        top_k: int = 0,
        temperature: float = 1.0,
        token_ids_logprob: Sequence[int] = (),
        return_routed_experts: bool = False,
        replay_routed_experts: Sequence[RoutedExperts | None] | None = None,
        concurrency: int = 64,
        timeout: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Steps[list[ScoredSequence]]:
        """Score each token of each sequence, given the tokens before it, in the order of `sequences`.

        `start`: position of the first token to score, one for all or one each; nothing predicts the token at 0.
        `top_k`: likeliest tokens at each place; the server takes up to 1024.  `temperature`: of the distribution.
        `token_ids_logprob`: further ids whose log-probabilities are wanted at every place.  `replay_routed_experts`:
        one each, in place of the routers' choices.  `concurrency`: sequences that are on their way at once; fewer where
        their answers would be large.  `timeout` is for each call, `extra_body` has further fields of it.

        Raises `BadRequest` for invalid arguments; `ServerError` where the server refuses, or aborts a sequence;
        `ResponseFormatError` for an answer that does not belong to its sequence.
        """
        ids: list[list[int]] = generation.plain_ids(sequences)
        if not all(isinstance(each, list) for each in ids):
            raise BadRequest("score takes a list of sequences of token ids")
        if concurrency < 1:
            raise BadRequest(f"concurrency must be at least 1, got {concurrency}")
        starts = _starts(start, ids)
        if replay_routed_experts is not None and len(replay_routed_experts) != len(ids):
            raise BadRequest(f"replay_routed_experts has {len(replay_routed_experts)} entries for {len(ids)} sequences")
        options: GenerateOptions = {
            "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
            "return_logprob": True,
            "logprobs_format": "compact",
            "top_logprobs_num": top_k,
            "return_routed_experts": return_routed_experts,
            "extra_body": dict(extra_body or {}),
        }
        if len(token_ids_logprob):
            options["token_ids_logprob"] = generation.plain_ids(token_ids_logprob)
        if timeout is not None:
            options["timeout"] = timeout
        results: list[ScoredSequence] = []
        for group in _groups(ids, starts, top_k + len(token_ids_logprob), concurrency):
            options["input_ids"] = ids[group]
            options["extra_body"] = dict(extra_body or {}) | {"logprob_start_len": [at - 1 for at in starts[group]]}
            if replay_routed_experts is not None:
                options["replay_routed_experts"] = list(replay_routed_experts[group])
            call = generation.generate(None, options, self._layout)
            outputs = yield from repeated(call, self._retry_s)
            assert isinstance(outputs, list), "a batch"
            results += map(_scored, outputs, ids[group], starts[group], [top_k] * len(outputs))
        return results


def _starts(start: int | Sequence[int], ids: Sequence[Sequence[int]]) -> list[int]:
    starts = [start] * len(ids) if isinstance(start, int) else generation.plain_ids(start)
    if len(starts) != len(ids):
        raise BadRequest(f"start has {len(starts)} entries for {len(ids)} sequences")
    for index, (at, sequence) in enumerate(zip(starts, ids, strict=True)):
        if not 1 <= at <= len(sequence):
            raise BadRequest(f"sequence {index}: start must be in 1..{len(sequence)} (its length), got {at}")
    return starts


def _groups(ids: Sequence[Sequence[int]], starts: Sequence[int], width: int, concurrency: int) -> Iterator[slice]:
    """Yield the ranges of neighbouring sequences for one call each: at most `concurrency`, with limited answers."""
    first = entries = tokens = 0
    for index, (sequence, start) in enumerate(zip(ids, starts, strict=True)):
        own = (len(sequence) - start) * width
        is_full = entries + own > MAX_ENTRIES or tokens + len(sequence) > MAX_TOKENS
        if index > first and (index - first == concurrency or is_full):
            yield slice(first, index)
            first, entries, tokens = index, 0, 0
        entries += own
        tokens += len(sequence)
    if first < len(ids):
        yield slice(first, len(ids))


def _scored(output: GenerationOutput, sequence: Sequence[int], start: int, top_k: int) -> ScoredSequence:
    reason, rows = output.finish_reason, output.prompt_logprob_arrays
    if reason is not None and reason.type == "abort":
        raise ServerError(reason.status_code or 503, f"request {output.rid} was aborted: {reason.message}")
    if rows is None:
        raise ResponseFormatError(f"request {output.rid}: the answer has no log-probabilities in the compact form")
    try:
        rows.require(sequence[start:], start)
    except CaptureError as error:
        raise ResponseFormatError(f"request {output.rid}: {error}") from None
    if rows.top_ids.shape[1] != top_k:
        raise ResponseFormatError(
            f"request {output.rid}: {rows.top_ids.shape[1]} top tokens at each position, expected {top_k}"
        )
    return ScoredSequence(
        start,
        rows.logprobs,
        rows.top_ids,
        rows.top_logprobs,
        rows.chosen_logprobs,
        output.prompt_logprob_versions,
        output.routed_experts,
        output.meta_info,
    )
