"""Checks requests against what this server and model can do, before they are sent to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from capture.hidden_states import number_bytes
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.io_struct import SchedulerReady, TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.core.specs.heads import Head, LabelsSpec
from rollout.core.specs.model_config import ModelConfig
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.budget import AnswerForm, BudgetLimits, HiddenSize, RequestBudget
from rollout.tokenizer_manager.hidden_memory import HiddenHold, HiddenMemory
from rollout.tokenizer_manager.replay import check_replay
from rollout.tokenizer_manager.request import MAX_TOKEN_IDS_LOGPROB, ExpandedRequest
from rollout.tokenizer_manager.response import RouteShape
from rollout.tokenizer_manager.served_names import ServedNames

MAX_TOP_LOGPROBS = 1024
MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True)
class ServingLimits:
    """Facts that requests are checked against.

    `context_length` and `max_total_num_tokens` (size of the KV pool) are in tokens.  `eos_token_id`: an end token that
    the tokenizer names and the model's configuration does not.  `head` and `hidden_size`: the model's.
    `hidden_memory`: what hidden states of all requests hold.
    """

    vocab_size: int
    route_shape: RouteShape
    context_length: int
    max_total_num_tokens: int
    is_moe: bool
    captures_routes: bool
    returns_routes_by_default: bool
    has_tokenizer: bool
    eos_token_id: int | None = None
    budget: BudgetLimits = field(default_factory=BudgetLimits)
    dp_size: int = 1
    names: ServedNames = field(default_factory=ServedNames)
    head: Head = "vocabulary"
    hidden_size: int = 1
    hidden_dtype: str = "float32"
    hidden_memory: HiddenMemory = field(default_factory=HiddenMemory)

    @classmethod
    def of(
        cls, args: ServerArgs, config: ModelConfig, ready: SchedulerReady, tokenizer: Tokenizer | None
    ) -> ServingLimits:
        """Return the limits of a server whose scheduler is ready."""
        return cls(
            vocab_size=config.vocab_size,
            route_shape=RouteShape.of(config),
            context_length=ready.context_length,
            max_total_num_tokens=ready.max_total_num_tokens,
            is_moe=config.is_moe,
            captures_routes=ready.capture_routed_experts,
            returns_routes_by_default=args.return_routed_experts_by_default,
            has_tokenizer=tokenizer is not None,
            eos_token_id=None if tokenizer is None else _end_token(tokenizer, config),
            budget=BudgetLimits(
                max_request_bytes=args.max_request_mb << 20,
                max_logprob_entries=args.max_logprob_entries,
                mask_tokens=args.sampling_mask_max_tokens,
            ),
            dp_size=args.dp_size,
            names=ServedNames(args.names, ready.adapters if args.enable_lora else None),
            head=config.head,
            hidden_size=config.hidden_size,
            hidden_dtype=config.torch_dtype if args.dtype == "auto" else args.dtype,
            hidden_memory=HiddenMemory(args.max_request_mb << 20),
        )

    def room(self, prompt_len: int) -> int:
        """Return the most tokens that can follow a prompt of `prompt_len` tokens."""
        return max(min(self.context_length, self.max_total_num_tokens) - prompt_len, 0)

    @property
    def routes_by_default(self) -> bool:
        """True if a request that leaves `return_routed_experts` out gets routed experts."""
        return self.returns_routes_by_default and self.captures_routes

    def check_rank(self, dp_rank: int | None) -> None:
        """Check that a data-parallel rank exists.  Raises `BadRequest`."""
        if dp_rank is not None and not 0 <= dp_rank < self.dp_size:
            raise BadRequest(f"routed_dp_rank must be in 0..{self.dp_size - 1} (--dp-size), got {dp_rank}")


def check_messages(expanded: ExpandedRequest, limits: ServingLimits, form: AnswerForm) -> HiddenHold | None:
    """Check the completed messages of a request, and fill in the sampling parameters that the server sets.

    These are `max_new_tokens` where the caller left it to the server, and the tokenizer's end token.  Lists that
    several prompts share are checked once.  Returns the hold of its hidden states, None if it wants none.  Raises
    `BadRequest`, `UnsupportedFeature` or `TooLarge`, naming the first thing that is wrong, and `Unavailable` where
    hidden states of other requests leave no room.
    """
    hidden = HiddenSize(limits.hidden_size, number_bytes(limits.hidden_dtype))
    budget = RequestBudget(limits.budget, form, limits.route_shape, limits.vocab_size, hidden)
    shared = _SharedLists(limits)
    for source, length in zip(expanded.messages, expanded.lengths, strict=True):
        _check_prompt(source, length, limits, shared)
        budget.add(source)
    budget.require()
    for source in expanded.messages:
        if source.replay is not None:
            check_replay(source.replay, len(source.input_ids), source.sampling_params.max_new_tokens)
    return limits.hidden_memory.hold(budget.hidden_bytes) if budget.hidden_bytes else None


class _SharedLists:
    """The lists that prompts of a request share: checked, and completed, once."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._checked: dict[int, Any] = {}  # by identity; kept, so that no other object takes it
        self._completed: dict[tuple[int, int, int], SamplingParams] = {}

    def complete(self, params: SamplingParams, max_new_tokens: int, min_new_tokens: int) -> SamplingParams:
        """Return the parameters with these lengths and the tokenizer's end token, once their lists are checked."""
        limits, key = self._limits, (id(params), max_new_tokens, min_new_tokens)
        if self._is_new(params):
            params.validate_lists(limits.vocab_size)
            _check_stop(params, limits)
        if key not in self._completed:
            stop_ids = params.stop_token_ids
            if limits.eos_token_id is not None and not params.ignore_eos:
                stop_ids = [*stop_ids, limits.eos_token_id]
            self._completed[key] = msgspec.structs.replace(
                params, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, stop_token_ids=stop_ids
            )
        return self._completed[key]

    def check_chosen(self, chosen: list[int]) -> None:
        if self._is_new(chosen):
            check_token_ids(chosen, self._limits.vocab_size, "token_ids_logprob")

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._checked
        self._checked[id(value)] = value
        return is_new


