"""The expert kernels alone: Triton and torch's `grouped_mm` over numbers of tokens, for the constants of the choice.

`EXPERT_CHOICE` and `EXPERT_TILES` of `rollout/kernels/gpu/experts_plan.py` are to be set by this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.ceilings import best_seconds_of_each, measure_ceilings
from benchmarks.gpu.settings import Settings
from rollout.kernels.gpu import experts_plan
from rollout.kernels.gpu.experts_grouped import grouped_experts
from rollout.kernels.gpu.experts_plan import Tiles
from rollout.kernels.gpu.fused_experts import fused_experts

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEPS = 8
# In addition to the tiles of the table: others that may be the best at some load.
TILES = (
    Tiles(16, 64, 4, 6),
    Tiles(16, 128, 4, 4),
    Tiles(32, 64, 4, 5),
    Tiles(64, 64, 4, 4),
    Tiles(64, 128, 4, 4),
    Tiles(64, 256, 8, 3),
    Tiles(128, 128, 8, 3),
    Tiles(128, 256, 8, 3),
    Tiles(128, 256, 8, 4),
)


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each implementation and number of tokens.

    It has the time, the bytes a second of the touched experts, and the arithmetic.
    """
    device = settings.device
    experts, hidden, inner, top_k = (8, 64, 32, 2) if settings.dry_run else (128, 2048, 768, 8)
    dtype = torch.float32 if settings.dry_run else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def rand(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    w13, w2 = rand(experts, 2 * inner, hidden, scale=hidden**-0.5), rand(experts, hidden, inner, scale=inner**-0.5)
    ceilings = measure_ceilings(device)
    for tokens in (1, 5) if settings.dry_run else TOKENS:
        steps = []  # routed differently, so that no cache holds what the next one reads
        for _ in range(STEPS):
            weights, ids = torch.rand(tokens, experts, generator=generator, device=device).topk(top_k)
            steps.append((rand(tokens, hidden, scale=1.0), ids, weights.to(dtype), w13, w2, inner))
        touched = sum(len(step[1].unique()) for step in steps) / STEPS
        nbytes = (touched * 3 * inner + 2 * tokens) * hidden * dtype.itemsize
        flops = 6 * tokens * top_k * hidden * inner
        for name, seconds in _timed(steps, settings):
            yield {
                "tokens": tokens,
                "R": tokens * top_k / experts,
                "implementation": name,
                "us": 1e6 * seconds,
                "GB/s": nbytes / seconds / 1e9,
                "TFLOP/s": flops / seconds / 1e12,
                "share of the roofline": ceilings.least_seconds(nbytes, flops) / seconds,
            }


def _timed(steps: list[tuple[Any, ...]], settings: Settings) -> list[tuple[str, float]]:
    """Measure Triton by the table, Triton by each of `TILES`, and `grouped_mm`; return their names and seconds.

    Tiles that do not compile are left out, and a line names them.
    """
    device, usual = settings.device, experts_plan.EXPERT_TILES
    size = steps[0][0].dtype.itemsize

    def seconds(operator: Callable[..., torch.Tensor]) -> float:
        return best_seconds_of_each([partial(operator, *step) for step in steps], device)

    found = [("triton, table", seconds(fused_experts))]
    for tiles in TILES[:1] if settings.dry_run else TILES:
        experts_plan.EXPERT_TILES = usual | {size: ((float("inf"), tiles),)}
        name = f"triton {tiles.tokens} x {tiles.rows}, {tiles.num_warps} warps, {tiles.num_stages} stages"
        try:
            found.append((name, seconds(fused_experts)))
        except Exception as error:  # of a compiler: too much shared memory for these tiles
            print(f"{name}: {type(error).__name__}: {error}")
        finally:
            experts_plan.EXPERT_TILES = usual
    found.append(("grouped_mm", seconds(grouped_experts)))
    return found
