"""Fields that requests for tokens have in several dialects, and what they ask of the engine.

A body of a dialect translates itself into a `GenerateReqInput`, the one request that `TokenizerManager` takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.grammar import GRAMMAR_FIELDS, Grammar, grammar_in
from rollout.core.known_fields import (
    HARMLESS_FIELDS,
    HARMLESS_SAMPLING_FIELDS,
    SGLANG_SAMPLING_FIELDS,
    UNSUPPORTED_SAMPLING_FIELDS,
)
from rollout.http.protocol import Body, FreeForm, FreeObject, TokenIds
from rollout.tokenizer_manager.request import MAX_EXTRA_KEY_CHARS, RoutesFormat

SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
RANK_HEADER = "x-data-parallel-rank"
_ROUTING_HEADERS = {name.encode() for name in (*SESSION_HEADERS, RANK_HEADER, "accept")}
ExtraKey = Annotated[str, Field(max_length=MAX_EXTRA_KEY_CHARS)]
_RENAMED = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_NOT_SAMPLING = {"include_stop_str_in_output", "prompt_logprobs"} | GRAMMAR_FIELDS
FreeValue = Annotated[Any, FreeForm]
Count = Annotated[int, Field(ge=0)]


class AnyGeneration(Body):
    """The fields that requests of every dialect have."""

    harmless = HARMLESS_FIELDS

    stream: bool = False
    session_id: str | None = None
    lora_path: str | None = None
    extra_key: ExtraKey | None = None
    cache_salt: ExtraKey | None = None
    max_kv_version_lag: int | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # its old name

    def common_fields(self, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return fields of a `GenerateReqInput`, as `common_fields` makes them.  Raises `BadRequest`."""
        return common_fields(self, headers)


class CommonFields(Protocol):
    """The fields of `AnyGeneration`, read by any reader of bodies."""

    stream: bool
    session_id: str | None
    lora_path: Any
    extra_key: str | None
    cache_salt: str | None
    max_kv_version_lag: int | None
    routed_dp_rank: int | None
    data_parallel_rank: int | None

    @property
    def ignored_fields(self) -> list[str]: ...


def routing_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of a request that `common_fields` reads, and `accept`; of several of a name the first."""
    found = [(name, value) for name, value in headers if name in _ROUTING_HEADERS]
    return {name.decode(): value.decode("latin-1") for name, value in reversed(found)}


def common_fields(body: CommonFields, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of a `GenerateReqInput`.  Prefixes are shared only if `cache_salt` and `extra_key` agree.

    The session and the data-parallel rank are taken from `headers` where the body names none.  Raises `BadRequest`.
    """
    salt, key = body.cache_salt, body.extra_key
    session_id, rank = body.session_id, body.routed_dp_rank
    if session_id is None:
        session_id = next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)
    if rank is None:
        rank = _rank_in(headers) if body.data_parallel_rank is None else body.data_parallel_rank
    return {
        "stream": body.stream,
        "session_id": session_id,
        "lora_path": body.lora_path,
        "extra_key": key if salt is None else f"{salt}\x1f{key or ''}",
        "max_kv_version_lag": body.max_kv_version_lag,
        "ignored_fields": body.ignored_fields,
        "routed_dp_rank": rank,
    }


def check_resumable(rid: str | None, *, stream: bool) -> None:
    """Check that a request whose stream is to outlive its connection has a stream and a name.  Raises `BadRequest`."""
    if not stream:
        raise BadRequest("resumable needs stream: true")
    if not rid:
        raise BadRequest("a resumable stream needs a rid of its own, by which its client asks for the rest")


def _rank_in(headers: Mapping[str, str]) -> int | None:
    """Return the data-parallel rank that the headers name.  Raises `BadRequest`."""
    rank = headers.get(RANK_HEADER)
    if not rank:
        return None
    if not rank.isdecimal() or len(rank) > 9:
        raise BadRequest(f"{RANK_HEADER} must be a number, got {rank[:80]!r}")
    return int(rank)


class RecordFields(Body):
    """Fields for a trainer that chats and completions have in common."""

    return_token_record: bool = False
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    routed_experts_format: RoutesFormat = "compatible"
    return_sampling_mask: bool | None = None


class StreamOptions(Body):
    unsupported = frozenset({"continuous_usage_stats"})

    include_usage: bool = False


class SamplingFields(Body):
    """Sampling parameters by OpenAI's and vLLM's names."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_SAMPLING_FIELDS
    other_names: ClassVar[dict[str, str]] = SGLANG_SAMPLING_FIELDS
    harmless: ClassVar[frozenset[str]] = HARMLESS_SAMPLING_FIELDS

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: Count | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    structured_outputs: FreeObject | None = None
    guided_json: FreeValue = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: FreeValue = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: FreeValue = None

    def grammar(self) -> Grammar | None:
        """Return the grammar that the fields ask for.  Raises `BadRequest` or `UnsupportedFeature`."""
        fields = {name: value for name in GRAMMAR_FIELDS if (value := getattr(self, name, None)) is not None}
        return grammar_in(fields)

    def engine_sampling(self, max_new_tokens: int | None) -> dict[str, Any]:
        """Return the `sampling_params` of a `GenerateReqInput`; None leaves the length to the server."""
        names = SamplingFields.model_fields.keys() - _NOT_SAMPLING
        sampling = {_RENAMED.get(name, name): getattr(self, name) for name in names}
        sampling["max_new_tokens"] = max_new_tokens
        if self.seed == -1:  # vLLM's value for none
            sampling["sampling_seed"] = None
        if self.include_stop_str_in_output:
            sampling["no_stop_trim"] = True
        if (grammar := self.grammar()) is not None:
            sampling["structured_outputs"] = grammar.structured_outputs()
        return {name: value for name, value in sampling.items() if value is not None}

    def engine_logprobs(self, num_top: int | None, *, stream: bool) -> dict[str, Any]:
        """Return the fields of a `GenerateReqInput` that ask for `num_top` alternatives of each output token.

        `num_top` None asks for no log-probabilities of the output.  Raises `UnsupportedFeature`.
        """
        if self.prompt_logprobs is not None and stream:
            raise UnsupportedFeature("prompt_logprobs cannot be streamed")
        wanted = [count for count in (num_top, self.prompt_logprobs) if count is not None]
        return {
            "return_logprob": bool(wanted),
            "top_logprobs_num": max(wanted, default=0),
            "logprob_start_len": -1 if self.prompt_logprobs is None else 0,
        }
