"""Flags as vLLM's and SGLang's launch scripts spell them, in the words of `lockstep serve`.

One table for the command line, for calls in Python and for the redirected launchers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError

ALIASES: dict[str, tuple[str, ...]] = {
    "model_path": ("model",),
    "tokenizer_path": ("tokenizer",),
    "json_model_override_args": ("hf_overrides",),
    "context_length": ("max_model_len",),
    "mem_fraction_static": ("gpu_memory_utilization",),
    "max_running_requests": ("max_num_seqs",),
    "chunked_prefill_size": ("max_num_batched_tokens",),
    "random_seed": ("seed",),
    "disable_cuda_graph": ("enforce_eager",),
    "enable_memory_saver": ("enable_sleep_mode",),
    "tp_size": ("tensor_parallel_size", "tp"),
    "dp_size": ("data_parallel_size", "dp"),
    "ep_size": ("expert_parallel_size", "ep"),
    "pp_size": ("pipeline_parallel_size", "pp"),
}
"""Other names of the server's settings that mean the same."""

SHORT = {"-tp": "--tp-size", "-dp": "--dp-size", "-pp": "--pp-size"}
"""vLLM's short flags."""

OPPOSITES = {"enable_prefix_caching": "disable_radix_cache"}
"""Names that turn on what a setting turns off.  Every `disable_x` also has `enable_x`."""

# Flags that tune kernels, graphs, processes and logs of SGLang or vLLM, and change no answer here.
WITHOUT_EFFECT = frozenset(
    {
        # SGLang
        *("decode_attention_backend", "prefill_attention_backend", "mm_attention_backend"),
        *("sampling_backend", "grammar_backend", "moe_runner_backend", "fp8_gemm_runner_backend"),
        *("cuda_graph_bs", "disable_cuda_graph_padding"),
        *("enable_torch_compile", "torch_compile_max_bs", "disable_piecewise_cuda_graph"),
        *("gpu_id_step", "nccl_port", "enable_p2p_check", "enable_symm_mem"),
        *("skip_server_warmup", "warmups", "numa_node", "watchdog_timeout", "dist_timeout"),
        *("schedule_policy", "schedule_conservativeness", "max_prefill_tokens", "num_continuous_decode_steps"),
        *("disable_shared_experts_fusion", "disable_chunked_prefix_cache"),
        *("enable_deterministic_inference", "rl_on_policy_target", "enable_draft_weights_cpu_backup"),
        *("log_level_http", "log_requests", "log_requests_level", "show_time_cost", "decode_log_interval"),
        *("stream_interval", "collect_tokens_histogram", "crash_dump_folder", "engine_info_bootstrap_port"),
        *("enable_cache_report", "tokenizer_worker_num"),
        # both
        *("trust_remote_code", "disable_custom_all_reduce", "download_dir"),
        # vLLM
        *("disable_log_requests", "enable_log_requests", "disable_log_stats", "max_log_len"),
        *("uvicorn_log_level", "disable_uvicorn_access_log", "disable_frontend_multiprocessing", "api_server_count"),
        *("distributed_executor_backend", "max_parallel_loading_workers", "async_scheduling", "num_scheduler_steps"),
        *("enable_chunked_prefill", "block_size", "swap_space", "max_seq_len_to_capture", "kv_cache_memory_bytes"),
        *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"),
        *("guided_decoding_backend", "structured_outputs_config", "enable_auto_tool_choice", "max_logprobs"),
        *("weight_transfer_config", "enable_server_load_tracking", "skip_mm_profiling", "mm_processor_cache_gb"),
        *("limit_mm_per_prompt", "language_model_only", "safetensors_load_strategy"),
    }
)
# Flags that are harmless with these values only.
HARMLESS_VALUES = {
    "load_format": {"auto", "safetensors"},
    "disaggregation_mode": {"null"},
    "kv_cache_dtype": {"auto"},
    "sampling_defaults": {"openai"},
    "generation_config": {"vllm"},
    "override_generation_config": {"{}"},
    "logprobs_mode": {"processed_logprobs"},
    "tokenizer_mode": {"auto"},
    "config_format": {"auto"},
    "model_impl": {"auto"},
    "runner": {"auto", "generate"},
    "convert": {"auto", "none"},
    "task": {"auto", "generate"},
}
_DTYPES = {"half": "float16", "float": "float32"}
_COUNTS = ("max_model_len", "max_num_batched_tokens")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass
class OwnWords:
    """The `words` that the server's own parser reads.  `unused`, `unknown`: flags as they were written.

    `unused` have no effect here.  `unknown` are neither the server's nor harmless, and are among the words.
    """

    words: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def own_words(argv: Sequence[str]) -> OwnWords:
    """Sort the flags of a command line, and spell values as the server does.

    `MODEL` before all flags is `--model-path MODEL`, as for `vllm serve`.
    """
    found, spreads_experts = OwnWords(), False
    for written, name, values in _flags(argv):
        base = name.removeprefix("no_")
        if base == "enable_expert_parallel":
            spreads_experts = base == name
        elif base in _KNOWN or name in _KNOWN:
            found.words += [written, *_own_values(base, values)]
        elif base in WITHOUT_EFFECT or (values and values[0] in HARMLESS_VALUES.get(name, ())):
            found.unused.append(written)
        else:
            found.unknown.append(written or values[0])
            found.words += [written, *values] if written else values
    if spreads_experts:
        found.words += _spread_over_all(found.words)
    return found


