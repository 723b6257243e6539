"""Decode steps against the roofline of the bytes they touch; with capture of routes, graphs and overlap on and off.

A step reads at least every weight that a token of it uses, once, and all KV, at the bandwidth of a copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.floor import decode_step_floor_s
from benchmarks.gpu.ceilings import Ceilings, measure_ceilings
from benchmarks.gpu.model import MEANWHILE, driver, shape
from benchmarks.gpu.settings import Settings
from benchmarks.profile.machine import Machine

BATCHES = (1, 4, 16, 64, 128, 256)
PROMPT_TOKENS, STEPS, ROUNDS = 128, 64, 3
# name -> settings that differ from the engine as it would serve, which records routes
VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "no capture": {"enable_return_routed_experts": False},
    "no graphs": {"disable_cuda_graph": True},
    "no overlap": {"disable_overlap_schedule": True},
}


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant and batch size."""
    spec, device = shape(settings), settings.device
    batches, steps = ((1, 3), 4) if settings.dry_run else (BATCHES, STEPS)
    ceilings = measure_ceilings(device)
    whole: dict[int, float] = {}
    for name, different in VARIANTS.items():
        routed = different.get("enable_return_routed_experts", True)
        common = {"dtype": settings.dtype, "enable_return_routed_experts": True, "max_running_requests": batches[-1]}
        common |= {"max_total_tokens": batches[-1] * (PROMPT_TOKENS + steps + MEANWHILE)}
        with driver(spec, device, **common | different) as engine:
            for batch in batches:
                times = [
                    engine.seconds_per_decode_step(batch, PROMPT_TOKENS, steps, return_routed_experts=routed)
                    for _ in range(ROUNDS + 1)
                ][1:]
                seconds = statistics.median(times)
                whole.setdefault(batch, seconds)
                floor = _floor(settings, batch, ceilings)
                yield {
                    "variant": name,
                    "batch": batch,
                    "ms": 1e3 * seconds,
                    "tokens/s": batch / seconds,
                    "floor, ms": 1e3 * floor,
                    "share of floor": floor / seconds,
                    "time of all on": whole[batch] / seconds,
                    "spread": (max(times) - min(times)) / seconds,
                    "start, s": engine.start_seconds,
                    "weights, s": engine.load_seconds,
                }


def _floor(settings: Settings, batch: int, ceilings: Ceilings) -> float:
    machine = Machine(ceilings.copy_bytes_per_s, ceilings.bf16_flops_per_s, ceilings.bf16_flops_per_s)
    return decode_step_floor_s(shape(settings), batch, PROMPT_TOKENS + STEPS // 2, machine)
