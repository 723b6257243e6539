"""The memory that is really there, and the size of the KV pool that it allows.

Reads /proc and cgroup files; allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rollout.core.errors import StartupError

_UNLIMITED = 1 << 60
_LEAST_TOKENS = 16


def available_memory_bytes(device: torch.device | str = "cpu", root: Path = Path("/")) -> int:
    """Bytes that this process can still take: free device memory, or on the CPU the smaller of what the machine
    and the cgroup leave.  `root` is for tests.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_available(root), _cgroup_available(root))


@dataclass(frozen=True)
class Kept:
    """Bytes that are kept beside the slots of the KV pool.

    `staging`: for the next weights; `activations`: what the largest step takes at its peak; `graphs`: a reserve for
    captured steps, which are captured when the pool is there; `tables`: slots of requests; `states`: recurrent states
    and pages of windows.
    """

    staging: int = 0
    activations: int = 0
    graphs: int = 0
    tables: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        return self.staging + self.activations + self.graphs + self.tables + self.states


def kv_pool_tokens(
    available_bytes: int,
    bytes_per_token: int,
    *,
    kept: Kept,
    weight_bytes: int,
    mem_fraction: float,
    context_length: int,
    max_running_requests: int,
    wanted: int | None = None,
) -> int:
    """KV slots that fit: `(available * mem_fraction - kept) / bytes_per_token`, at most what `max_running_requests`
    requests of `context_length` could use; or as many as are `wanted`.

    `available_bytes`: with the weights there, which have `weight_bytes`.  Raises `StartupError` with all numbers when
    not even one request of 16 tokens fits, or not as many as are wanted.
    """
    usable = int(available_bytes * mem_fraction)
    fitting = (usable - kept.total) // bytes_per_token
    tokens = min(fitting, context_length * max_running_requests) if wanted is None else wanted
    if not _LEAST_TOKENS <= tokens <= fitting:
        least = f"a request of {_LEAST_TOKENS} tokens" if wanted is None else f"--max-total-tokens {wanted}"
        raise StartupError(
            f"not enough memory for a KV pool. After weights of {_mib(weight_bytes)} there are "
            f"{_mib(available_bytes)} free, of which --mem-fraction-static {mem_fraction:g} allows {_mib(usable)}. "
            f"Kept: {_mib(kept.staging)} for the next weights (--weight-staging), {_mib(kept.activations)} for the "
            f"largest step, {_mib(kept.graphs)} for captured steps. Also kept: {_mib(kept.tables)} for request tables, "
            f"{_mib(kept.states)} for states and windows. Left: {_mib(usable - kept.total)}, but {least} "
            f"needs {_mib((wanted or _LEAST_TOKENS) * bytes_per_token)}. Raise --mem-fraction-static, lower "
            "--max-running-requests, --context-length or --chunked-prefill-size, free memory, or serve a smaller model."
        )
    return tokens


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _machine_available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return _UNLIMITED
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup_available(root: Path) -> int:
    """cgroup v2 (`memory.max`), then v1 (`memory.limit_in_bytes`); files that are absent set no limit."""
    base = root / "sys/fs/cgroup"
    pairs = [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
    for limit_name, usage_name in pairs:
        limit, usage = _read_int(base / limit_name), _read_int(base / usage_name)
        if limit is not None and limit < _UNLIMITED:
            return max(0, limit - (usage or 0))
    return _UNLIMITED


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # absent, or "max"
        return None