def _end_token(tokenizer: Tokenizer, config: ModelConfig) -> int | None:
    """Return the tokenizer's end token, if it can be sampled and the scheduler does not know it from the model's
    configuration.
    """
    eos = tokenizer.eos_token_id
    return None if eos is None or eos >= config.vocab_size or eos in config.eos_token_ids else eos


def _check_prompt(
    source: TokenizedGenerateReqInput, default_new_tokens: int | None, limits: ServingLimits, shared: _SharedLists
) -> None:
    _fit_to_head(source, limits)
    prompt_len = len(source.input_ids)
    _check_prompt_length(prompt_len, limits.context_length)
    check_token_ids(source.input_ids, limits.vocab_size, "input_ids")
    params = source.sampling_params
    most, least = params.max_new_tokens, params.min_new_tokens
    if default_new_tokens is not None:
        room = limits.room(prompt_len)
        most, least = min(default_new_tokens, room), min(least, room)
    params = shared.complete(params, most, least)
    params.validate_numbers()
    if params.top_k > MAX_TOP_K:
        raise BadRequest(f"sampling_params: top_k must be at most {MAX_TOP_K}, got {params.top_k}")
    _check_length(prompt_len, params.max_new_tokens, limits)
    _check_logprobs(source, limits.vocab_size, shared)
    _check_routes(source, limits)
    if source.hidden_states is not None:
        source.hidden_states = _numbered(source.hidden_states, prompt_len, limits.route_shape.num_hidden_layers)
    if source.return_sampling_mask and not params.filters:
        raise BadRequest(
            "return_sampling_mask: with top_p 1, top_k -1 and min_p 0 every token of the vocabulary can be sampled; "
            "there is no mask"
        )
    source.sampling_params = params


def _fit_to_head(source: TokenizedGenerateReqInput, limits: ServingLimits) -> None:
    """Check that the model's head can do what the request asks.

    As in transformers, the last token that is not padding classifies a sequence, so padding at the end is cut.
    """
    pooling, head = source.pooling, limits.head
    has_labels = isinstance(head, LabelsSpec)
    if pooling is None:
        if head != "vocabulary":
            ways = "/classify, /pooling or /v1/embeddings" if has_labels else "/v1/embeddings or /pooling"
            raise UnsupportedFeature(f"this model has no output head, so it generates and scores no tokens: ask {ways}")
        return
    if pooling.scores and not has_labels:
        raise UnsupportedFeature("this model has no labels: classification needs a checkpoint with a `score` head")
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= limits.hidden_size:
        raise BadRequest(f"dimensions must be in 1..{limits.hidden_size}, got {pooling.dimensions}")
    if isinstance(head, LabelsSpec) and pooling.scores and pooling.kind == "last":
        ids, end = source.input_ids, len(source.input_ids)
        while end > 1 and ids[end - 1] == head.pad_token_id:
            end -= 1
        source.input_ids = ids[:end]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Check that all ids are in the vocabulary.  Raises `BadRequest` naming the first one outside."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise BadRequest(f"{field}: token id {bad} is outside the vocabulary [0, {vocab_size})")


