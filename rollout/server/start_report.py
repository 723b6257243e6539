"""The lines that a server prints once it is ready: what it serves, on what, and where."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import SchedulerReady
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.specs.model_config import ModelConfig
from rollout.core.version import VERSION
from rollout.distributed.layout import layout_of

_WIDTH = 16


def start_report(args: ServerArgs, config: ModelConfig, ready: SchedulerReady, state: SchedulerState) -> list[str]:
    """Return the report, one fact and its name a line."""
    url = base_url(args)
    ranks = layout_of(args).world_size
    share = " a rank" if ranks > 1 else ""
    model_bytes, kv_bytes = (_bytes(total // args.dp_size) + share for total in (state.model_bytes, state.kv_bytes))
    facts = {
        "model": f"{args.name}, {config.architecture}, version {ready.weight_version!r}",
        "parameters": f"{_count(ready.num_parameters)} in {state.dtype}, {model_bytes}",
        "KV cache": f"{ready.max_total_num_tokens} tokens, {kv_bytes}; context {ready.context_length}",
        "device": f"{state.device}, {'1 rank' if ranks == 1 else f'{ranks} ranks'}, {_threads(ready.num_threads)} each",
        "operators": _operators(state),
        "batch invariant": "yes" if state.batch_invariant else f"no: {state.batch_invariance_note}",
        "routes": "recorded" if ready.capture_routed_experts else "not recorded (--enable-return-routed-experts)",
        "versions": f"lockstep {VERSION}, torch {_version('torch')}, Python {platform.python_version()}",
        "server": url,
        "dashboard": f"{url}/dashboard, metrics at {url}/metrics" if args.enable_metrics else "off (--enable-metrics)",
    }
    return [f"{name:<{_WIDTH}} {fact}" for name, fact in facts.items()]


def base_url(args: ServerArgs) -> str:
    """Return the address of the server, as its own machine writes it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(args.host, args.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{args.port}"


def _operators(state: SchedulerState) -> str:
    if state.plain_torch_reason:
        return f"plain torch: {state.plain_torch_reason}"
    if not state.cpu_isa:
        return "Triton and torch" + (f"; prompts by {state.prompt_attention}" if state.prompt_attention else "")
    plain = ", ".join(f"{name} ({reason})" for name, reason in state.plain_linears.items())
    return f"compiled for {state.cpu_isa}" + (f"; in bfloat16: {plain}" if plain else "")


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _count(number: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
