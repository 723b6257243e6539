"""How much memory is really there, and how large a KV pool it allows.

Reads /proc and cgroup files; allocates nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rollout.core.errors import StartupError

_UNLIMITED = 1 << 60


def available_memory_bytes(device: torch.device | str = "cpu", root: Path = Path("/")) -> int:
    """Bytes that this process can still take: free device memory, or on the CPU the smaller of what the machine
    and the cgroup leave.  `root` is for tests.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_available(root), _cgroup_available(root))


def kv_pool_tokens(
    available_bytes: int,
    bytes_per_token: int,
    *,
    staging_bytes: int,
    mem_fraction: float,
    context_length: int,
    max_running_requests: int,
) -> int:
    """KV slots that fit: `(available * mem_fraction - staging) / bytes_per_token`, at most what
    `max_running_requests` requests of `context_length` could use.

    Raises `StartupError` when not even one request of 16 tokens fits.
    """
    usable = int(available_bytes * mem_fraction) - staging_bytes
    tokens = min(usable // bytes_per_token, context_length * max_running_requests)
    if tokens < 16:
        raise StartupError(
            f"not enough memory for a KV pool: {available_bytes / 2**20:.0f} MiB available, "
            f"{staging_bytes / 2**20:.0f} MiB kept for the next weights; "
            "raise --mem-fraction-static, free memory, or serve a smaller model"
        )
    return tokens


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
