"""/generate: the request body out of a caller's options, and typed results out of the answer.

Pure functions, shared by the synchronous and the asynchronous client.  An answer that lacks a requested field, or
contradicts itself, is an error here: a trainer must not learn from rows or log-probabilities that belong elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from capture.codec import decode_compact, decode_compatible, encode_compact
from capture.errors import CaptureError
from capture.hidden_states import HiddenStates
from capture.routed_experts import RoutedExperts
from capture.sampling_mask import SamplingMask
from capture.token_logprobs import TokenLogprobs
from rollout.client.binary import MEDIA_TYPE, parse_binary
from rollout.client.errors import ResponseFormatError, ServerError
from rollout.client.types import (
    FinishReason,
    GenerateOptions,
    GenerationOutput,
    RouteLayout,
    TokenLogprob,
    TopLogprobs,
    VersionSpan,
)
from rollout.client.wire import Call, Reply, check, error_message, parse_json, require_known
from rollout.core.errors import BadRequest
from rollout.core.known_fields import KNOWN_SAMPLING_FIELDS

T = TypeVar("T")
_NOT_BODY = ("extra_body", "timeout")


def generate_body(prompt: str | Sequence[str] | None, options: GenerateOptions) -> dict[str, Any]:
    """Build the body of /generate.

    Raises `BadRequest` for unknown options, or unless exactly one prompt form is given.
    """
    require_known(options, GenerateOptions.__annotations__.keys(), "; other fields of the body go into extra_body")
    params = options.get("sampling_params") or {}
    for each in [params] if isinstance(params, Mapping) else params:
        if isinstance(each, Mapping):
            require_known(each, KNOWN_SAMPLING_FIELDS, place="sampling_params.")
    if (prompt is None) == (options.get("input_ids") is None):
        raise BadRequest("give either a prompt or input_ids")
    body: dict[str, Any] = {key: value for key, value in options.items() if key not in _NOT_BODY and value is not None}
    if prompt is not None:
        body["text"] = prompt if isinstance(prompt, str) else list(prompt)
    else:
        body["input_ids"] = plain_ids(body["input_ids"])
    if body.get("return_routed_experts"):
        body["routed_experts_format"] = "compact"
    if body.get("return_sampling_mask"):
        body["sampling_mask_format"] = "csr"
    if body.get("return_hidden_states"):
        body["hidden_states_format"] = "compact"
    if "hidden_state_layers" in body:
        body["hidden_state_layers"] = plain_ids(body["hidden_state_layers"])
    if (replay := body.get("replay_routed_experts")) is not None:
        body["replay_routed_experts"] = (
            _compact(replay) if isinstance(replay, RoutedExperts) else [*map(_compact, replay)]
        )
    return body | dict(options.get("extra_body") or {})


def _compact(routed: RoutedExperts | None) -> str | None:
    return None if routed is None else base64.b64encode(encode_compact(routed)).decode("ascii")


def generate(
    prompt: str | Sequence[str] | None, options: GenerateOptions, layout: RouteLayout | None
) -> Call[GenerationOutput | list[GenerationOutput]]:
    """Return the call of a generation that is not streamed."""
    body = generate_body(prompt, options)

    def parse(reply: Reply) -> GenerationOutput | list[GenerationOutput]:
        check(reply)
        content = parse_binary(reply.body) if reply.media_type == MEDIA_TYPE else parse_json(reply.body)
        return parse_answer(content, body, layout)

    return dataclasses.replace(call_of(parse, body, options), accept=f"{MEDIA_TYPE}, application/json")


def call_of(parse: Callable[[Reply], T], body: dict[str, Any], options: GenerateOptions) -> Call[T]:
    timeout_s = options.get("timeout")
    return Call("POST", "/generate", parse, body, timeout="generate", timeout_s=timeout_s, retry="refused")


def num_samples(body: Mapping[str, Any]) -> int | None:
    """Return how many samples the answer lists; None if it is a single object."""
    prompts = body["text"] if "text" in body else body["input_ids"]
    is_batch = not isinstance(prompts, str) and len(prompts) > 0 and not isinstance(prompts[0], int)
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        total: int = sum(each.get("n", 1) for each in params)
        return total
    per_prompt: int = params.get("n", 1)
    if is_batch:
        return len(prompts) * per_prompt
    return None if per_prompt == 1 else per_prompt


def parse_answer(
    content: Any, body: Mapping[str, Any], layout: RouteLayout | None
) -> GenerationOutput | list[GenerationOutput]:
    """Read the answer to the request `body`: one output, or a list (prompt-major) for a batch or n > 1.

    Raises `ResponseFormatError`.
    """
    expected = num_samples(body)
    if expected is None:
        return parse_output(content, body, layout)
    if not isinstance(content, list) or len(content) != expected:
        got = f"{len(content)} samples" if isinstance(content, list) else type(content).__name__
        raise ResponseFormatError(f"expected a list of {expected} samples, got {got}")
    return [parse_output(item, body, layout) for item in content]


def parse_event(event: bytes, body: Mapping[str, Any], layout: RouteLayout | None) -> GenerationOutput:
    """Read the output in one event of a stream.  Raises `ServerError` for an error event, `ResponseFormatError`."""
    content = parse_json(event)
    if isinstance(content, dict) and "error" in content:
        error = content["error"]
        code = error.get("code") if isinstance(error, dict) else None
        raise ServerError(code if isinstance(code, int) else 500, error_message(event))
    return parse_output(content, body, layout)


def parse_output(content: Any, body: Mapping[str, Any], layout: RouteLayout | None) -> GenerationOutput:
    """Read one sample and check it against the request `body`.  Raises `ResponseFormatError`."""
    try:
        output = _output(content, content["meta_info"], layout)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResponseFormatError(f"malformed /generate answer: {type(error).__name__}: {error}") from None
    if output.finish_reason is not None:
        _check_finished(output, body)
    return output


def _output(content: Mapping[str, Any], meta: dict[str, Any], layout: RouteLayout | None) -> GenerationOutput:
    token_logprobs = _logprobs(meta, "output_token_logprobs")
    arrays = _logprob_arrays(meta, "output_logprobs")
    logprobs = None if token_logprobs is None else [_number(entry.logprob) for entry in token_logprobs]
    return GenerationOutput(
        rid=meta["id"],
        text=content.get("text"),
        output_ids=list(content["output_ids"]),
        finish_reason=_finish_reason(meta.get("finish_reason")),
        prompt_tokens=meta.get("prompt_tokens"),
        completion_tokens=meta.get("completion_tokens"),
        cached_tokens=meta.get("cached_tokens"),
        weight_version=meta.get("weight_version"),
        weight_versions=_spans(meta, "weight_versions"),
        logprobs=logprobs if arrays is None else arrays.logprobs.tolist(),
        token_logprobs=token_logprobs,
        top_logprobs=_logprob_lists(meta, "output_top_logprobs"),
        chosen_logprobs=_logprob_lists(meta, "output_token_ids_logprobs"),
        prompt_logprobs=_logprobs(meta, "input_token_logprobs"),
        prompt_top_logprobs=_logprob_lists(meta, "input_top_logprobs"),
        prompt_chosen_logprobs=_logprob_lists(meta, "input_token_ids_logprobs"),
        prompt_logprob_versions=_spans(meta, "input_logprob_weight_versions"),
        logprob_arrays=arrays,
        prompt_logprob_arrays=_logprob_arrays(meta, "input_logprobs"),
        routed_experts=_routed_experts(meta, layout),
        hidden_states=_hidden_states(meta),
        sampling_mask=_sampling_mask(meta),
        sampling_logprobs=_sampling_logprobs(meta),
        prompt_ids=None if (ids := content.get("prompt_token_ids")) is None else list(ids),
        index=content.get("index"),
        meta_info=meta,
    )


def _spans(meta: Mapping[str, Any], key: str) -> list[VersionSpan]:
    return [VersionSpan(s["version"], s["start"], s["end"], s.get("weight_epoch")) for s in meta.get(key) or []]


def _check_finished(output: GenerationOutput, body: Mapping[str, Any]) -> None:
    aborted = output.finish_reason is not None and output.finish_reason.type == "abort"
    if output.logprob_arrays is not None:
        _check_arrays(output)
    elif body.get("return_logprob") and output.output_ids:
        ids = [entry.token_id for entry in output.token_logprobs or []]
        if ids != output.output_ids:
            raise ResponseFormatError(
                f"request {output.rid}: log-probabilities of {len(ids)} tokens do not match the "
                f"{len(output.output_ids)} output tokens"
            )
    if body.get("return_sampling_mask") and output.output_ids:
        _check_mask(output)
    if body.get("return_hidden_states") and not aborted:
        _check_hidden_states(output)
    if not body.get("return_routed_experts") or aborted:
        return
    routed = output.routed_experts
    if routed is None:
        raise ResponseFormatError(f"request {output.rid}: routed experts were requested, but the answer has none")
    if output.prompt_tokens is None:
        raise ResponseFormatError(f"request {output.rid}: prompt_tokens is missing")
    end = output.prompt_tokens + len(output.output_ids) - 1
    if len(routed) != max(end - routed.start, 0) or not routed.complete:
        raise ResponseFormatError(
            f"request {output.rid}: {len(routed) - len(routed.missing_rows())} rows of routed experts from token "
            f"{routed.start}, expected {max(end - routed.start, 0)}"
        )


def _check_arrays(output: GenerationOutput) -> None:
    assert output.logprob_arrays is not None
    try:
        output.logprob_arrays.require(output.output_ids, output.prompt_tokens or 0)
    except CaptureError as error:
        raise ResponseFormatError(f"request {output.rid}: {error}") from None


def _check_hidden_states(output: GenerationOutput) -> None:
    states, end = output.hidden_states, (output.prompt_tokens or 0) + max(len(output.output_ids) - 1, 0)
    start = output.meta_info.get("hidden_states_start_len", 0)
    count = 0 if states is None else len(states)
    if count != max(end - start, 0):
        raise ResponseFormatError(
            f"request {output.rid}: {count} rows of hidden states from token {start}, expected {max(end - start, 0)}"
        )


def _check_mask(output: GenerationOutput) -> None:
    if output.sampling_mask is None or output.sampling_logprobs is None:
        raise ResponseFormatError(f"request {output.rid}: sampling masks were requested, but the answer has none")
    try:
        output.sampling_mask.require(output.output_ids)
    except CaptureError as error:
        raise ResponseFormatError(f"request {output.rid}: {error}") from None
    if len(output.sampling_logprobs) != len(output.output_ids):
        raise ResponseFormatError(
            f"request {output.rid}: {len(output.sampling_logprobs)} sampling log-probabilities for "
            f"{len(output.output_ids)} tokens"
        )


def _sampling_mask(meta: Mapping[str, Any]) -> SamplingMask | None:
    """Return the masks, sent in any form; servers that know no columns send lists."""
    content = meta.get("output_token_sampling_mask")
    if content is None:
        return None
    try:
        if isinstance(content, Mapping):
            return SamplingMask.decode_csr(content["token_ids"], content["offsets"])
        return SamplingMask.from_lists(content)
    except CaptureError as error:
        raise ResponseFormatError(f"sampling masks: {error}") from error


def _sampling_logprobs(meta: Mapping[str, Any]) -> list[float] | None:
    values = meta.get("output_token_sampling_logprobs")
    return None if values is None else [_number(value) for value in values]


def _logprob_arrays(meta: Mapping[str, Any], key: str) -> TokenLogprobs | None:
    """Return the log-probabilities if they are in the compact form."""
    if meta.get("logprobs_format") != "compact" or meta.get(key) is None:
        return None
    try:
        content = meta[key]
        return TokenLogprobs.decode(content) if isinstance(content, bytes) else TokenLogprobs.decode_text(content)
    except CaptureError as error:
        raise ResponseFormatError(f"{key}: {error}") from None


def _routed_experts(meta: Mapping[str, Any], layout: RouteLayout | None) -> RoutedExperts | None:
    text = meta.get("routed_experts")
    if text is None or isinstance(text, RoutedExperts):
        return text
    try:
        if meta.get("routed_experts_format") == "compact":
            return decode_compact(base64.b64decode(text, validate=True))
        if layout is None:
            raise ResponseFormatError(
                "the server sent routed experts without a header: create the client with route_layout=RouteLayout(...)"
            )
        start = meta.get("routed_experts_start_len", 0)
        return decode_compatible(
            text, layout.num_hidden_layers, layout.top_k, layout.moe_layer_ids, layout.num_experts, start
        )
    except (CaptureError, binascii.Error) as error:
        raise ResponseFormatError(f"routed experts: {error}") from error


def _hidden_states(meta: Mapping[str, Any]) -> HiddenStates | None:
    """Return the rows, whose data is bytes or base64; None where there are none yet, or in another form."""
    content = meta.get("hidden_states")
    if not isinstance(content, Mapping):
        return None
    spans = tuple((s["version"], s["start"], s["end"]) for s in meta["hidden_states_weight_versions"])
    facts = content["dtype"], content["shape"], meta["hidden_state_layers"], meta["hidden_states_start_len"], spans
    try:
        data = content["data"]
        return HiddenStates.of_bytes(data, *facts) if isinstance(data, bytes) else HiddenStates.of_text(data, *facts)
    except CaptureError as error:
        raise ResponseFormatError(str(error)) from None


def _finish_reason(reason: Mapping[str, Any] | None) -> FinishReason | None:
    if reason is None:
        return None
    if reason["type"] not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {reason['type']!r}")
    names = ("type", "matched", "length", "message", "status_code")
    return FinishReason(**{name: reason[name] for name in names if name in reason})


def _logprobs(meta: Mapping[str, Any], key: str) -> list[TokenLogprob] | None:
    entries = meta.get(key)
    return None if entries is None else [TokenLogprob(*entry) for entry in entries]


def _logprob_lists(meta: Mapping[str, Any], key: str) -> TopLogprobs | None:
    positions = meta.get(key)
    if positions is None:
        return None
    return [None if entries is None else [TokenLogprob(*entry) for entry in entries] for entries in positions]


def plain_ids(ids: Any) -> list[Any]:
    """Convert lists, tuples, arrays or tensors to nested lists of ints."""
    if hasattr(ids, "tolist"):
        plain: list[Any] = ids.tolist()
        return plain
    return [each if isinstance(each, int) else each.item() if _is_scalar(each) else plain_ids(each) for each in ids]


def _is_scalar(value: Any) -> bool:
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0


def _number(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob
