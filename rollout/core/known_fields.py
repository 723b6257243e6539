"""Names of fields that SGLang 0.5.23, vLLM 0.33 and OpenAI know in requests, and the nearest known one to a typo.

Bodies and `SamplingParams` declare the fields that are honoured.  Here are the others: fields that are refused by name,
as they would change the sample or the reply, and harmless fields, which change neither here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from rollout.core.grammar import GRAMMAR_FIELDS
from rollout.core.sampling_params import ALIASES, NOT_ON_THE_WIRE, SamplingParams

UNSUPPORTED_SAMPLING_FIELDS = frozenset(
    {
        *("stop_regex", "beam_width", "custom_params", "use_beam_search", "guided_whitespace_pattern"),
        *("logits_processors", "logprob_token_ids", "extra_args"),
        *("truncate_prompt_tokens", "thinking_token_budget", "max_thinking_tokens", "repetition_detection"),
        *("trace_decode_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
        *("skip_reading_prefix_cache", "return_sample_support", "watermark", "watermarking", "choice"),
    }
)
"""Fields of either dialect whose effect would change the sample or the reply."""
UNSUPPORTED_GENERATE_FIELDS = UNSUPPORTED_SAMPLING_FIELDS | {
    *("input_embeds", "prompt_embeds", "image_data", "video_data", "audio_data", "features", "content_parts"),
    *("return_hidden_states", "return_indexer_topk", "return_entropy"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_token_offsets"),
    *("return_cached_tokens_details", "return_spec_tokens_details", "background"),
    *("session_params", "lora_id", "custom_logit_processor", "vllm_xargs", "positional_embed_overrides"),
    *("multi_item_delimiter_indices", "token_indices_to_pool", "routed_experts_prompt_start"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "ec_transfer_params"),
}
FIELDS_OF_SAMPLING_PARAMS = {
    name: f"sampling_params.{name}" for name in sorted(GRAMMAR_FIELDS | {"allowed_token_ids", "bad_words"})
}
"""Fields with a place in `sampling_params`, for bodies that have these, each with that place."""
SGLANG_SAMPLING_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""Fields of SGLang's `sampling_params`, each with the field of vLLM and OpenAI for the same."""
VLLM_SAMPLING_FIELDS = {
    "logprobs": "return_logprob and top_logprobs_num",
    "prompt_logprobs": "return_logprob and logprob_start_len",
    "routed_experts_prompt_start": "routed_experts_start_len",
}
"""Fields of vLLM's `sampling_params`, each with SGLang's fields for the same; a 0 counts as a wish too."""

MEDIA_FIELDS = frozenset(
    {
        *("mm_hashes", "mm_content_hashes", "use_audio_in_video", "video_config", "modalities", "encoder_urls"),
        *("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"),
        *("images_config", "mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs", "token_offsets"),
    }
)
"""They state how to read media, and media are refused."""
HARMLESS_FIELDS = MEDIA_FIELDS | {
    # they have a meaning only with a field that is refused
    *("bootstrap_pair_key", "decode_tp_size", "length_penalty", "truncation_side", "return_flat_raw_top_logprobs_b64"),
    *("require_reasoning", "reasoning_ended", "reasoning_parser_kwargs"),
    # logs, labels, routing and pace
    *("log_metrics", "no_logs", "custom_labels", "external_trace_header", "routing_key", "conversation_id", "kv_hints"),
    *("stream_interval", "user", "session_id", "model", "guided_decoding_backend"),
    # forms of objects that no reply over HTTP shows
    *("detokenize", "output_kind", "flat_logprobs", "return_bytes"),
}
HARMLESS_OPENAI_FIELDS = HARMLESS_FIELDS | {
    *("store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
"""Fields for the books that OpenAI's own server keeps."""
HARMLESS_CONTROL_FIELDS = frozenset({"torch_empty_cache", "pp_rank"})
"""Fields of SGLang and AReaL; here there is no such cache, and no pipeline."""

HARMLESS_SAMPLING_FIELDS = frozenset(
    {
        *("stream_interval", "length_penalty", "truncation_side", "detokenize", "output_kind", "flat_logprobs"),
        "guided_decoding_backend",
    }
)
KNOWN_SAMPLING_FIELDS = (
    HARMLESS_SAMPLING_FIELDS
    | {*SamplingParams.__struct_fields__, *ALIASES, *UNSUPPORTED_SAMPLING_FIELDS, *VLLM_SAMPLING_FIELDS}
    | GRAMMAR_FIELDS
) - NOT_ON_THE_WIRE
"""Fields that may stand in `sampling_params` of /generate."""
MAX_NAME_CHARS = 80
MAX_IGNORED = 32
"""The number of ignored fields that an answer names."""


def shown(name: str) -> str:
    """Return a client's name for something as a message may repeat it: in ASCII, and cut to a short text."""
    cut = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    return ascii(cut)[1:-1]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant to be; None if none is near."""
    return next(iter(difflib.get_close_matches(name[:MAX_NAME_CHARS], list(known), n=1)), None)


def unknown_field(path: str, known: Collection[str]) -> str:
    """Return the message on an unknown field; `path` ends with its name."""
    name = re.split(r"[.?: ]", path)[-1]
    guess = nearest(name, known)
    return f"{shown(path)} is not a known field" + ("" if guess is None else f"; did you mean {guess}?")
