"""Flags as vLLM's and SGLang's launch scripts spell them, in the words of `lockstep serve`.

One table for the command line, for calls in Python and for the redirected launchers.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.core.args import speculative_config
from rollout.core.args.parser import hint
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
    "lora_paths": ("lora_modules",),
    "max_loras_per_batch": ("max_loras",),
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

VALUES_OF_SWITCHES = {"disable_piecewise_cuda_graph": ("piecewise_cuda_graph_max_tokens", 0)}
"""Names that give a setting one value: the setting, and the value."""

EXPERT_PARALLEL = "enable_expert_parallel"
"""vLLM's flag that spreads whole experts over all ranks: `ep_size` is `tp_size`."""

# Flags without a value that tune kernels, graphs, processes and logs of SGLang or vLLM, and change no answer here.
SWITCHES = frozenset(
    {
        # SGLang
        *("disable_cuda_graph_padding", "enable_torch_compile"),
        *("enable_p2p_check", "enable_symm_mem", "skip_server_warmup", "enable_nccl_nvls"),
        *("disable_shared_experts_fusion", "disable_chunked_prefix_cache", "enable_mixed_chunk"),
        *("enable_draft_weights_cpu_backup", "enable_return_hidden_states"),
        *("log_requests", "show_time_cost", "collect_tokens_histogram", "enable_cache_report"),
        *("enable_two_batch_overlap", "enable_dp_lm_head", "disable_fast_image_processor", "is_embedding"),
        # both
        "trust_remote_code",
        # vLLM
        *("disable_log_requests", "enable_log_requests", "disable_log_stats", "enable_log_outputs"),
        *("disable_uvicorn_access_log", "disable_frontend_multiprocessing", "async_scheduling"),
        *("enable_chunked_prefill", "enable_auto_tool_choice", "enable_server_load_tracking"),
        *("skip_mm_profiling", "language_model_only", "disable_cascade_attn", "disable_hybrid_kv_cache_manager"),
    }
)
# Flags of the same kind that take a value.
WITHOUT_EFFECT = SWITCHES | {
    # SGLang
    *("decode_attention_backend", "prefill_attention_backend", "mm_attention_backend"),
    *("sampling_backend", "grammar_backend", "moe_runner_backend", "fp8_gemm_runner_backend"),
    *("cuda_graph_bs", "torch_compile_max_bs", "gpu_id_step", "nccl_port"),
    *("warmups", "numa_node", "watchdog_timeout", "dist_timeout"),
    *("schedule_policy", "schedule_conservativeness", "max_prefill_tokens", "num_continuous_decode_steps"),
    *("rl_on_policy_target", "log_level_http", "log_requests_level", "decode_log_interval"),
    *("stream_interval", "crash_dump_folder", "engine_info_bootstrap_port", "tokenizer_worker_num"),
    *("page_size", "load_balance_method"),
    "lora_backend",
    # both
    "download_dir",
    # vLLM
    *("max_log_len", "uvicorn_log_level", "api_server_count"),
    *("distributed_executor_backend", "max_parallel_loading_workers", "num_scheduler_steps"),
    *("block_size", "swap_space", "max_seq_len_to_capture", "kv_cache_memory_bytes"),
    *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"),
    *("guided_decoding_backend", "structured_outputs_config", "max_logprobs"),
    *("weight_transfer_config", "mm_processor_cache_gb", "limit_mm_per_prompt", "safetensors_load_strategy"),
}
_MANY_ENTRIES = ("lora_paths", "lora_modules", "lora_target_modules")
"""Flags whose words make one value, with commas between them."""
_MANY_NUMBERS = ("cuda_graph_bs", "cudagraph_capture_sizes", "numa_node")
# Flags that are harmless with these values only.
HARMLESS_VALUES = {
    "load_format": {"auto", "safetensors"},
    "disaggregation_mode": {"null"},
    "speculative_eagle_topk": {"1"},
    "sampling_defaults": {"openai"},
    "generation_config": {"vllm"},
    "override_generation_config": {"{}"},
    "logprobs_mode": {"processed_logprobs"},
    "tokenizer_mode": {"auto"},
    "config_format": {"auto"},
    "model_impl": {"auto"},
    "runner": {"auto", "generate", "pooling"},
    "convert": {"auto", "none"},
    "task": {"auto", "generate", "embed", "classify", "score", "reward"},
}
_QUANTISATION = (
    "--quantization holds weights in 8 or 4 bits on CUDA, --cpu-weight-format and --cpu-linear-format on a CPU"
)
_REVISION = "a model is a folder; `hf download NAME --revision REVISION --local-dir DIR` writes one"
_DEFAULTS = "defaults of generation_config.json are not applied; send sampling parameters with each request"
_TEXT_ONLY = "the server reads text, and architectures in config.json name the head"
_TLS = "the server speaks plain HTTP; put a proxy with TLS in front of it"
_OWN_CODE = "no code is loaded by a flag"
_OWN_MODELS = "the server has its own models, which it builds from config.json"
_SPLIT = "prefill and decode run on the same ranks"
REFUSED = {
    "torchao_config": _QUANTISATION,
    "calculate_kv_scales": "scales of KV come from the checkpoint or from --quantization-param-path",
    "logprobs_mode": "log-probabilities belong to the distribution that tokens are sampled from",
    "generation_config": _DEFAULTS,
    "override_generation_config": _DEFAULTS,
    "sampling_defaults": _DEFAULTS,
    "preferred_sampling_params": _DEFAULTS,
    "speculative_eagle_topk": "a draft is one chain of tokens, not a tree",
    "load_format": "weights are read from the safetensors files of the folder",
    "revision": _REVISION,
    "code_revision": _REVISION,
    "tokenizer_revision": _REVISION,
    "hf_token": _REVISION,
    "return_tokens_as_token_ids": "requests ask for ids themselves, with return_token_ids",
    "chat_template": "the template of the model's folder is used; change it there",
    "model_impl": _OWN_MODELS,
    "config_format": _OWN_MODELS,
    "tokenizer_mode": "the tokenizer is read from tokenizer.json, or from tiktoken files",
    "disaggregation_mode": _SPLIT,
    "kv_transfer_config": _SPLIT,
    "enable_multimodal": _TEXT_ONLY,
    "task": _TEXT_ONLY,
    "runner": _TEXT_ONLY,
    "convert": _TEXT_ONLY,
    "cpu_offload_gb": "weights stay on one device; use more ranks",
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "ssl_ca_certs": _TLS,
    "root_path": "routes have fixed paths; a proxy can add a prefix",
    "middleware": _OWN_CODE,
    "logits_processors": _OWN_CODE,
    "enable_custom_logit_processor": _OWN_CODE,
    "worker_extension_cls": _OWN_CODE,
    "prefill_context_parallel_size": "ranks share heads and experts; they do not split a sequence",
    "decode_context_parallel_size": "ranks share heads and experts; they do not split a sequence",
}
"""Flags that would change answers, or that ask for something that the server lacks, and the reason."""
_DTYPES = {"half": "float16", "float": "float32"}
_COUNTS = ("max_model_len", "max_num_batched_tokens")
_COUNTED = ("context_length", "chunked_prefill_size")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass
class OwnWords:
    """The `words` that the server's own parser reads, and flags as they were written that it does not.

    `unused` have no effect here.  `refused` have a reason.  `unknown` flags have no owner, and are among the words.
    """

    words: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def own_words(argv: Sequence[str], outranked: Sequence[str] = ()) -> OwnWords:
    """Sort the flags of a command line, and spell values as the server does.

    The one word that belongs to no flag is the model, as for `vllm serve`.  `outranked`: flags of other places, over
    which the command line wins.
    """
    found, spreads_experts, bare, given = OwnWords(), False, list[str](), list(_flags(argv))
    for written, name, values in (*_flags(outranked), *given):
        base = name.removeprefix("no_")
        if not written:
            bare += values
        elif base == EXPERT_PARALLEL:
            spreads_experts = base == name
        elif name in VALUES_OF_SWITCHES:
            setting, value = VALUES_OF_SWITCHES[name]
            found.words += [f"--{setting.replace('_', '-')}", str(value)]
        elif base in _KNOWN or name in _KNOWN:
            found.words += _joined(written, _own_values(base, values))
        elif name == speculative_config.NAME:
            _take_config(found, written, values)
        elif _is_harmless(name, values):
            found.unused.append(written)
        elif name in REFUSED:
            found.refused[written] = REFUSED[name]
        else:
            found.unknown.append(written)
            found.words += [written, *values]
    if len(bare) == 1 and not any(name in _names("model_path") for _, name, _ in given):
        found.words += _joined("--model-path", bare)
    else:
        found.unknown += bare
        found.words += bare
    if spreads_experts:
        found.words += _spread_over_all(found.words)
    return found


