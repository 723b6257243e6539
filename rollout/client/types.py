"""The types that callers of the client see: options of a generation, its typed result, deadlines.

Shapes: see `capture.routed_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict

from capture.hidden_states import HiddenStates
from capture.routed_experts import RoutedExperts
from capture.sampling_mask import SamplingMask
from capture.token_logprobs import TokenLogprobs


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; what is absent takes the server's default."""

    input_ids: Sequence[int] | Sequence[Sequence[int]]  # instead of the prompt's text; nested: a batch
    sampling_params: (
        Mapping[str, Any] | Sequence[Mapping[str, Any]]
    )  # SGLang's names, `n` among them; or one per prompt
    return_logprob: bool
    logprob_start_len: int  # -1: no prompt log-probabilities
    top_logprobs_num: int
    token_ids_logprob: Sequence[int]  # ids whose log-probabilities are wanted at every position
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    logprobs_format: Literal["nested", "compact"]  # compact: all as arrays, for many likely tokens
    return_routed_experts: bool
    routed_experts_start_len: int  # token position of the first row, 0 .. prompt length
    replay_routed_experts: RoutedExperts | Sequence[RoutedExperts | None]  # in place of the routers' choices
    return_sampling_mask: bool  # the ids that top-k, top-p and min-p left at each token
    return_hidden_states: bool
    hidden_state_layers: Sequence[int]  # 0 the embedding, n after n layers, -1 (the default) after the final norm
    hidden_states_start_len: int  # token position of the first row, 0 .. prompt length
    rid: str | Sequence[str]
    lora_path: str | Sequence[str | None]  # the name of an adapter, or one per prompt
    extra_key: str  # partitions the prefix cache
    max_kv_version_lag: int  # commits that its KV may be behind; -1: any number
    priority: int
    session_id: str  # the session of the request, whose prefix may be kept for the session's next one
    resumable: bool  # of `stream`: a broken connection is made again, and the stream goes on
    extra_body: Mapping[str, Any]  # further fields of the request body, sent as they are
    timeout: float  # seconds for this call, instead of `Timeouts.generate`


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds, each for a single wait.

    `generate` is the wait for the whole answer, or for the next piece of a stream; a server that is paused answers only
    after it continues, so it must outlast a pause.  `weights` is for refreshes, pause and
    continue.  `retry` is how long a call that may safely be made again is repeated; 0: not at all.
    """

    connect: float = 5.0
    control: float = 60.0
    generate: float = 1800.0
    weights: float = 360.0
    retry: float = 10.0


@dataclass(frozen=True)
class FleetPolicy:
    """The rules by which a fleet looks after its engines.

    An engine is left out after `max_failures` failed checks in a row, and at once where a call does not reach it.
    `max_differences`: also after this number of checks in a row in which its weight version was not that of most
    others.  `max_engines`: engines on which a request is tried, so that one which brings engines down does not bring
    down all.
    """

    check_every_s: float = 1.0
    check_timeout_s: float = 5.0
    max_failures: int = 3
    max_differences: int = 3
    max_engines: int = 3


@dataclass(frozen=True)
class RouteLayout:
    """The model's side of routed experts, needed only for servers that send the headerless int32 form."""

    num_hidden_layers: int
    top_k: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int


class TokenLogprob(NamedTuple):
    """`logprob` is None where there is none: the first prompt token, or a value that JSON cannot hold."""

    logprob: float | None
    token_id: int
    text: str | None


class VersionSpan(NamedTuple):
    """Half-open span `[start, end)` of token positions that one weight version explains.

    `weight_epoch` counts the commits of the server: contents that had the same label differ in it.  None from a server
    that does not send it.
    """

    version: str
    start: int
    end: int
    weight_epoch: int | None = None


@dataclass(frozen=True)
class FinishReason:
    """`stop` has `matched`, `length` has `length`, `abort` has `message` and for refusals `status_code`."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | list[int] | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


TopLogprobs = list[list[TokenLogprob] | None]


@dataclass(frozen=True)
class GenerationOutput:
    """One sample: finished, or as far as a stream has come (`finish_reason` is None).  Every field is cumulative.

    `logprobs` runs parallel to `output_ids`; a value that JSON cannot hold is NaN.  Fields that were not asked for, or
    that the server does not send, are None; `meta_info` is everything as it came.
    `weight_versions` are spans over output tokens, `prompt_logprob_versions` over the entries of `prompt_logprobs`,
    or the rows of `prompt_logprob_arrays`.
    """

    rid: str
    text: str | None
    output_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    weight_version: str | None
    weight_versions: list[VersionSpan]
    logprobs: list[float] | None = None
    token_logprobs: list[TokenLogprob] | None = None
    top_logprobs: TopLogprobs | None = None
    chosen_logprobs: TopLogprobs | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    prompt_top_logprobs: TopLogprobs | None = None
    prompt_chosen_logprobs: TopLogprobs | None = None
    prompt_logprob_versions: list[VersionSpan] = field(default_factory=list)
    logprob_arrays: TokenLogprobs | None = None  # all log-probabilities of the output in the compact form
    prompt_logprob_arrays: TokenLogprobs | None = None
    routed_experts: RoutedExperts | None = None
    hidden_states: HiddenStates | None = None
    sampling_mask: SamplingMask | None = None
    sampling_logprobs: list[float] | None = None  # of each token among the tokens of its mask
    prompt_ids: list[int] | None = None  # with `return_prompt_token_ids`
    index: int | None = None  # position in the batch, in a stream of several
    meta_info: dict[str, Any] = field(default_factory=dict, repr=False)
