"""The flags of `lockstep serve` in groups, as data: for the help, and for the page of the reference.

for group in flag_groups():
    for flag in group.flags: ...
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rollout.core.args.foreign_flags import ALIASES, OPPOSITES
from rollout.core.args.server_args import ServerArgs

GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        *("model_path", "tokenizer_path", "served_model_name", "skip_tokenizer_init", "dtype", "context_length"),
        *("latent_norm_eps", "json_model_override_args"),
    ),
    "network and access": (
        *("host", "port", "api_key", "admin_api_key", "allow_unauthenticated", "allowed_hosts", "receive_timeout"),
        *("register_url", "enable_metrics", "log_level"),
    ),
    "requests and answers": (
        *("strict_requests", "random_seed", "tool_call_parser", "reasoning_parser", "return_sampling_mask"),
        *("sampling_mask_max_tokens", "max_logprob_entries", "max_request_mb", "incremental_streaming_output"),
    ),
    "device and kernels": (
        *("device", "base_gpu_id", "num_threads", "cpu_isa", "cpu_weight_format", "cpu_linear_format"),
        *("quantization", "attention_backend", "disable_native_kernels", "disable_cuda_graph", "cuda_graph_max_bs"),
        *("piecewise_cuda_graph_max_tokens", "enable_deterministic_inference"),
    ),
    "scheduling": (
        *("max_running_requests", "max_queued_requests", "chunked_prefill_size", "disable_overlap_schedule"),
        *("pause_timeout", "drain_timeout"),
    ),
    "KV cache and memory": (
        *(
            "max_total_tokens",
            "kv_cache_dtype",
            "quantization_param_path",
            "mem_fraction_static",
            "disable_radix_cache",
            "max_kv_version_lag",
        ),
        *(
            "session_pin_fraction",
            "session_pin_timeout",
            "session_record_mb",
            "max_state_rows",
            "state_snapshot_interval",
        ),
        *("kv_events_config", "enable_memory_saver", "enable_weights_cpu_backup"),
    ),
    "drafts (speculative decoding)": (
        *("speculative_algorithm", "speculative_num_draft_tokens", "speculative_ngram_capacity"),
        *("speculative_draft_model_path", "speculative_num_steps"),
    ),
    "adapters (LoRA)": ("enable_lora", "lora_paths", "max_loras_per_batch", "max_lora_rank", "lora_target_modules"),
    "routes": ("enable_return_routed_experts", "return_routed_experts_by_default", "vllm_routed_experts"),
    "weight updates": (
        *("weight_version", "weight_staging", "weight_journal_dir", "keep_staging_memory", "weight_folders"),
        *("weight_update_timeout", "max_weight_call_bytes", "max_payload_bytes", "cast_weight_updates"),
        "quantize_weight_updates",
    ),
    "placement of experts (EPLB)": (
        *("enable_eplb", "eplb_algorithm", "eplb_rebalance_num_iterations"),
        *("eplb_min_rebalancing_utilization_threshold", "eplb_rebalance_layers_per_chunk", "init_expert_location"),
        *("ep_num_redundant_experts", "expert_distribution_recorder_mode"),
    ),
    "ranks and machines": (
        *("tp_size", "ep_size", "dp_size", "enable_dp_attention", "moe_a2a_backend", "deepep_mode", "nnodes"),
        *("node_rank", "dist_init_addr", "pp_size", "disable_custom_all_reduce"),
    ),
}
"""Every setting, once: a title of the help, and its flags in the order of the help."""


class Flag(NamedTuple):
    """A setting on the command line.  `choices`: None where any value of `type` may stand.

    `aliases`: other spellings of `name`; `opposites`: flags that switch it off.
    """

    setting: str
    name: str
    aliases: tuple[str, ...]
    opposites: tuple[str, ...]
    type: type
    choices: tuple[str, ...] | None
    default: Any
    is_required: bool
    help: str


class FlagGroup(NamedTuple):
    """`title`: lower case, as in the help."""

    title: str
    flags: tuple[Flag, ...]


def flag_groups() -> tuple[FlagGroup, ...]:
    """Return the flags of `lockstep serve`, in the groups and the order of its help."""
    flags = {flag.setting: flag for flag in flags_of(ServerArgs)}
    return tuple(FlagGroup(title, tuple(flags[name] for name in names)) for title, names in GROUPS.items())


def flags_of(settings: type) -> list[Flag]:
    """Return a flag for each field of a dataclass whose fields have their help as metadata."""
    hints = typing.get_type_hints(settings)
    return [_flag_of(item, hints[item.name]) for item in dataclasses.fields(settings)]


def _flag_of(item: dataclasses.Field[Any], hint: Any) -> Flag:
    kind, choices = _kind(hint)
    name = flag_name(item.name)
    aliases = [flag_name(alias) for alias in ALIASES.get(item.name, ())]
    opposites: list[str] = []
    if kind is bool and item.name.startswith("disable_"):
        others = [other for other, setting in OPPOSITES.items() if setting == item.name]
        opposites = [flag_name(other) for other in (f"enable_{item.name.removeprefix('disable_')}", *others)]
    elif kind is bool:
        opposites = [flag.replace("--", "--no-", 1) for flag in (name, *aliases)]
    metadata: Mapping[str, Any] = item.metadata
    return Flag(
        item.name,
        name,
        tuple(aliases),
        tuple(opposites),
        kind,
        metadata.get("choices", choices),
        item.default,
        metadata.get("required", False),
        metadata["help"],
    )


def flag_name(setting: str) -> str:
    """Return the flag of a setting: `--max-total-tokens` of `max_total_tokens`."""
    return "--" + setting.replace("_", "-")


def _kind(hint: Any) -> tuple[type, tuple[str, ...] | None]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    return hint, None
