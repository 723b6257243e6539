"""Samples that were interrupted: the request for the rest, and one record out of the records of the parts.

The request for the rest has prompt and output as its prompt, so every value of a part stays as it was recorded.  It
asks for the rows of routed experts that the part does not have.  A seed goes on where it stopped (see
`continued_seed`).  It names the version of the adapter that the part has, which a server refuses once it
is evicted.  A server counts penalties from the beginning of an output, so they are refused.  It also begins
anew with stop strings: one across the seam is not seen.

    tokens        prompt    | output 1      | output 2      |
    rows          start .. P + O1 - 2       | P + O1 - 1 .. P + O1 + O2 - 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from capture.errors import HiddenStatesError, RouteValueError
from capture.hidden_states import HiddenStates
from capture.routed_experts import RoutedExperts, concat
from capture.sampling_mask import SamplingMask
from rollout.client.errors import JoinError
from rollout.client.types import GenerateOptions, GenerationOutput, VersionSpan
from rollout.core.continued import continued_params
from rollout.core.errors import BadRequest
from rollout.core.sampling_params import ALIASES, sampling_params_from_dict


def _chained(parts: Sequence[Sequence[Any]]) -> list[Any]:
    return [*chain.from_iterable(parts)]


PER_TOKEN: dict[str, Callable[[Sequence[Any]], Any]] = {
    "output_ids": _chained,
    "logprobs": _chained,
    "token_logprobs": _chained,
    "top_logprobs": _chained,
    "chosen_logprobs": _chained,
    "sampling_logprobs": _chained,
    "sampling_mask": SamplingMask.joined,
}
"""Fields of an output with one entry a token, and the functions that join the fields of parts."""


def rest_of(output: GenerationOutput, options: GenerateOptions) -> GenerateOptions:
    """Return options of a request that goes on where `output` stopped; `options` were used for `output`.

    Raises `BadRequest` for an output that has ended, whose record is not whole, or that cannot be continued.
    """
    if output.finish_reason is not None and output.finish_reason.type != "abort":
        raise BadRequest(f"request {output.rid} has ended ({output.finish_reason.type}); there is nothing to resume")
    prompt_ids = options.get("input_ids") or output.prompt_ids
    if not prompt_ids or not all(isinstance(each, int) for each in prompt_ids):
        raise BadRequest("the token ids of the prompt are unknown: set return_prompt_token_ids or give input_ids")
    params = options.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise BadRequest("samples are resumed one at a time: give one sampling_params")
    rest = GenerateOptions(**options)
    rest["sampling_params"] = _sampling_params_after(len(output.output_ids), params)
    rest["input_ids"] = [*prompt_ids, *output.output_ids]
    if output.meta_info.get("adapter") is not None:
        label = output.meta_info["adapter"]
        rest["lora_path"] = f"{label['name']}@{label['version']}"  # a newer version may serve the name by now
    if output.output_ids:
        _require_whole(output, options)
        rest.pop("logprob_start_len", None)  # recorded already
        if output.routed_experts is not None:
            rest["routed_experts_start_len"] = output.routed_experts.start + len(output.routed_experts)
        if options.get("return_hidden_states"):
            rest["hidden_states_start_len"] = _states_end(output, options)
    return rest


def join(first: GenerationOutput, rest: GenerationOutput) -> GenerationOutput:
    """Join two parts to one output; the options of `rest` came from `rest_of(first, ...)`.

    The texts follow one another.  Nothing is computed anew: tokens, log-probabilities, versions and rows come from the
    parts; `rid`, `meta_info` and the reason of the end from the rest.  Raises `JoinError` for parts that do not belong
    together.
    """
    end = replace(first, rid=rest.rid, finish_reason=rest.finish_reason, meta_info=rest.meta_info)
    if not first.output_ids:
        return rest
    if not rest.output_ids:
        return end
    count = len(first.output_ids) + len(rest.output_ids)
    if first.prompt_tokens is None or rest.prompt_tokens != first.prompt_tokens + len(first.output_ids):
        raise JoinError(
            f"{rest.rid} has a prompt of {rest.prompt_tokens} tokens, but {first.rid} ends after "
            f"{first.prompt_tokens} + {len(first.output_ids)}"
        )
    if first.prompt_ids is not None and rest.prompt_ids not in (None, [*first.prompt_ids, *first.output_ids]):
        raise JoinError(f"the prompt of {rest.rid} differs from the tokens of {first.rid}")
    contents = [(part.meta_info.get("adapter") or {}).get("content_digest") for part in (first, rest)]
    if contents[0] != contents[1]:
        raise JoinError(f"{first.rid} and {rest.rid} have adapters with other contents: {contents[0]}, {contents[1]}")
    if not _has_versions(rest):
        raise JoinError(f"some tokens of {rest.rid} have no weight version")
    fields: dict[str, Any] = {name: _joined_entries(name, first, rest) for name in PER_TOKEN}
    reason = rest.finish_reason
    if reason is not None and reason.length is not None:
        fields["finish_reason"] = replace(reason, length=count)
    return replace(
        end,
        **fields,
        text=None if first.text is None or rest.text is None else first.text + rest.text,
        completion_tokens=count,
        weight_version=rest.weight_version,
        weight_versions=_joined_spans(first, rest),
        routed_experts=_joined_routes(first, rest),
        hidden_states=_joined_states(first, rest),
    )


# --- the request -------------------------------------------------------------------------------------------------


def _sampling_params_after(count: int, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters for the rest of a sample that has `count` tokens and began with `raw`."""
    params, _ = sampling_params_from_dict(dict(raw))
    after = {ALIASES.get(name, name): value for name, value in raw.items()} | {"n": 1}
    if count == 0:
        return after
    rest = continued_params(params, count)
    after["max_new_tokens"], after["min_new_tokens"] = rest.max_new_tokens, rest.min_new_tokens
    if rest.sampling_seed is not None:
        after["sampling_seed"] = rest.sampling_seed
    return after


