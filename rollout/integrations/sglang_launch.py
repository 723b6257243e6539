"""SGLang's launch call and its flags, answered by this server.

    python -m rollout.integrations.sglang_launch --model-path ... --tp-size 2      as sglang.launch_server
    launch_server(server_args)                                                     as sglang.srt.entrypoints.http_server

With `rollout/integrations/sglang_redirect` on PYTHONPATH, a program that imports or runs SGLang's gets this one, in its
child processes too.  Flags in LOCKSTEP_FLAGS are added to those that the program gives.

Flags that this server has mean what they mean there.  Those that only tune SGLang are named in a warning and left out;
any other is refused, by name.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rollout.core.errors import LockstepError, StartupError
from rollout.core.server_args import ServerArgs
from rollout.entrypoints import serve
from rollout.entrypoints.server_info import flag_words

ALIASES = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "pipeline_parallel_size": "pp_size",
}
# What tunes SGLang's kernels, graphs, processes and logs, and does not change an answer.
WITHOUT_EFFECT = frozenset(
    {
        *("attention_backend", "decode_attention_backend", "prefill_attention_backend", "mm_attention_backend"),
        *("sampling_backend", "grammar_backend", "moe_runner_backend", "fp8_gemm_runner_backend"),
        *("cuda_graph_bs", "disable_cuda_graph_padding"),
        *("enable_torch_compile", "torch_compile_max_bs", "disable_piecewise_cuda_graph"),
        *("gpu_id_step", "nccl_port", "disable_custom_all_reduce", "enable_p2p_check", "enable_symm_mem"),
        *("trust_remote_code", "skip_server_warmup", "warmups", "numa_node", "watchdog_timeout", "dist_timeout"),
        *("schedule_policy", "schedule_conservativeness", "max_prefill_tokens", "num_continuous_decode_steps"),
        *("disable_shared_experts_fusion", "disable_chunked_prefix_cache"),
        *("enable_deterministic_inference", "rl_on_policy_target", "enable_draft_weights_cpu_backup"),
        *("log_level_http", "log_requests", "log_requests_level", "show_time_cost", "decode_log_interval"),
        *("stream_interval", "collect_tokens_histogram", "crash_dump_folder", "engine_info_bootstrap_port"),
    }
)
# Flags that are harmless with these values only.
HARMLESS_VALUES = {
    "load_format": {"auto", "safetensors"},
    "disaggregation_mode": {"null"},
    "kv_cache_dtype": {"auto"},
}


def main(argv: Sequence[str]) -> int:
    """Serve with SGLang's flags; the exit status.  A refusal is one line on stderr and status 1."""
    try:
        words = serve_words([*argv, *shlex.split(os.environ.get("LOCKSTEP_FLAGS", ""))])
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 1
    return serve.main(words)


def launch_server(server_args: Any, *_: Any, **__: Any) -> None:
    """Serve with SGLang's `ServerArgs`; the other arguments of SGLang's function concern its own processes.

    Raises `SystemExit` if the server ends with an error.
    """
    if status := main(words_of(server_args)):
        raise SystemExit(status)


def serve_words(argv: Sequence[str]) -> list[str]:
    """SGLang's flags as those of `lockstep serve`.  Raises `StartupError` naming the flags it lacks."""
    known = {item.name for item in dataclasses.fields(ServerArgs)}
    words: list[str] = []
    unused, refused = [], []
    device, first_gpu = None, "0"
    for flag, name, values in _flags(argv):
        base = name.removeprefix("no_")
        if name == "base_gpu_id":
            first_gpu = values[0]
        elif base in known:
            words += ["--" + name.replace("_", "-"), *values]
            device = values[0] if name == "device" else device
        elif base in WITHOUT_EFFECT or (values and values[0] in HARMLESS_VALUES.get(name, ())):
            unused.append(flag)
        else:
            refused.append(flag)
    if refused:
        raise StartupError(f"flags of SGLang that this server does not have: {', '.join(refused)}")
    if unused:
        print(f"lockstep: without effect here: {', '.join(unused)}", file=sys.stderr)
    if device is None and torch.cuda.is_available():
        device = "cuda"
        words += ["--device", device]
    if device == "cuda" and first_gpu != "0":
        words += ["--base-gpu-id", first_gpu]
    return words


def words_of(server_args: Any) -> list[str]:
    """The flags for what differs in SGLang's `ServerArgs` from the defaults."""
    kind = type(server_args)
    names = getattr(kind, "__struct_fields__", None) or [item.name for item in dataclasses.fields(kind)]
    plain = kind(model_path=server_args.model_path)
    given = {name: getattr(server_args, name) for name in names if not name.startswith("_")}
    given = {name: value for name, value in given.items() if value != getattr(plain, name)}
    return flag_words({"model_path": server_args.model_path} | given)


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(flag as written, name of the setting, its values) one by one.  Raises `StartupError`."""
    position = 0
    while position < len(argv):
        flag, equals, value = argv[position].partition("=")
        if not flag.startswith("--"):
            raise StartupError(f"expected a flag, found {flag!r}")
        values = [value] if equals else []
        position += 1
        while not equals and position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
        name = flag[2:].replace("-", "_")
        yield flag, ALIASES.get(name, name), values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
