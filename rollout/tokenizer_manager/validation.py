"""Checks requests against what this server and model can do, before they are sent to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rollout.core.errors import BadRequest, TooLarge, UnsupportedFeature
from rollout.core.io_struct import SchedulerReady, TokenizedGenerateReqInput
from rollout.core.model_config import ModelConfig
from rollout.core.sampling_params import SamplingParams
from rollout.core.server_args import ServerArgs
from rollout.tokenizer_manager.replay import check_replay
from rollout.tokenizer_manager.request import MAX_TOKEN_IDS_LOGPROB, LogprobsFormat, Prompt
from rollout.tokenizer_manager.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 1024
MAX_TOP_K = 2**31 - 1
COMPACT_FACTOR = 8
"""So many log-probabilities in the compact form take as much memory as one in nested lists, or less."""


@dataclass(frozen=True)
class ServingLimits:
    """Facts that requests are checked against.

    `context_length` and `max_total_num_tokens` (size of the KV pool) are in tokens.  `eos_token_id`: an end token that
    the tokenizer names and the model's configuration does not.  `max_logprob_entries`: of one request.
    """

    vocab_size: int
    context_length: int
    max_total_num_tokens: int
    is_moe: bool
    captures_routes: bool
    returns_routes_by_default: bool
    has_tokenizer: bool
    eos_token_id: int | None = None
    max_logprob_entries: int = 1 << 22
    dp_size: int = 1

    @classmethod
    def of(
        cls, args: ServerArgs, config: ModelConfig, ready: SchedulerReady, tokenizer: Tokenizer | None
    ) -> ServingLimits:
        """Those of a server whose scheduler is ready."""
        return cls(
            vocab_size=config.vocab_size,
            context_length=ready.context_length,
            max_total_num_tokens=ready.max_total_num_tokens,
            is_moe=config.is_moe,
            captures_routes=ready.capture_routed_experts,
            returns_routes_by_default=args.return_routed_experts_by_default,
            has_tokenizer=tokenizer is not None,
            eos_token_id=None if tokenizer is None else _end_token(tokenizer, config),
            max_logprob_entries=args.max_logprob_entries,
            dp_size=args.dp_size,
        )

    def room(self, prompt_len: int) -> int:
        """Most tokens that can follow a prompt of `prompt_len` tokens."""
        return max(min(self.context_length, self.max_total_num_tokens) - prompt_len, 0)

    @property
    def routes_by_default(self) -> bool:
        """Whether a request that leaves `return_routed_experts` out gets routed experts."""
        return self.returns_routes_by_default and self.captures_routes

    def check_rank(self, dp_rank: int | None) -> None:
        """Raises `BadRequest` for a data-parallel rank that does not exist."""
        if dp_rank is not None and not 0 <= dp_rank < self.dp_size:
            raise BadRequest(f"routed_dp_rank must be in 0..{self.dp_size - 1} (--dp-size), got {dp_rank}")


def check_prompts(prompts: Sequence[Prompt], limits: ServingLimits, logprobs_format: LogprobsFormat = "nested") -> None:
    """Check the completed messages of a request, and fill in the sampling parameters that the server sets.

    These are `max_new_tokens` where the caller left it to the server, and the tokenizer's end token.  Raises
    `BadRequest`, `UnsupportedFeature` or `TooLarge`, naming the first thing that is wrong.
    """
    num_entries, limit = 0, limits.max_logprob_entries
    if logprobs_format == "compact":
        limit *= COMPACT_FACTOR
    for prompt in prompts:
        _check_prompt(prompt.source, prompt.default_new_tokens, limits)
        num_entries += _num_logprob_entries(prompt.source)
        if num_entries > limit:
            raise TooLarge(
                f"up to {num_entries} top and chosen log-probabilities (n x tokens x (top_logprobs_num + "
                f"token_ids_logprob), over all prompts) are over the limit of {limit} of a request: ask for fewer "
                "tokens or alternatives, or in the compact form, split it, or start the server with a larger "
                "--max-logprob-entries"
            )
    for prompt in prompts:
        source = prompt.source
        if source.replay is not None:
            check_replay(source.replay, len(source.input_ids), source.sampling_params.max_new_tokens)


def _end_token(tokenizer: Tokenizer, config: ModelConfig) -> int | None:
    """The tokenizer's, if it can be sampled and the scheduler does not know it from the model's configuration."""
    eos = tokenizer.eos_token_id
    return None if eos is None or eos >= config.vocab_size or eos in config.eos_token_ids else eos


def _check_prompt(source: TokenizedGenerateReqInput, default_new_tokens: int | None, limits: ServingLimits) -> None:
    prompt_len = len(source.input_ids)
    _check_prompt_length(prompt_len, limits.context_length)
    check_token_ids(source.input_ids, limits.vocab_size, "input_ids")
    params = source.sampling_params
    if default_new_tokens is not None:
        room = limits.room(prompt_len)
        params = msgspec.structs.replace(
            params,
            max_new_tokens=min(default_new_tokens, room),
            min_new_tokens=min(params.min_new_tokens, room),
        )
    params.validate(limits.vocab_size)
    if params.top_k > MAX_TOP_K:
        raise BadRequest(f"sampling_params: top_k must be at most {MAX_TOP_K}, got {params.top_k}")
    _check_stop(params, limits)
    _check_length(prompt_len, params.max_new_tokens, limits)
    _check_logprobs(source, limits.vocab_size)
    _check_routes(source, limits)
    if source.return_sampling_mask and not params.filters:
        raise BadRequest(
            "return_sampling_mask: with top_p 1, top_k -1 and min_p 0 every token of the vocabulary can be sampled; "
            "there is no mask"
        )
    if limits.eos_token_id is not None and not params.ignore_eos:
        params = msgspec.structs.replace(params, stop_token_ids=[*params.stop_token_ids, limits.eos_token_id])
    source.sampling_params = params


def _num_logprob_entries(source: TokenizedGenerateReqInput) -> int:
    """Most top and chosen log-probabilities that the samples of one prompt can get."""
    if not source.return_logprob:
        return 0
    start, params = source.logprob_start_len, source.sampling_params
    scored = len(source.input_ids) - start if start >= 0 else 0
    a_token = source.top_logprobs_num + len(source.token_ids_logprob or ())
    return params.n * (scored + params.max_new_tokens) * a_token


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises `BadRequest` naming the first id outside the vocabulary."""
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
            f"pool has {limits.max_total_num_tokens}; lower max_new_tokens or start with a larger --max-total-tokens"
        )


def _check_logprobs(source: TokenizedGenerateReqInput, vocab_size: int) -> None:
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
    check_token_ids(chosen, vocab_size, "token_ids_logprob")


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