def _take_config(found: OwnWords, written: str, values: Sequence[str]) -> None:
    """Add the words of vLLM's object of drafts."""
    try:
        settings, unused = speculative_config.settings_of(values[0] if values else "")
    except StartupError as error:
        found.refused[written] = str(error)
        return
    for name, value in settings.items():
        found.words += _joined(f"--{name.replace('_', '-')}", [str(value)])
    found.unused += [f"{written} {key}" for key in unused]


def _is_harmless(name: str, values: Sequence[str]) -> bool:
    """Return whether a flag of vLLM or SGLang changes no answer here; a refused one may be turned off."""
    base = name.removeprefix("no_")
    is_off = base != name and (base in REFUSED or base in VALUES_OF_SWITCHES)
    return is_off or base in WITHOUT_EFFECT or (bool(values) and values[0] in HARMLESS_VALUES.get(name, ()))


def names_of_settings() -> Mapping[str, str]:
    """Return the setting of each name that this server has for it: of `tp`, `tp_size`."""
    own = _OWN_NAMES | OPPOSITES | {name: name.replace("enable_", "disable_", 1) for name in _ENABLING}
    own |= {name: setting for name, (setting, _) in VALUES_OF_SWITCHES.items()}
    return {name: own.get(name, name) for name in sorted((_KNOWN | VALUES_OF_SWITCHES.keys()) - _NO_SETTINGS)}