def _require_whole(output: GenerationOutput, options: GenerateOptions) -> None:
    """Raise `BadRequest` unless every token has each value that `options` asked for."""
    count = len(output.output_ids)
    if not _has_versions(output):
        raise BadRequest(
            f"request {output.rid}: some tokens have no weight version, as in a stream that was left. "
            "Interrupt with abort(rid), which returns the whole record."
        )
    for name in PER_TOKEN:
        values = getattr(output, name)
        if values is not None and len(values) != count:
            raise BadRequest(f"request {output.rid}: {name} has {len(values)} entries for {count} tokens")
    if options.get("return_logprob") and output.logprobs is None:
        raise BadRequest(f"request {output.rid} has no log-probabilities to join")
    if options.get("return_routed_experts"):
        routes = output.routed_experts
        if routes is None or not routes.complete:
            raise BadRequest(f"request {output.rid} lacks rows of routed experts, so they cannot be joined")
        if output.prompt_tokens is None or routes.start + len(routes) > output.prompt_tokens + count:
            raise BadRequest(f"request {output.rid} has more rows of routed experts than tokens")


def _states_end(output: GenerationOutput, options: GenerateOptions) -> int:
    """Return the position after the last row of hidden states.  Raises `BadRequest` if a row is missing before it."""
    states, start = output.hidden_states, options.get("hidden_states_start_len", 0)
    end = max((output.prompt_tokens or 0) + len(output.output_ids) - 1, start)
    if start + (0 if states is None else len(states)) != end:
        raise BadRequest(f"request {output.rid} lacks rows of hidden states, so they cannot be joined")
    return end


def _has_versions(output: GenerationOutput) -> bool:
    """Return whether each token has its weight version."""
    ends = [0, *(span.end for span in output.weight_versions)]
    return [span.start for span in output.weight_versions] == ends[:-1] and ends[-1] == len(output.output_ids)


# --- the record --------------------------------------------------------------------------------------------------


def _joined_entries(name: str, first: GenerationOutput, rest: GenerationOutput) -> Any:
    parts = [getattr(first, name), getattr(rest, name)]
    if all(part is None for part in parts):
        return None
    lengths = [len(first.output_ids), len(rest.output_ids)]
    if [None if part is None else len(part) for part in parts] != lengths:
        raise JoinError(f"{first.rid} and {rest.rid} have {lengths} tokens, but another number of entries in {name}")
    return PER_TOKEN[name](parts)


def _joined_spans(first: GenerationOutput, rest: GenerationOutput) -> list[VersionSpan]:
    shift = len(first.output_ids)
    spans = list(first.weight_versions)
    for span in rest.weight_versions:
        moved = span._replace(start=span.start + shift, end=span.end + shift)
        last = spans[-1] if spans else None
        if last is not None and last._replace(start=moved.start, end=moved.end) == moved and last.end == moved.start:
            spans[-1] = last._replace(end=moved.end)
        else:
            spans.append(moved)
    return spans


def _joined_routes(first: GenerationOutput, rest: GenerationOutput) -> RoutedExperts | None:
    if first.routed_experts is None and rest.routed_experts is None:
        return None
    if first.routed_experts is None or rest.routed_experts is None:
        raise JoinError(f"only one of {first.rid} and {rest.rid} has routed experts")
    try:
        return concat([first.routed_experts, rest.routed_experts])
    except RouteValueError as error:
        raise JoinError(f"rows of routed experts of {first.rid} and {rest.rid}: {error}") from None


def _joined_states(first: GenerationOutput, rest: GenerationOutput) -> HiddenStates | None:
    parts = [states for states in (first.hidden_states, rest.hidden_states) if states is not None]  # None: no rows
    try:
        return HiddenStates.joined(parts) if parts else None
    except HiddenStatesError as error:
        raise JoinError(f"rows of hidden states of {first.rid} and {rest.rid}: {error}") from None
