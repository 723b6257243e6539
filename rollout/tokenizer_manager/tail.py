"""Tails: the part of a sample from a token on, as an answer of its own, for streams that send each token once.

tokens     0 .. first - 1   | first .. now
answer     sent before      | text, ids, log-probabilities, masks, versions and routes of these tokens alone
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.core.messages.req_output import FinishedRecord
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.response import OutputEntries, ResponseForm, build_response
from rollout.tokenizer_manager.sample import AlternativesBuffer, MaskRecord, SampleRecord
from rollout.tokenizer_manager.sample_text import SampleText
from rollout.tokenizer_manager.streamed_rows import routes_from, spans_from


class Place:
    """The place of a reader in one sample: the tokens and the characters that it has."""

    def __init__(self, record: SampleRecord, tokenizer: Tokenizer | None, form: ResponseForm, first: int) -> None:
        """Begin at token `first`, which may be the next one."""
        self._record = record
        self._form = form
        self._num_tokens = first
        self._num_chars: int | None = None if first else 0
        self._text = None if tokenizer is None else SampleText(record, tokenizer, form.kept_ids)

    def response(self) -> dict[str, Any]:
        """Return the answer for the tokens that are new, and move on to their end."""
        text, first = None, self._num_tokens
        if self._text is not None:
            if self._num_chars is None:
                self._num_chars = self._text.begin_at(first)
            whole = self._text.update()
            text, self._num_chars = whole[self._num_chars :], len(whole)
        part = tail_of(self._record, first)
        self._num_tokens = part.num_tokens
        return _response(self._record, part, text, self._form)


def tail_of(record: SampleRecord, first: int) -> SampleRecord:
    """Return a record of the tokens from `first` on.  Its versions are spans over all tokens of the output."""
    part = SampleRecord(record.source, record.created_at, record.weight_version)
    part.num_before = first
    part.output_ids, part.output_logprobs = record.output_ids[first:], record.output_logprobs[first:]
    part.output_alternatives = _alternatives_from(record.output_alternatives, first)
    part.output_mask = _masks_from(record.output_mask, first)
    part.adapter = record.adapter
    part.first_token_at, part.finished_at = record.first_token_at, record.finished_at
    position = len(record.prompt_ids) + first - 1 if first else 0
    if record.finished is not None:
        part.finished = _finished_from(record.finished, first, position)
    elif record.rows is not None:
        part.rows = record.rows.since(first, position)
    return part


def _finished_from(finished: FinishedRecord, first: int, position: int) -> FinishedRecord:
    return msgspec.structs.replace(
        finished,
        weight_versions=spans_from(finished.weight_versions, first),
        routed_experts=routes_from(finished.routed_experts, position),
    )


def _alternatives_from(buffer: AlternativesBuffer, first: int) -> AlternativesBuffer:
    part = AlternativesBuffer(buffer.num_top, buffer.num_chosen, buffer.dtype)
    top, chosen = first * buffer.num_top, first * buffer.num_chosen
    item = 8 if buffer.dtype == "float64" else 4
    part.top_logprobs = buffer.top_logprobs[top * item :]
    part.top_ids = buffer.top_ids[top * 4 :]
    part.chosen_logprobs = buffer.chosen_logprobs[chosen * item :]
    return part


def _masks_from(masks: MaskRecord, first: int) -> MaskRecord:
    sent = 4 * sum(masks.counts[:first])
    return MaskRecord(masks.counts[first:], masks.token_ids[sent:], masks.logprobs[first:], masks.kept_logprobs[sent:])


def _response(record: SampleRecord, part: SampleRecord, text: str | None, form: ResponseForm) -> dict[str, Any]:
    response = build_response(part, text, form, OutputEntries())
    meta = response["meta_info"]
    meta["output_start"] = part.num_before
    if record.finished is not None and (spans := record.finished.weight_versions):
        meta["weight_version"] = meta["weight_version_end"] = spans[-1].version
        meta["weight_version_start"] = spans[0].version
    return response
