"""The floor of a decode step on the machine as it is now: bandwidth and arithmetic measured, the model counted."""

from __future__ import annotations

from benchmarks.profile.machine import Machine, measure_machine
from examples.make_checkpoint.run import CheckpointSpec

__all__ = ["Machine", "decode_step_floor_s", "measure_machine"]


def decode_step_floor_s(
    spec: CheckpointSpec, batch: int, context: int, machine: Machine, weight_bytes: float = 2.0
) -> float:
    """Return the seconds that one decode step needs at least.

    It reads every used weight and all KV once, and computes all products.  The number of experts used is the one that
    uniform routing is expected to hit: E * (1 - (1 - K/E)^batch).  `weight_bytes`: of an element of experts and
    projections; routers, the head and KV have two.
    """
    heads = spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    expert = 3 * spec.hidden_size * spec.moe_intermediate_size
    used = spec.experts * (1 - (1 - spec.top_k / spec.experts) ** batch)
    dense = spec.hidden_size * (heads + spec.experts)
    held = spec.hidden_size * heads + used * expert
    head = spec.hidden_size * spec.vocab_size
    kv = 2 * spec.kv_heads * spec.head_dim * context * batch
    num_bytes = spec.layers * (weight_bytes * held + 2 * (spec.hidden_size * spec.experts + kv)) + 2 * head
    flops = 2 * batch * (spec.layers * (dense + spec.top_k * expert) + head)
    flops += spec.layers * 4 * batch * spec.heads * spec.head_dim * context
    return max(num_bytes / machine.read_bytes_per_s, flops / machine.bf16_flops_per_s)
