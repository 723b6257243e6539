"""The launch settings and the running engine's facts as /server_info shows them.

Keys are never shown.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.scheduler_state import SchedulerState


def num_ranks(args: ServerArgs) -> int:
    """Return the number of ranks of all engines of the server, which join a weight update group."""
    return args.tp_size * (1 if args.enable_dp_attention else args.dp_size)


def vllm_config(args: ServerArgs, state: SchedulerState, context_length: int) -> dict[str, Any]:
    """Return what clients of vLLM's /server_info look for, under vLLM's names."""
    return {
        "model_config": {
            "model": args.model_path,
            "served_model_name": args.name,
            "dtype": f"torch.{state.dtype}",
            "max_model_len": context_length,
            "logprobs_mode": "processed_logprobs",
            "enable_return_routed_experts": args.captures_routes,
        },
        "parallel_config": {
            "tensor_parallel_size": args.tp_size,
            "pipeline_parallel_size": args.pp_size,
            "data_parallel_size": args.dp_size,
            "world_size": args.tp_size,
            "world_size_across_dp": num_ranks(args),
        },
        "cache_config": {"block_size": 1, "num_gpu_blocks": state.max_total_num_tokens},
        "lora_config": None
        if state.max_lora_rank is None
        else {"max_lora_rank": state.max_lora_rank, "max_loras": args.max_loras_per_batch},
        "weight_transfer_config": {"backend": "nccl"},
    }


def resolved_args(args: ServerArgs) -> dict[str, Any]:
    """Return `ServerArgs` without keys, plus settings of SGLang that this engine has only in their off state."""
    return args.public_dict() | {
        "served_model_name": args.name,
        "tokenizer_path": args.tokenizer_path or args.model_path,
        "gpu_id_step": 1,
        "num_gpus": num_ranks(args),
        "moe_dp_size": 1,
        "attn_dp_size": args.dp_size if args.enable_dp_attention else 1,
        "attn_cp_size": 1,
        "disaggregation_mode": "null",
        "disaggregation_bootstrap_port": None,
        "encoder_only": False,
        "enable_return_routed_experts": args.captures_routes,
        "enable_return_indexer_topk": False,
        "trust_remote_code": False,
        "load_format": "auto",
    }


def running_facts(state: SchedulerState) -> dict[str, Any]:
    """Return the facts of the running engine that clients look for at the top; the rest is in `internal_states`."""
    names = (
        "weight_version",
        "draft",
        "weight_update",
        "batch_invariant",
        "batch_invariance_note",
        "plain_torch_reason",
    )
    return {name: getattr(state, name) for name in names}


def kv_events_facts(args: ServerArgs, ranks: Sequence[SchedulerState]) -> dict[str, Any] | None:
    """Return where events of the prefix cache are published, and how many batches each data-parallel rank has sent.

    `granularity`: requests find a cached prefix only up to a multiple of this number of tokens.
    """
    if args.kv_events is None:
        return None
    return args.kv_events.description(args.dp_size) | {
        "granularity": ranks[0].prefix_granularity,
        "num_batches": [rank.num_kv_event_batches for rank in ranks],
    }


def launch_command(args: ServerArgs) -> str:
    """Return the command line that gives these settings, without keys."""
    given = {}
    for item in dataclasses.fields(args):
        value = getattr(args, item.name)
        if not item.metadata.get("secret") and value != item.default and value is not None:
            given[item.name] = value if isinstance(value, bool) else str(value)
    return shlex.join(["lockstep", "serve", *flag_words(given)])


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings, as `{"tp_size": 2, "enable_eplb": True}`, as words of a command line.  None leaves one out."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            is_own = name in ServerArgs.__dataclass_fields__  # settings of others come this way, too
            off = flag.replace("disable-", "enable-", 1) if is_own and flag.startswith("disable-") else f"no-{flag}"
            words.append(f"--{flag if value else off}")
        elif value is not None:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words
