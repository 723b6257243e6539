"""The floor of a decode step on the machine as it is now: bandwidth and arithmetic measured, the model counted."""

from __future__ import annotations

from benchmarks.profile.machine import Machine, measure_machine
from examples.make_checkpoint.run import CheckpointSpec

__all__ = ["Machine", "decode_step_floor_s", "measure_machine"]


def decode_step_floor_s(spec: CheckpointSpec, batch: int, context: int, machine: Machine) -> float:
    """Return the seconds that one decode step needs at least.

    It reads every used weight and all KV once, and computes all products.  The number of experts used is the one that
    uniform routing is expected to hit: E * (1 - (1 - K/E)^batch).
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