def settings_of_call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call under the server's own names, objects as JSON.

    Raises `StartupError` where a setting is given under two names.
    """
    own: dict[str, Any] = {}
    for name, value in given.items():
        setting = _OWN_NAMES.get(name, name)
        if setting in own:
            both = [other for other in given if _OWN_NAMES.get(other, other) == setting]
            raise StartupError(f"{' and '.join(both)} are the same setting: give only one")
        own[setting] = json.dumps(value) if isinstance(value, dict) else value
    return own


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (flag as written, its name, its values) one by one.  Words before the first flag have none: ""."""
    position = 0
    while position < len(argv):
        flag, equals, value = argv[position].partition("=")
        if not _is_flag(flag):
            flag, equals, value = ("--model-path" if position == 0 else ""), "=", argv[position]
        values = [value] if equals else []
        position += 1
        while not equals and position < len(argv) and not _is_flag(argv[position]):
            values.append(argv[position])
            position += 1
        flag = SHORT.get(flag, flag)
        yield flag, flag.lstrip("-").replace("-", "_"), values


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in SHORT or word == "-h"


def _own_values(name: str, values: list[str]) -> list[str]:
    """Convert vLLM's values of a flag to ours: `half` is `float16`, `32k` is 32000 and `32K` is 32768."""
    if name == "dtype":
        return [_DTYPES.get(value, value) for value in values]
    return [_whole_number(value) for value in values] if name in _COUNTS else values


def _whole_number(text: str) -> str:
    match = _COUNT.fullmatch(text)
    return text if match is None else str(int(float(match[1]) * _UNITS[match[2]]))


def _spread_over_all(words: Sequence[str]) -> list[str]:
    """Return the flag that spreads whole experts over all ranks of `--tp-size`; none where `--ep-size` is given."""
    given = {name: values for _, name, values in _flags(words)}
    if any(name in given for name in _names("ep_size")):
        return []
    sizes = [given[name][-1] for name in _names("tp_size") if given.get(name)]
    return ["--ep-size", sizes[-1] if sizes else "1"]


def _names(setting: str) -> tuple[str, ...]:
    return (setting, *ALIASES.get(setting, ()))


_SETTINGS = {item.name for item in dataclasses.fields(ServerArgs)}
_OWN_NAMES = {other: setting for setting, others in ALIASES.items() for other in others}
_ENABLING = {f"enable_{name.removeprefix('disable_')}" for name in _SETTINGS if name.startswith("disable_")}
_KNOWN = frozenset(_SETTINGS | _OWN_NAMES.keys() | OPPOSITES.keys() | _ENABLING)