def _check_prompt_length(prompt_len: int, context_length: int) -> None:
    if not prompt_len:
        raise BadRequest("the prompt is empty: it must have at least one token")
    if prompt_len >= context_length:
        raise BadRequest(
            f"The input ({prompt_len} tokens) is longer than the model's context length ({context_length} tokens)."
        )


def _check_stop(params: SamplingParams, limits: ServingLimits) -> None:
    check_token_ids(params.stop_token_ids, limits.vocab_size, "sampling_params: stop_token_ids")
    if params.stop and not limits.has_tokenizer:
        raise UnsupportedFeature(
            "sampling_params: stop strings need a tokenizer; this server runs --skip-tokenizer-init"
        )


def _check_length(prompt_len: int, max_new_tokens: int, limits: ServingLimits) -> None:
    context = limits.context_length
    total = prompt_len + max_new_tokens
    if total > context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {total} tokens: {prompt_len} tokens from the input messages and {max_new_tokens} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
            "limit."
        )  # fmt: skip
    if total > limits.max_total_num_tokens:
        raise BadRequest(
            f"the request needs up to {total} tokens of KV cache ({prompt_len} prompt, {max_new_tokens} new), but the "
            f"pool has {limits.max_total_num_tokens}. Lower max_new_tokens or start with a larger --max-total-tokens."
        )


def _check_logprobs(source: TokenizedGenerateReqInput, vocab_size: int, shared: _SharedLists) -> None:
    start, prompt_len = source.logprob_start_len, len(source.input_ids)
    if not -1 <= start <= prompt_len:
        raise BadRequest(f"logprob_start_len must be -1 or in 0..{prompt_len} (the prompt's length), got {start}")
    if not 0 <= source.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"top_logprobs_num must be in 0..{MAX_TOP_LOGPROBS}, got {source.top_logprobs_num}")
    if source.top_logprobs_num > vocab_size:
        raise BadRequest(f"top_logprobs_num is over the vocabulary's {vocab_size}, got {source.top_logprobs_num}")
    chosen = source.token_ids_logprob or []
    if len(chosen) > MAX_TOKEN_IDS_LOGPROB:
        raise BadRequest(f"token_ids_logprob holds at most {MAX_TOKEN_IDS_LOGPROB} ids, got {len(chosen)}")
    shared.check_chosen(chosen)


def _check_routes(source: TokenizedGenerateReqInput, limits: ServingLimits) -> None:
    start, prompt_len = source.routed_experts_start_len, len(source.input_ids)
    if not 0 <= start <= prompt_len:
        raise BadRequest(f"routed_experts_start_len must be in 0..{prompt_len} (the prompt's length), got {start}")
    if not source.return_routed_experts:
        return
    if not limits.is_moe:
        raise UnsupportedFeature("return_routed_experts: this model is dense, it has no experts to route to")
    if not limits.captures_routes:
        raise UnsupportedFeature(
            "return_routed_experts: this server does not record routes; start it with --enable-return-routed-experts"
        )


def _numbered(params: HiddenStatesParams, prompt_len: int, num_layers: int) -> HiddenStatesParams:
    """Return the choices with layers counted from 0.  Raises `BadRequest` for ones that the model or prompt lacks."""
    if not 0 <= params.start <= prompt_len:
        raise BadRequest(
            f"hidden_states_start_len must be in 0..{prompt_len} (the prompt's length), got {params.start}"
        )
    if not params.layers:
        raise BadRequest("hidden_state_layers is empty: leave it out for the states after the final norm")
    for layer in params.layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise BadRequest(
                f"hidden_state_layers must be in 0..{num_layers} (0 is the embedding, {num_layers} the final norm), or "
                f"negative from the end, got {layer}"
            )
    layers = tuple(layer if layer >= 0 else num_layers + 1 + layer for layer in params.layers)
    if len(set(layers)) < len(layers):
        raise BadRequest("hidden_state_layers names a layer twice")
    return msgspec.structs.replace(params, layers=layers)
