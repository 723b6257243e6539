"""A Chrome trace of a few steps, the scheduler's phases as ranges; open it in chrome://tracing or Perfetto."""

from __future__ import annotations

import os
import random
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.profile.profile import Workload
from benchmarks.profile.steps import TracedSteps
from rollout.scheduler.stats import StepStats
from rollout.server.engine import Engine

DECODE_STEPS = 4


def write_trace(path: Path, engine: Engine, workload: Workload, batch_sizes: list[int], prefill: int) -> None:
    """Trace prompts and `DECODE_STEPS` decode steps of each batch size, then a prompt of `prefill` tokens (0: none)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would print on stderr that it starts and stops
    rng = random.Random(1)
    runs = [(f"batch {size}", [workload.input_len] * size, 1 + DECODE_STEPS) for size in batch_sizes]
    if prefill:
        runs.append((f"prefill {prefill}", [prefill], 1))
    steps = TracedSteps()
    engine.scheduler.stats = steps
    try:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            for name, lengths, new_tokens in runs:
                params = {"temperature": workload.temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
                prompts = [[rng.randrange(workload.vocab_size) for _ in range(length)] for length in lengths]
                with record_function(name):
                    engine.generate(input_ids=prompts, sampling_params=params)
    finally:
        steps.close()
        engine.scheduler.stats = StepStats()
    recorded.export_chrome_trace(str(path))
