"""What this server and model can do, and the refusal of everything else, before the scheduler hears of it.

Knows the vocabulary, the context and the caps.  Does not know tokenizers or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rollout.core.errors import BadRequest, TooLarge, UnsupportedFeature
from rollout.core.sampling_params import SamplingParams
from rollout.tokenizer_manager.request import MAX_TOKEN_IDS_LOGPROB, OutputOptions, PromptRequest

MAX_TOP_LOGPROBS = 1024
MAX_TOP_K = 2**31 - 1


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

    def room(self, prompt_len: int) -> int:
        """Most tokens that can follow a prompt of `prompt_len` tokens."""
        return max(min(self.context_length, self.max_total_num_tokens) - prompt_len, 0)

    def wants_routes(self, options: OutputOptions) -> bool:
        """Whether the request gets routed experts: its own word, else the server's default."""
        if options.return_routed_experts is None:
            return self.returns_routes_by_default and self.captures_routes
        return options.return_routed_experts


def check_prompt(prompt: PromptRequest, input_ids: Sequence[int], limits: ServingLimits) -> SamplingParams:
    """The sampling parameters to use for `prompt`, whose tokens are `input_ids`.

    They are the request's own, with `max_new_tokens` filled in where the caller left it to the server, and with the
    tokenizer's end token.  Raises `BadRequest` or `UnsupportedFeature` naming the first thing that is wrong.
    """
    _check_prompt_length(len(input_ids), limits.context_length)
    check_token_ids(input_ids, limits.vocab_size, "input_ids")
    params = _with_length(prompt, len(input_ids), limits)
    params.validate(limits.vocab_size)
    if params.top_k > MAX_TOP_K:
        raise BadRequest(f"sampling_params: top_k must be at most {MAX_TOP_K}, got {params.top_k}")
    _check_stop(params, limits)
    _check_length(len(input_ids), params.max_new_tokens, limits)
    _check_logprobs(prompt.options, len(input_ids), limits.vocab_size)
    _check_routes(prompt.options, len(input_ids), limits)
    if limits.eos_token_id is None or params.ignore_eos:
        return params
    return msgspec.structs.replace(params, stop_token_ids=[*params.stop_token_ids, limits.eos_token_id])


def check_logprob_entries(num_entries: int, limit: int) -> None:
    """Raises `TooLarge` for more than one request may get."""
    if num_entries > limit:
        raise TooLarge(
            f"up to {num_entries} top and chosen log-probabilities (n x tokens x (top_logprobs_num + "
            f"token_ids_logprob), over all prompts) are over the limit of {limit} of a request: ask for fewer tokens "
            "or alternatives, split it, or start the server with a larger --max-logprob-entries"
        )


def num_logprob_entries(options: OutputOptions, prompt_len: int, params: SamplingParams) -> int:
    """Most top and chosen log-probabilities that the samples of one prompt can get."""
    if not options.return_logprob:
        return 0
    scored = prompt_len - options.logprob_start_len if options.logprob_start_len >= 0 else 0
    a_token = options.top_logprobs_num + len(options.token_ids_logprob or ())
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


def _with_length(prompt: PromptRequest, prompt_len: int, limits: ServingLimits) -> SamplingParams:
    if not prompt.fill_context:
        return prompt.sampling_params
    params, room = prompt.sampling_params, limits.room(prompt_len)
    return msgspec.structs.replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))


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


def _check_logprobs(options: OutputOptions, prompt_len: int, vocab_size: int) -> None:
    start = options.logprob_start_len
    if not -1 <= start <= prompt_len:
        raise BadRequest(f"logprob_start_len must be -1 or in 0..{prompt_len} (the prompt's length), got {start}")
    if not 0 <= options.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"top_logprobs_num must be in 0..{MAX_TOP_LOGPROBS}, got {options.top_logprobs_num}")
    if options.top_logprobs_num > vocab_size:
        raise BadRequest(f"top_logprobs_num is over the vocabulary's {vocab_size}, got {options.top_logprobs_num}")
    chosen = options.token_ids_logprob or []
    if len(chosen) > MAX_TOKEN_IDS_LOGPROB:
        raise BadRequest(f"token_ids_logprob holds at most {MAX_TOKEN_IDS_LOGPROB} ids, got {len(chosen)}")
    check_token_ids(chosen, vocab_size, "token_ids_logprob")


def _check_routes(options: OutputOptions, prompt_len: int, limits: ServingLimits) -> None:
    start = options.routed_experts_start_len
    if not 0 <= start <= prompt_len:
        raise BadRequest(f"routed_experts_start_len must be in 0..{prompt_len} (the prompt's length), got {start}")
    if not options.return_routed_experts:
        return
    if not limits.is_moe:
        raise UnsupportedFeature("return_routed_experts: this model is dense, it has no experts to route to")
    if not limits.captures_routes:
        raise UnsupportedFeature(
            "return_routed_experts: this server does not record routes; start it with --enable-return-routed-experts"
        )
