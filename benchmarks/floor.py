"""What the machine allows: memory bandwidth and bf16 arithmetic, measured now, and the floor of a decode step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from rollout.entrypoints.make_checkpoint import CheckpointSpec


@dataclass(frozen=True)
class Machine:
    """Bytes and floating-point operations a second with all threads, best of a few tries."""

    read_bytes_per_s: float
    bf16_flops_per_s: float


def measure_machine() -> Machine:
    """A sum over 1 GiB, and a bf16 matmul of 2048^3."""
    data = torch.ones(1 << 27, dtype=torch.float64)
    a = torch.randn(2048, 2048).bfloat16()
    return Machine(data.nbytes / _best(lambda: data.sum()), 2 * 2048**3 / _best(lambda: a @ a))


def decode_step_floor_s(spec: CheckpointSpec, batch: int, context: int, machine: Machine) -> float:
    """Seconds that one decode step needs at least: every used weight and all KV read once, all products computed.

    Experts used are those that uniform routing is expected to hit: E * (1 - (1 - K/E)^batch).
    """
    heads = spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    expert = 3 * spec.hidden_size * spec.moe_intermediate_size
    used = spec.experts * (1 - (1 - spec.top_k / spec.experts) ** batch)
    dense = spec.hidden_size * (heads + spec.experts)
    head = spec.hidden_size * spec.vocab_size
    kv = 2 * spec.kv_heads * spec.head_dim * context * batch
    numel = spec.layers * (dense + used * expert + kv) + head
    flops = 2 * batch * (spec.layers * (dense + spec.top_k * expert) + head)
    flops += spec.layers * 4 * batch * spec.heads * spec.head_dim * context
    return max(2 * numel / machine.read_bytes_per_s, flops / machine.bf16_flops_per_s)


def _best(work, tries: int = 5) -> float:
    work()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
