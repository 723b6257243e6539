"""A sample's log-probabilities as `TokenLogprobs`, whose compact form an answer can hold instead of nested lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capture.token_logprobs import TokenLogprobs, token_id_dtype
from rollout.core.messages.req_output import PromptLogprobs, VersionSpan
from rollout.tokenizer_manager.sample import AlternativeArrays, SampleRecord, message_arrays


def output_logprobs(record: SampleRecord, vocab_size: int) -> TokenLogprobs:
    """Return the columns of the tokens sampled so far; the first of them follows the prompt."""
    arrays = record.output_alternatives.arrays(len(record.output_ids))
    first = len(record.prompt_ids) + record.num_before
    return _columns(record, record.output_ids, record.output_logprobs, arrays, first, vocab_size)


def prompt_logprobs(record: SampleRecord, prompt: PromptLogprobs, vocab_size: int) -> TokenLogprobs:
    """Return the columns of the prompt's tokens, from `prompt.start` on, without the first: nothing predicts it."""
    first, values = prompt.start + 1, prompt.values[1:]
    source = record.source
    num_chosen = len(source.token_ids_logprob or ())
    arrays = message_arrays(prompt.alternatives, len(values), source.top_logprobs_num, num_chosen)
    return _columns(record, record.prompt_ids[first : first + len(values)], values, arrays, first, vocab_size)


def row_spans(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Return spans over the entries of a prompt as spans over the rows of `prompt_logprobs`."""
    return [VersionSpan(span.version, span.start - 1, span.end - 1, span.weight_epoch) for span in spans]


def _columns(
    record: SampleRecord,
    token_ids: Sequence[int],
    values: Sequence[float | None],
    arrays: AlternativeArrays,
    start: int,
    vocab_size: int,
) -> TokenLogprobs:
    logprobs = np.array(values, dtype=np.float64)
    if arrays.top_logprobs.dtype.itemsize != 8 and _fits_float32(logprobs):
        logprobs = logprobs.astype(np.float32)
    id_dtype = token_id_dtype(vocab_size)
    return TokenLogprobs(
        token_ids=np.array(token_ids, dtype=id_dtype),
        logprobs=logprobs,
        top_ids=arrays.top_ids.astype(id_dtype),
        top_logprobs=arrays.top_logprobs.astype(logprobs.dtype, copy=False),
        chosen_ids=np.array(record.source.token_ids_logprob or (), dtype=id_dtype),
        chosen_logprobs=arrays.chosen_logprobs.astype(logprobs.dtype, copy=False),
        vocab_size=vocab_size,
        start=start,
    )


def _fits_float32(values: np.ndarray) -> bool:
    """Return False for log-probabilities of a model that computes in float64, which would lose bits."""
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(np.float32), values, equal_nan=True)
