"""Prompts: tokens a second, and arithmetic next to one large matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.ceilings import measure_ceilings
from benchmarks.gpu.model import driver, shape
from benchmarks.gpu.settings import Settings
from examples.make_checkpoint.run import CheckpointSpec

PROMPTS = ((1, 512), (1, 4096), (8, 512), (4, 4096), (16, 2048))  # how many, how long
ROUNDS = 3


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each number and length of prompts, with and without capture of routes."""
    spec, device = shape(settings), settings.device
    prompts = ((1, 16), (3, 20)) if settings.dry_run else PROMPTS
    most = max(count * length for count, length in prompts)
    ceilings = measure_ceilings(device)
    for routed in (True, False):
        common = {"dtype": settings.dtype, "enable_return_routed_experts": routed, "disable_radix_cache": True}
        sizes = {"max_total_tokens": most + 1024, "chunked_prefill_size": 8192, "max_running_requests": 32}
        with driver(spec, device, **common, **sizes) as engine:
            for count, length in prompts:
                times = [
                    engine.seconds_of_prefill(count, length, return_routed_experts=routed) for _ in range(ROUNDS + 1)
                ]
                seconds, flops = statistics.median(times[1:]), prefill_flops(spec, count, length)
                yield {
                    "capture": routed,
                    "prompts": count,
                    "tokens each": length,
                    "ms": 1e3 * seconds,
                    "tokens/s": count * length / seconds,
                    "TFLOP/s": flops / seconds / 1e12,
                    "share of a matrix product": flops / seconds / ceilings.bf16_flops_per_s,
                }


def prefill_flops(spec: CheckpointSpec, count: int, length: int) -> float:
    """Return the flops of products alone.

    They are projections, chosen experts, attention below the diagonal, and the output head of last tokens.
    """
    heads = spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    layer = spec.hidden_size * (heads + spec.experts) + spec.top_k * 3 * spec.hidden_size * spec.moe_intermediate_size
    attention = 2 * spec.heads * spec.head_dim * length**2  # scores and values, half of each
    return count * (2 * length * spec.layers * layer + spec.layers * attention + 2 * spec.hidden_size * spec.vocab_size)
