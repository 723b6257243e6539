"""Decode steps against the roofline of the bytes they touch: contexts, top-p, formats of weights, and without parts.

A step reads at least every weight that a token of it uses, once, and all KV, at the bandwidth of a copy.  "time of all
on": the time of the same batch with everything on, by the row's.  So it is how many times as fast the row is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.floor import decode_step_floor_s
from benchmarks.gpu.ceilings import Ceilings, measure_ceilings
from benchmarks.gpu.model import GREEDY, MEANWHILE, Driver, driver, kv_token_bytes, num_parameters, shape
from benchmarks.gpu.settings import Settings
from benchmarks.profile.machine import Machine
from examples.make_checkpoint.run import CheckpointSpec
from rollout.kernels.gpu import launch_options

BATCHES = (1, 4, 16, 64, 128, 256)
CONTEXTS = (128, 4096)
STEPS, ROUNDS = 64, 3
SPARE_BYTES = 12 << 30
"""Memory of a device that neither weights nor KV take: activations, captured steps, workspaces."""
# name -> settings that differ from the engine as it would serve, which records routes
VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "no capture": {"enable_return_routed_experts": False},
    "no graphs": {"disable_cuda_graph": True},
    "no overlap": {"disable_overlap_schedule": True},
    "no dependent launch": {},
    "deterministic": {"enable_deterministic_inference": True},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
}
WEIGHT_BYTES = {"fp8": 1 + 4 / 128, "int4": 0.5 + 4 / 64}
"""Bytes of an element of experts and projections by variant, with its share of scales (`kernels/row_places.py`)."""
# name -> sampling of all requests of a row
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "top-p 0.95": {"temperature": 1.0, "top_p": 0.95}}


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant, length of prompts, batch size and kind of sampling.

    Long prompts and top-p are measured with everything on.  A batch whose KV is too large has a row with the reason.
    """
    spec = shape(settings)
    batches, contexts = ((1, 3), (16, 32)) if settings.dry_run else (BATCHES, CONTEXTS)
    ceilings, free = measure_ceilings(settings.device), _tokens_that_fit(settings)
    whole: dict[tuple[int, int], float] = {}
    for name in VARIANTS:
        lengths = contexts if name == "all on" else contexts[:1]
        cases = [(length, batch) for length in lengths for batch in batches]
        fit = [case for case in cases if _pool(settings, *case) <= free]
        for length, batch in cases:
            if (length, batch) not in fit:
                yield {"variant": name, "context": length, "batch": batch, "not run": _too_large(spec, length, batch)}
        different = settings_of(name, settings)
        common = {"dtype": settings.dtype, "enable_return_routed_experts": True, "max_running_requests": batches[-1]}
        common |= {"max_total_tokens": max(_pool(settings, *case) for case in fit)}
        with _launches(name), driver(spec, settings.device, **common | different) as engine:
            routes = different.get("enable_return_routed_experts", True)
            for length, batch in fit:
                for sampling in SAMPLINGS if name == "all on" else ("greedy",):
                    seconds, spread = _measured(engine, settings, length, batch, sampling, routes)
                    base = whole.setdefault((length, batch), seconds)  # the first is greedy with everything on
                    floor = _floor(settings, name, batch, length, ceilings)
                    yield {
                        "variant": name,
                        "context": length,
                        "sampling": sampling,
                        "batch": batch,
                        "ms": 1e3 * seconds,
                        "tokens/s": batch / seconds,
                        "floor, ms": 1e3 * floor,
                        "share of floor": floor / seconds,
                        "time of all on": base / seconds,
                        "spread": spread,
                        "start, s": engine.start_seconds,
                        "weights, s": engine.load_seconds,
                    }


def settings_of(variant: str, settings: Settings) -> dict[str, Any]:
    """Return the settings in which a variant differs.  A dry run on a CPU has other flags for formats of weights."""
    different = dict(VARIANTS[variant])
    if "quantization" not in different:
        return different
    form = different.pop("quantization")
    names = ("quantization",) if settings.device.type == "cuda" else ("cpu_weight_format", "cpu_linear_format")
    return different | {"dtype": "bfloat16"} | dict.fromkeys(names, form)


def _measured(
    engine: Driver, settings: Settings, length: int, batch: int, sampling: str, routes: bool
) -> tuple[float, float]:
    """Return the median time of a step in seconds, and the spread of the rounds as a share of it."""
    times = [
        engine.seconds_per_decode_step(
            batch, length, _steps(settings), sampling=SAMPLINGS[sampling], return_routed_experts=routes
        )
        for _ in range(ROUNDS + 1)
    ][1:]
    seconds = statistics.median(times)
    return seconds, (max(times) - min(times)) / seconds


def _launches(variant: str) -> AbstractContextManager[object]:
    """Launch and capture kernels without programmatic dependent launch in the variant that is named so."""
    if variant == "no dependent launch":
        return patch.object(launch_options, "FIRST_CAPABILITY", launch_options.NEVER)
    return nullcontext()


def _steps(settings: Settings) -> int:
    return 4 if settings.dry_run else STEPS


def _pool(settings: Settings, length: int, batch: int) -> int:
    """Return the tokens of KV that a row needs."""
    return batch * (length + _steps(settings) + MEANWHILE)


def _tokens_that_fit(settings: Settings) -> int:
    """Return the tokens of KV that the memory holds together with the weights."""
    if settings.device.type != "cuda":
        return 1 << 20
    spec, (free, _) = shape(settings), torch.cuda.mem_get_info(settings.device)
    return (free - 2 * num_parameters(spec) - SPARE_BYTES) // kv_token_bytes(spec)


def _too_large(spec: CheckpointSpec, length: int, batch: int) -> str:
    return f"{length * batch * kv_token_bytes(spec) / 1e9:.0f} GB of KV: more memory than the weights leave"


def _floor(settings: Settings, variant: str, batch: int, length: int, ceilings: Ceilings) -> float:
    machine = Machine(ceilings.copy_bytes_per_s, ceilings.bf16_flops_per_s, ceilings.bf16_flops_per_s)
    context, weight_bytes = length + _steps(settings) // 2, WEIGHT_BYTES.get(variant, 2.0)
    return decode_step_floor_s(shape(settings), batch, context, machine, weight_bytes)
