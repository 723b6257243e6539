"""Measure the available memory, and compute the size of the KV pool that it allows.

This module reads /proc and cgroup files, and allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rollout.core.errors import StartupError

_UNLIMITED = 1 << 60
_LEAST_TOKENS = 16


def available_memory_bytes(device: torch.device | str = "cpu", root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate on the device.

    On the CPU the limit is the smaller of the machine's free memory and the cgroup's.  `root` is for tests.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_available(root), _cgroup_available(root))


@dataclass(frozen=True)
class Kept:
    """Bytes that stay reserved in addition to the slots of the KV pool.

    `staging`: for the next weights.  `activations`: the peak of the largest step, and attention's partial results of
    steps that decode.  `graphs`: a reserve for captured steps, as these are captured after the pool was made.
    `tables`: the slot table of requests.  `states`: recurrent states and pages of windows.
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
    """Return the number of KV slots that fit, or `wanted` if it is given.

    `(available * mem_fraction - kept) / bytes_per_token` slots fit.  The result is at most the number that
    `max_running_requests` requests of `context_length` can use.  `available_bytes` were measured after the weights were
    loaded, which take `weight_bytes`.  Raises `StartupError` with all numbers if one request of 16 tokens, or the
    wanted number, does not fit.
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
    """Return the bytes that cgroup v2 (`memory.max`) or v1 (`memory.limit_in_bytes`) leaves; no file: no limit."""
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
