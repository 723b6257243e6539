"""Every field that SGLang 0.5.23 or vLLM knows at an endpoint that generates is honoured, refused by name, or harmless.

The names are data, written down from the two servers' request classes.
"""

from __future__ import annotations

import pytest

from rollout.core.errors import UnsupportedFeature
from rollout.core.grammar import GRAMMAR_FIELDS
from rollout.core.known_fields import (
    HARMLESS_SAMPLING_FIELDS,
    KNOWN_SAMPLING_FIELDS,
    UNSUPPORTED_SAMPLING_FIELDS,
    VLLM_SAMPLING_FIELDS,
)
from rollout.core.sampling_params import ALIASES, NOT_ON_THE_WIRE, SamplingParams
from rollout.http.generation import StreamOptions
from rollout.http.native.generate import GenerateRequest
from rollout.http.native.tokenize import TokenizeRequest
from rollout.http.openai.protocol import ChatCompletionRequest, CompletionRequest
from rollout.http.protocol import Body, refuse_unsupported, unknown_fields
from rollout.http.vllm.generate import TokenGenerateRequest, TokenSamplingParams

SGLANG_GENERATE = """
rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes
use_audio_in_video video_config sampling_params watermark return_logprob logprob_start_len top_logprobs_num
token_ids_logprob return_sampling_mask sampling_logprobs_mode return_text_in_logprobs return_flat_raw_top_logprobs
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states
return_routed_experts routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id
custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key
decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank routing_key conversation_id background
require_reasoning max_thinking_tokens priority extra_key no_logs custom_labels return_bytes return_entropy
return_prompt_token_ids external_trace_header encoder_urls max_dynamic_patch min_dynamic_patch
image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs multi_item_delimiter_indices
token_indices_to_pool cache_salt kv_hints
"""
OF_GENERATE = """
rid session_id extra_key routed_dp_rank data_parallel_rank max_kv_version_lag return_routed_experts return_logprob
"""
"""Fields that callers of /generate may send to the token endpoint out of habit."""
SGLANG_SAMPLING = """
max_new_tokens min_new_tokens temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty stop
stop_token_ids stop_regex ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim n beam_width
json_schema regex ebnf structural_tag logit_bias sampling_seed stream_interval custom_params watermark choice
"""
SGLANG_OPENAI = """
model n seed stop stream stream_options temperature top_p user frequency_penalty presence_penalty logit_bias logprobs
max_tokens return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_spec_tokens_details return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids
stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params response_format
custom_params custom_logit_processor watermark images_config mm_processor_kwargs data_parallel_rank rid extra_key
cache_salt priority
"""
SGLANG_COMPLETIONS = SGLANG_OPENAI + " prompt best_of echo suffix json_schema custom_labels"
SGLANG_CHAT = (
    SGLANG_OPENAI
    + """
messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids
return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 reasoning_effort thinking task
continue_final_message separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch
use_audio_in_video video_config input_ids
"""
)
VLLM_OPENAI = """
model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs repetition_detection thinking_token_budget stream_interval
"""
VLLM_COMPLETIONS = VLLM_OPENAI + " prompt suffix prompt_embeds"
VLLM_CHAT = (
    VLLM_OPENAI
    + """
messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning parallel_tool_calls
add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs return_prompt_text
"""
)
VLLM_TOKENS = """
request_id token_ids token_offsets features content_parts sampling_params model reasoning_ended reasoning_parser_kwargs
return_token_ids output_mode stream stream_options cache_salt priority kv_transfer_params ec_transfer_params
return_sample_support
"""
VLLM_TOKENIZE = """
model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message chat_template
chat_template_kwargs mm_processor_kwargs media_io_kwargs tools
"""
OPENAI_BOOKS = """
store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention user
"""
ROUTER_GENERATE = """
background log_metrics no_logs return_bytes return_entropy return_hidden_states return_text_in_logprobs model stream
"""
"""Fields that sglang-router adds."""
VLLM_SAMPLING = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
ignore_eos max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids flat_logprobs detokenize
skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval
structured_outputs logit_bias allowed_token_ids extra_args routed_experts_prompt_start bad_words
skip_reading_prefix_cache thinking_token_budget repetition_detection watermarking truncate_prompt_tokens
trace_decode_token_ids prompt_logprob_token_ids prompt_logprob_start
"""


@pytest.mark.parametrize(
    ("names", "body"),
    [
        (SGLANG_GENERATE, GenerateRequest),
        (SGLANG_COMPLETIONS, CompletionRequest),
        (SGLANG_CHAT, ChatCompletionRequest),
        (VLLM_COMPLETIONS, CompletionRequest),
        (VLLM_CHAT, ChatCompletionRequest),
        (VLLM_TOKENS, TokenGenerateRequest),
        (VLLM_SAMPLING, TokenSamplingParams),
        (SGLANG_SAMPLING, TokenSamplingParams),
        (SGLANG_SAMPLING, ChatCompletionRequest),
        (OF_GENERATE, TokenGenerateRequest),
        ("include_usage continuous_usage_stats", StreamOptions),
        (VLLM_TOKENIZE, TokenizeRequest),
        (OPENAI_BOOKS, ChatCompletionRequest),
        (ROUTER_GENERATE, GenerateRequest),
    ],
)
def test_no_known_field_is_ignored(names: str, body: type[Body]) -> None:
    assert not unknown_fields(body, dict.fromkeys(names.split(), 1))
    assert (
        not set(names.split()) - body.model_fields.keys() - body.unsupported - body.other_names.keys() - body.harmless
    )
    for name in set(names.split()) & body.other_names.keys():
        with pytest.raises(UnsupportedFeature, match=f"{name} is not known here; ask with "):
            body.model_validate({name: 0})
    for name in set(names.split()) & body.unsupported:
        with pytest.raises(UnsupportedFeature, match=name):
            body.model_validate({name: [1]})


def test_nothing_is_refused_that_is_a_field() -> None:
    for body in (GenerateRequest, CompletionRequest, ChatCompletionRequest, TokenGenerateRequest, TokenSamplingParams):
        assert not body.unsupported & body.model_fields.keys(), body


@pytest.mark.parametrize("names", [SGLANG_SAMPLING, VLLM_SAMPLING])
def test_no_known_sampling_parameter_is_ignored_by_generate(names: str) -> None:
    honoured = {*SamplingParams.__struct_fields__, *ALIASES} - NOT_ON_THE_WIRE | GRAMMAR_FIELDS
    refused = UNSUPPORTED_SAMPLING_FIELDS | VLLM_SAMPLING_FIELDS.keys()
    assert not set(names.split()) - honoured - refused - HARMLESS_SAMPLING_FIELDS
    assert not set(names.split()) - KNOWN_SAMPLING_FIELDS
    for name in set(names.split()) & refused:
        with pytest.raises(UnsupportedFeature, match=name):
            GenerateRequest(input_ids=[1], sampling_params={name: 1}).to_request({})


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_thinking_tokens"])
def test_a_budget_of_0_asks_for_something_and_none_for_nothing(name: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(UnsupportedFeature, match=name):
        ChatCompletionRequest.model_validate(chat | {name: 0})
    for nothing in (None, -1):
        ChatCompletionRequest.model_validate(chat | {name: nothing})


def test_a_field_that_asks_for_nothing_is_no_reason_to_refuse() -> None:
    for nothing in (None, False, [], {}, ""):
        refuse_unsupported({"regex": nothing}, UNSUPPORTED_SAMPLING_FIELDS)
