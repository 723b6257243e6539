"""A sample's record as the JSON-like response of /generate: `{"text", "output_ids", "meta_info"}`.

Names and layouts of `meta_info` are SGLang's.  These are pure functions over plain data, so that the in-process engine
uses them too.

A log-probability entry is `[log-probability or None, token id, text or None]`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from capture.codec import encode_compact, encode_compatible, encode_dict, encode_npy, encode_packed
from capture.routed_experts import RoutedExperts, id_dtype, narrowest_dtype
from capture.sampling_mask import SamplingMask
from capture.token_logprobs import TokenLogprobs
from rollout.core.errors import LockstepError
from rollout.core.messages.req_output import DraftTally, FinishedRecord, FinishReason, RoutedExpertsPayload, VersionSpan
from rollout.core.specs.model_config import ModelConfig
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.binary_response import add_logprob_arrays, id_array, route_array
from rollout.tokenizer_manager.compact_logprobs import output_logprobs, prompt_logprobs, row_spans
from rollout.tokenizer_manager.hidden_response import add_hidden_states
from rollout.tokenizer_manager.request import GenerateReqInput, HiddenForm, LogprobsFormat, MaskFormat, RoutesFormat
from rollout.tokenizer_manager.sample import AlternativeArrays, MaskRecord, SampleRecord, message_arrays

HEAVY = 4096
"""Weight from which on a response is built off the event loop: some milliseconds of work."""
HEAVY_JSON = 1 << 15
"""Weight from which on a response that is built already becomes JSON off the event loop."""

TokenText = Callable[[int], str]
Entry = list[Any]

_ROUTE_ENCODERS: dict[str, Callable[[RoutedExperts], Any]] = {
    "compatible": encode_compatible,
    "compact": lambda routed: base64.b64encode(encode_compact(routed)).decode("ascii"),
    "npy": encode_npy,
    "dict": encode_dict,
    "packed": encode_packed,
}


@dataclass(frozen=True)
class RouteShape:
    """The shape of a model's routed experts."""

    num_experts: int
    top_k: int
    moe_layer_ids: tuple[int, ...]
    num_hidden_layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> RouteShape:
        return cls(config.num_experts, config.num_experts_per_tok, config.moe_layer_ids, config.num_hidden_layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows as they are recorded; 0 for a dense model."""
        ids = len(self.moe_layer_ids) * self.top_k
        return ids * id_dtype(self.num_experts).itemsize if ids else 0

    def encoded_bytes(self, routes_format: RoutesFormat) -> int:
        """Return the bytes of one token's rows in an answer."""
        every = self.num_hidden_layers * self.top_k
        size = {"compatible": 4 * every, "compact": self.token_bytes}.get(routes_format)
        if size is None:
            size = every * max(1, narrowest_dtype(self.num_experts).itemsize)
        return -(-size * 4 // 3)


@dataclass(frozen=True)
class ResponseForm:
    """The choices of a request that hold for all of its responses.

    `token_text` gives the text of a token id for log-probability entries; None leaves it out.  `kept_ids` are special
    tokens that the text holds also where others are skipped.
    """

    route_shape: RouteShape
    routes_format: RoutesFormat = "compatible"
    token_text: TokenText | None = None
    has_prompt_ids: bool = False
    mask_format: MaskFormat = "lists"
    logprobs_format: LogprobsFormat = "nested"
    vocab_size: int = 1 << 31  # of the compact form
    kept_ids: frozenset[int] = frozenset()
    ignored_fields: Sequence[str] = ()  # the unknown ones of the request
    is_binary: bool = False  # msgpack with arrays, see `binary_response`
    hidden_form: HiddenForm = "rows"
    hidden: frozenset[str] = frozenset()  # "logprobs" or "routes" that the record has and the answer has not

    @classmethod
    def of(
        cls,
        request: GenerateReqInput,
        route_shape: RouteShape,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        ignored_fields: Sequence[str],
    ) -> ResponseForm:
        """Return the choices of a request."""
        return cls(
            route_shape=route_shape,
            routes_format=request.routed_experts_format,
            token_text=tokenizer.token_text if tokenizer is not None and request.return_text_in_logprobs else None,
            has_prompt_ids=request.return_prompt_token_ids,
            mask_format=request.sampling_mask_format,
            logprobs_format=request.logprobs_format,
            vocab_size=vocab_size,
            kept_ids=frozenset() if tokenizer is None else tokenizer.vocabulary.ids_of(request.kept_special_tokens),
            ignored_fields=ignored_fields,
            is_binary=request.is_binary,
            hidden_form=request.hidden_form,
            hidden=request.hidden,
        )


@dataclass
class OutputEntries:
    """Entries of the output tokens, made once each: the responses of a stream are cumulative."""

    sampled: list[Entry] = field(default_factory=list)
    top: list[list[Entry]] = field(default_factory=list)
    chosen: list[list[Entry]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)

    def extend(self, record: SampleRecord, text_of: TokenText | None) -> None:
        """Take in the tokens that are new."""
        first, source = len(self.sampled), record.source
        self.sampled += _entries(record.output_logprobs[first:], record.output_ids[first:], text_of)
        if source.top_logprobs_num or source.token_ids_logprob:
            arrays = record.output_alternatives.arrays(len(record.output_ids), first)
            self.top += _top_entries(arrays, text_of)
            self.chosen += _chosen_entries(arrays, source.token_ids_logprob or (), text_of)

    def extend_mask(self, mask: MaskRecord) -> None:
        """Take in the masks of the tokens that are new."""
        first = len(self.kept)
        ids = np.frombuffer(bytes(mask.token_ids), dtype="<i4")[sum(mask.counts[:first]) :]
        ends = np.cumsum(mask.counts[first:])
        self.kept += [part.tolist() for part in np.split(ids, ends[:-1])] if len(ends) else []


def build_response(
    record: SampleRecord, text: str | None, form: ResponseForm, entries: OutputEntries
) -> dict[str, Any]:
    """Return the response of `record` as it stands; `text` None leaves the key out (a server without a tokenizer).

    `entries` are the record's own.
    """
    response: dict[str, Any] = {} if text is None else {"text": text}
    # Copies: the record grows while an earlier response of a stream is still being sent.
    response["output_ids"] = id_array(record.output_ids) if form.is_binary else list(record.output_ids)
    if form.has_prompt_ids:
        response["prompt_token_ids"] = id_array(record.prompt_ids) if form.is_binary else record.prompt_ids
    response["meta_info"] = build_meta_info(record, form, entries)
    return response


def weight(record: SampleRecord) -> int:
    """Return the size of the response: its tokens, their entries, and the bytes of routes and hidden states over 16."""
    source, finished = record.source, record.finished
    entries = 1 + source.top_logprobs_num + len(source.token_ids_logprob or ()) if source.return_logprob else 0
    total = len(record.output_ids) * (1 + entries)
    total += len(record.output_mask.token_ids) // 16
    if finished is not None:
        total += len(finished.prompt_logprobs.values) * entries if finished.prompt_logprobs is not None else 0
        total += len(finished.routed_experts.data) // 16 if finished.routed_experts is not None else 0
        total += len(finished.hidden_states.data) // 16 if finished.hidden_states is not None else 0
    return total


def build_meta_info(record: SampleRecord, form: ResponseForm, entries: OutputEntries) -> dict[str, Any]:
    """Return `meta_info`: the counters always, the rest as the request asked and as far as the sample has come."""
    finished = record.finished
    meta: dict[str, Any] = {
        "id": record.rid,
        "finish_reason": None if finished is None else finish_reason_dict(finished.reason),
        "prompt_tokens": len(record.prompt_ids),
        "completion_tokens": record.num_tokens,
        "weight_version": record.weight_version,
        "dp_rank": record.dp_rank,
    }
    if record.adapter is not None:
        meta["adapter"] = msgspec.structs.asdict(record.adapter)
    if form.ignored_fields:
        meta["ignored_fields"] = list(form.ignored_fields)
    if record.session_id is not None:
        meta["session_id"] = record.session_id
    if record.source.return_logprob and "logprobs" not in form.hidden:
        if form.logprobs_format == "compact":
            _add_compact_logprobs(meta, record, form)
        elif form.is_binary and form.token_text is None:
            add_logprob_arrays(meta, record)
            _add_input_versions(meta, record)
        else:
            entries.extend(record, form.token_text)
            _add_output_logprobs(meta, record, entries)
            _add_input_logprobs(meta, record, form.token_text)
    if record.source.return_sampling_mask:
        _add_mask(meta, record, form.mask_format, entries)
    if finished is not None:
        _add_finished(meta, record, finished)
        if record.source.return_routed_experts and "routes" not in form.hidden:
            payload = finished.routed_experts or _no_rows(record, finished, form.route_shape)
            _add_routes(meta, payload, form)
        if record.source.hidden_states is not None:
            add_hidden_states(meta, record, finished, form.hidden_form, is_binary=form.is_binary)
    elif record.rows is not None:
        meta["weight_versions"] = _span_dicts(record.rows.versions)
        if (routes := record.rows.routes) is not None:
            _add_routes(meta, routes, form)
    return meta


def finish_reason_dict(reason: FinishReason) -> dict[str, Any]:
    """Return SGLang's form: `stop` has `matched`, `length` has `length`, `abort` has `message` and `status_code`."""
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    return {"type": "abort", "message": reason.message or "Aborted", "status_code": reason.status_code}


def _add_finished(meta: dict[str, Any], record: SampleRecord, finished: FinishedRecord) -> None:
    spans = finished.weight_versions
    if spans:
        meta["weight_version"] = spans[-1].version
    meta["weight_versions"] = _span_dicts(spans)
    meta["weight_version_start"] = spans[0].version if spans else record.weight_version
    meta["weight_version_end"] = meta["weight_version"]
    meta["prefill_weight_versions"] = _span_dicts(finished.prefill_weight_versions)
    meta["kv_weight_version_oldest"] = finished.kv_weight_version_oldest
    meta["kv_weight_epoch_oldest"] = finished.kv_weight_epoch_oldest
    meta["cached_tokens"] = finished.cached_tokens
    meta["num_retractions"] = finished.num_retractions
    if finished.drafts is not None:
        meta |= _draft_facts(finished.drafts, record.num_tokens)
    assert record.finished_at is not None
    meta["e2e_latency"] = record.finished_at - record.created_at


def _draft_facts(drafts: DraftTally, num_tokens: int) -> dict[str, Any]:
    """Return SGLang's fields: the length is of tokens for each step that gave some, with a draft or without."""
    return {
        "spec_verify_ct": drafts.num_steps,
        "spec_draft_token_num": drafts.num_drafted,
        "spec_accept_token_num": drafts.num_kept,
        "spec_accept_rate": drafts.num_kept / drafts.num_drafted,
        "spec_accept_length": num_tokens / max(num_tokens - drafts.num_kept, 1),
        "spec_accept_histogram": drafts.steps_by_kept,
    }


def _span_dicts(spans: Sequence[VersionSpan]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(span) for span in spans]


def _add_output_logprobs(meta: dict[str, Any], record: SampleRecord, entries: OutputEntries) -> None:
    meta["output_token_logprobs"] = list(entries.sampled)  # copies, like the ids
    meta["output_token_logprobs_length"] = len(entries.sampled)
    if record.source.top_logprobs_num:
        meta["output_top_logprobs"] = list(entries.top)
    if record.source.token_ids_logprob:
        meta["output_token_ids_logprobs"] = list(entries.chosen)


def _add_input_logprobs(meta: dict[str, Any], record: SampleRecord, text_of: TokenText | None) -> None:
    prompt = record.finished.prompt_logprobs if record.finished is not None else None
    source = record.source
    if prompt is None:
        meta["input_token_logprobs"] = []
        meta["input_logprob_weight_versions"] = []
        if source.top_logprobs_num:
            meta["input_top_logprobs"] = []
        if source.token_ids_logprob:
            meta["input_token_ids_logprobs"] = []
        return
    ids = record.prompt_ids[prompt.start : prompt.start + len(prompt.values)]  # an abort may have come before the rest
    meta["input_token_logprobs"] = _entries(prompt.values, ids, text_of)
    meta["input_logprob_weight_versions"] = _span_dicts(prompt.versions)
    chosen_ids = source.token_ids_logprob or ()
    arrays = message_arrays(prompt.alternatives, len(prompt.values) - 1, source.top_logprobs_num, len(chosen_ids))
    if source.top_logprobs_num:
        meta["input_top_logprobs"] = [None, *_top_entries(arrays, text_of)]
    if chosen_ids:
        meta["input_token_ids_logprobs"] = [None, *_chosen_entries(arrays, chosen_ids, text_of)]


def _add_input_versions(meta: dict[str, Any], record: SampleRecord) -> None:
    prompt = None if record.finished is None else record.finished.prompt_logprobs
    meta["input_logprob_weight_versions"] = [] if prompt is None else _span_dicts(prompt.versions)


def _add_compact_logprobs(meta: dict[str, Any], record: SampleRecord, form: ResponseForm) -> None:
    prompt = record.finished.prompt_logprobs if record.finished is not None else None
    encode = TokenLogprobs.encode if form.is_binary else TokenLogprobs.encode_text
    meta["logprobs_format"] = "compact"
    meta["output_logprobs"] = encode(output_logprobs(record, form.vocab_size))
    meta["output_token_logprobs_length"] = len(record.output_logprobs)
    meta["input_logprobs"] = None if prompt is None else encode(prompt_logprobs(record, prompt, form.vocab_size))
    meta["input_logprob_weight_versions"] = [] if prompt is None else _span_dicts(row_spans(prompt.versions))


def _entries(values: Sequence[float | None], ids: Sequence[int], text_of: TokenText | None) -> list[Entry]:
    if text_of is None:
        return [[value, token_id, None] for value, token_id in zip(values, ids, strict=True)]
    return [[value, token_id, text_of(token_id)] for value, token_id in zip(values, ids, strict=True)]


def _top_entries(arrays: AlternativeArrays, text_of: TokenText | None) -> list[list[Entry]]:
    rows = zip(arrays.top_logprobs.tolist(), arrays.top_ids.tolist(), strict=True)
    return [_entries(values, ids, text_of) for values, ids in rows]


def _chosen_entries(arrays: AlternativeArrays, ids: Sequence[int], text_of: TokenText | None) -> list[list[Entry]]:
    return [_entries(values, ids, text_of) for values in arrays.chosen_logprobs.tolist()]


def _add_mask(meta: dict[str, Any], record: SampleRecord, mask_format: MaskFormat, entries: OutputEntries) -> None:
    """Add the masks of all tokens: SGLang's lists, columns in base64, or slime's names for the same."""
    mask = record.output_mask
    if mask_format == "lists":
        entries.extend_mask(mask)
        meta["output_token_sampling_mask"] = list(entries.kept)
    else:
        ids, offsets = sampling_mask_of(mask).encode_csr()
        if mask_format == "slime":
            meta["top_p_token_ids"], meta["top_p_token_offsets"] = ids, offsets
        else:
            meta["output_token_sampling_mask"] = {"token_ids": ids, "offsets": offsets}
    meta["output_token_sampling_mask_length"] = len(mask.counts)
    if record.source.sampling_logprobs_mode == "selected":
        meta["output_token_sampling_logprobs"] = list(mask.logprobs)
    else:
        values = np.frombuffer(bytes(mask.kept_logprobs), dtype="<f4")
        parts = np.split(values, np.cumsum(mask.counts)[:-1]) if mask.counts else []
        meta["output_token_sampling_logprobs"] = [part.tolist() for part in parts]


def sampling_mask_of(mask: MaskRecord) -> SamplingMask:
    """Return the typed record, checked."""
    ids = np.frombuffer(bytes(mask.token_ids), dtype="<i4").astype(np.int32, copy=False)
    return SamplingMask(ids, np.cumsum([0, *mask.counts], dtype=np.int64))


def _add_routes(meta: dict[str, Any], payload: RoutedExpertsPayload, form: ResponseForm) -> None:
    shape, routed = form.route_shape, routed_experts_of(payload, form.route_shape)
    if form.is_binary:
        facts = {"num_experts": shape.num_experts, "moe_layer_ids": shape.moe_layer_ids}
        facts |= {"num_hidden_layers": shape.num_hidden_layers, "weight_versions": _span_dicts(payload.versions)}
        meta["routed_experts"] = route_array(payload, len(shape.moe_layer_ids), shape.top_k) | facts
    else:
        meta["routed_experts"] = _ROUTE_ENCODERS[form.routes_format](routed)
        if form.routes_format != "compatible":
            meta["routed_experts_format"] = form.routes_format
    meta["routed_experts_start_len"] = payload.start


def _no_rows(record: SampleRecord, finished: FinishedRecord, shape: RouteShape) -> RoutedExpertsPayload:
    """Return an empty record: only a request that was aborted before its first forward has no rows."""
    if finished.reason.type != "abort":
        raise LockstepError(f"request {record.rid}: its routed experts did not arrive")
    return RoutedExpertsPayload(
        data=b"",
        dtype="uint8" if id_dtype(shape.num_experts).itemsize == 1 else "uint16",
        num_rows=0,
        start=record.source.routed_experts_start_len,
    )


def routed_experts_of(payload: RoutedExpertsPayload, shape: RouteShape) -> RoutedExperts:
    """Return the typed record [num_rows, L, K] of logical expert ids inside a scheduler's message, checked."""
    dtype = np.dtype(payload.dtype).newbyteorder("<")
    ids_TLK = np.frombuffer(payload.data, dtype=dtype).reshape(payload.num_rows, len(shape.moe_layer_ids), shape.top_k)
    return RoutedExperts(
        logical_ids_TLK=ids_TLK.astype(np.dtype(payload.dtype), copy=False),
        num_experts=shape.num_experts,
        moe_layer_ids=shape.moe_layer_ids,
        num_hidden_layers=shape.num_hidden_layers,
        start=payload.start,
        weight_versions=tuple((span.version, span.start, span.end) for span in payload.versions),
    )


def encode_json(content: Any) -> bytes:
    """Return JSON bytes; numbers that JSON cannot hold (infinities, NaN) become null."""
    return msgspec.json.encode(content)
