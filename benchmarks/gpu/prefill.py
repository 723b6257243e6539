"""Prompts: tokens a second, and arithmetic next to one large matrix product; steps that mix prompts and decoding."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.ceilings import measure_ceilings
from benchmarks.gpu.model import MEANWHILE, driver, shape
from benchmarks.gpu.settings import Settings
from examples.make_checkpoint.run import CheckpointSpec

PROMPTS = ((1, 512), (1, 4096), (8, 512), (4, 4096), (16, 2048))  # how many, how long
ROUNDS = 3
MIXED_BATCHES = (1, 64, 256)
MIXED_PROMPT_TOKENS = 4096
MIXED_STEP_TOKENS = 512
"""Tokens of a mixed step at most: one for each request that decodes, and a chunk of the prompt."""


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each number and length of prompts, with and without capture of routes, then the mixed steps."""
    yield from _prompts(settings)
    yield from _mixed_steps(settings)


def _prompts(settings: Settings) -> Iterator[dict[str, Any]]:
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


def _mixed_steps(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of requests that decode while one long prompt is computed in chunks."""
    batches, prompt, step = (
        ((2,), 24, 8) if settings.dry_run else (MIXED_BATCHES, MIXED_PROMPT_TOKENS, MIXED_STEP_TOKENS)
    )
    sizes = {"max_total_tokens": batches[-1] * (16 + 4 * MEANWHILE) + prompt + 1024, "chunked_prefill_size": step}
    sizes |= {"max_running_requests": batches[-1] + 1, "enable_return_routed_experts": True}
    with driver(shape(settings), settings.device, dtype=settings.dtype, disable_radix_cache=True, **sizes) as engine:
        for batch in batches:
            times = [
                engine.seconds_of_mixed_step(batch, 16, prompt, return_routed_experts=True) for _ in range(ROUNDS + 1)
            ]
            row = {"capture": True, "requests that decode": batch, "tokens of a step": step, "tokens each": prompt}
            yield row | {"prompts": 1, "ms a step": 1e3 * statistics.median(times[1:])}


def prefill_flops(spec: CheckpointSpec, count: int, length: int) -> float:
    """Return the flops of products alone.

    They are projections, chosen experts, attention below the diagonal, and the output head of last tokens.
    """
    heads = spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    layer = spec.hidden_size * (heads + spec.experts) + spec.top_k * 3 * spec.hidden_size * spec.moe_intermediate_size
    attention = 2 * spec.heads * spec.head_dim * length**2  # scores and values, half of each
    return count * (2 * length * spec.layers * layer + spec.layers * attention + 2 * spec.hidden_size * spec.vocab_size)