def takes_no_value(name: str) -> bool:
    """Return whether a flag is on or off."""
    return name.removeprefix("no_") in _ON_OFF | SWITCHES


def is_known(name: str) -> bool:
    """Return whether this server has the flag, or a table here names it."""
    return name in _KNOWN or name in VALUES_OF_SWITCHES or name == EXPERT_PARALLEL or _is_foreign(name)


def _is_foreign(name: str) -> bool:
    return name in WITHOUT_EFFECT or name in REFUSED or name == speculative_config.NAME


def settings_of_call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call under the server's own names, objects as JSON.

    Warns of arguments without effect.  Raises `StartupError` for one that is refused or unknown, and where a setting is
    given under two names.
    """
    own: dict[str, Any] = {}
    names = names_of_settings()
    for name, value in given.items():
        setting = names.get(name)
        is_opposite = name in OPPOSITES or name in _ENABLING
        if name == EXPERT_PARALLEL or (is_opposite and value is None) or (name in VALUES_OF_SWITCHES and not value):
            continue
        if name == speculative_config.NAME:
            settings, unused = ({}, []) if value is None else speculative_config.settings_of(value)
            if both := sorted(own.keys() & settings.keys()):
                raise StartupError(f"{' and '.join((name, *both))} are the same setting: give only one")
            own |= settings
            for key in unused:
                _warn_of(f"{name}.{key}")
            continue
        if setting is None:
            _check_foreign(name, value)
            continue
        if setting in own:
            both = [other for other in given if names.get(other) == setting or other == speculative_config.NAME]
            raise StartupError(f"{' and '.join(both)} are the same setting: give only one")
        own[setting] = not value if is_opposite else _own_value(setting, name, value)
    if given.get(EXPERT_PARALLEL):
        own.setdefault("ep_size", own.get("tp_size", 1))
    return own


def _own_value(setting: str, name: str, value: Any) -> Any:
    if name in VALUES_OF_SWITCHES:
        if value is not True:
            raise StartupError(f"{name} is {value}: it must be true or false")
        return VALUES_OF_SWITCHES[name][1]
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list | tuple | set) and setting in _MANY_ENTRIES:
        return ",".join(map(str, value))
    if not isinstance(value, str):
        return value
    (text,) = _own_values(name, [value])
    return int(text) if setting in _COUNTED and text.isdigit() else text


def _check_foreign(name: str, value: Any) -> None:
    """Warn of an argument that changes no answer.  Raises `StartupError` for any other."""
    is_off = name in REFUSED and (value is None or value is False)
    if not is_off and not _is_harmless(name, [str(value)]):
        raise StartupError(f"{name}: {REFUSED.get(name) or f'unknown setting{hint(name, names_of_settings())}'}")
    _warn_of(name)


def _warn_of(name: str) -> None:
    warnings.warn(f"{name} of vLLM or SGLang has no effect", stacklevel=6)


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (flag as written, its name, its values) one by one.  A word of no flag has none: ""."""
    position = 0
    while position < len(argv):
        flag, equals, value = argv[position].partition("=")
        position += 1
        if not _is_flag(flag):
            yield "", "", [argv[position - 1]]
            continue
        flag = SHORT.get(flag, flag)
        name = flag.lstrip("-").replace("-", "_")
        values, rest = [value] if equals else [], None if equals else _num_values(name)
        while rest is not None and rest > 0 and position < len(argv) and not _is_flag(argv[position]):
            if values and name in _MANY_NUMBERS and not argv[position].isdigit():
                break
            values.append(argv[position])
            position, rest = position + 1, rest - 1
        yield flag, name, values


def _num_values(name: str) -> int:
    """Return how many of the next words are a flag's at most; for an unknown flag all of them."""
    is_off = name.startswith("no_") and name.removeprefix("no_") in REFUSED
    if takes_no_value(name) or is_off or name in ("h", "help"):
        return 0
    if name in _MANY_NUMBERS + _MANY_ENTRIES or not (name in _KNOWN or _is_foreign(name)):
        return sys.maxsize
    return 1


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in SHORT or word == "-h"


def _joined(flag: str, values: Sequence[str]) -> list[str]:
    """Return a flag and its values as words; a value that begins with a dash stays a value."""
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{flag}={values[0]}"]
    return [flag, *values]


def _own_values(name: str, values: list[str]) -> list[str]:
    """Convert vLLM's values of a flag to ours: `half` is `float16`, `32k` is 32000 and `32K` is 32768."""
    if name in _MANY_ENTRIES:
        return [",".join(values)] if values else []
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
_NO_SETTINGS = frozenset({"config", "help", "h"})
_KNOWN = frozenset(_SETTINGS | _OWN_NAMES.keys() | OPPOSITES.keys() | _ENABLING | _NO_SETTINGS)
_SWITCHED = {item.name for item in dataclasses.fields(ServerArgs) if str(item.type).startswith("bool")}
_ON_OFF = frozenset(
    {name for name in _KNOWN if _OWN_NAMES.get(name, name) in _SWITCHED}
    | {EXPERT_PARALLEL}
    | OPPOSITES.keys()
    | _ENABLING
    | VALUES_OF_SWITCHES.keys()
)
"""Names that take no value."""
