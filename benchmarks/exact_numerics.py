"""The cost of engine numerics to a trainer, and their agreement: `python -m benchmarks.exact_numerics SHAPE`.

Forward, and forward with backward, of one batch: transformers in float32 and bfloat16, the same following given routes,
and under engine numerics over float32 and bfloat16 parameters.  All take turns, so that a noisy machine is noisy for
each; medians, in seconds of the clock and of the processors.  Memory is the peak of a process that does nothing else,
above what it is with the model loaded.  Then gradients, relative to transformers in float32 that follows the engine's
routes.

Shapes: B sequences, S positions.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.shapes import SHAPES, cached_checkpoint, checkpoint
from capture.replay import force_routes, record_routes
from examples.make_checkpoint.run import CheckpointSpec
from rollout.numerics import engine_logprobs, use_engine_numerics

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = [(how, dtype) for how in ("plain", "routes forced", "engine numerics") for dtype in DTYPES]
Gradients = dict[str, torch.Tensor]


class Way:
    """One way to compute the log-probabilities of a batch [B, S] and their gradient."""

    def __init__(self, folder: Path, how: str, dtype: str, input_ids: torch.Tensor) -> None:
        self.how, self.ids = how, input_ids
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], trust_remote_code=False).eval()
        self.routes: torch.Tensor | None = None
        if how == "routes forced":
            with record_routes(self.model) as recorded, torch.no_grad():
                self.model(input_ids=input_ids, use_cache=False)
            self.routes = recorded.ids().unflatten(0, tuple(input_ids.shape))

    def forward(self) -> torch.Tensor:
        """Return the log-probabilities of the batch, [B, S - 1]."""
        with ExitStack() as stack:
            if self.routes is not None:
                stack.enter_context(force_routes(self.model, self.routes))
            if self.how == "engine numerics":
                numerics = stack.enter_context(use_engine_numerics(self.model))
            logits, targets = self.model(input_ids=self.ids, use_cache=False).logits[:, :-1], self.ids[:, 1:]
            if self.how == "engine numerics":
                self.engine_routes = numerics.routes
                return engine_logprobs(logits, targets)
            return logits.float().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)

    def score(self) -> None:
        """Run a forward without a gradient."""
        with torch.no_grad():
            self.forward()

    def train(self) -> Gradients:
        """Run a forward and its backward; return the gradients by parameter."""
        self.model.zero_grad()
        logprobs = self.forward()
        weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
        (logprobs * weights).mean().backward()
        return {name: x.grad.float() for name, x in self.model.named_parameters() if x.grad is not None}


def spent(work: Callable[[], Any]) -> tuple[float, float]:
    """Run `work`; return the seconds that it took by the clock and on the processors."""
    gc.collect()
    clock, processors = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processors


def memory_of(how: str, dtype: str) -> float:
    """Return the MiB that a step needs above the loaded model and its gradients, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.exact_numerics", *sys.argv[1:], "--memory-of", how, dtype]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(said.splitlines()[-1])


def measure_memory(way: Way) -> float:
    """Return the MiB that a step needs above the loaded model and its gradients.  It works on Linux alone."""
    for parameter in way.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = status_kib("VmRSS")
    way.forward().mean().backward()
    return (status_kib("VmHWM") - before) / 1024


def status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def rows(args: argparse.Namespace, ways: list[Way]) -> Iterator[str]:
    """Measure all ways in turns, and yield a line for each."""
    for way in ways:
        way.train()
    times: list[list[tuple[float, float, float, float]]] = [[] for _ in ways]
    for _ in range(args.rounds):
        for way, found in zip(ways, times):
            found.append((*spent(way.score), *spent(way.train)))
    for (how, dtype), found in zip(WAYS, times):
        values = [median(column) for column in zip(*found)]
        yield f"{how:16} {dtype:9}" + "".join(f"{value:9.2f}" for value in (*values, memory_of(how, dtype)))


def errors(found: Gradients, wanted: Gradients) -> str:
    each = sorted(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)
    return f"median {median(each):.2e}, worst {each[-1]:.2e} of {len(each)} parameters"


def gradients(ways: list[Way]) -> Iterator[str]:
    """Yield each way's distance from the float32 gradient, where all follow the routes of the engine numerics."""
    by_way = dict(zip(WAYS, ways))
    engine = by_way["engine numerics", "float32"]
    found = engine.train()
    exact, rounded = by_way["routes forced", "float32"], by_way["routes forced", "bfloat16"]
    exact.routes = rounded.routes = engine.engine_routes
    wanted = exact.train()
    yield f"engine numerics, float32 parameters: {errors(found, wanted)}"
    yield f"engine numerics, bfloat16 parameters: {errors(by_way['engine numerics', 'bfloat16'].train(), wanted)}"
    yield f"transformers in bfloat16, routes forced: {errors(rounded.train(), wanted)}"
    yield f"transformers in float32, its own routes: {errors(by_way['plain', 'float32'].train(), wanted)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=["demo", *SHAPES], help="the demo's checkpoint, or a shape of the benchmarks")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    folder = cached_checkpoint("demo", CheckpointSpec()) if args.shape == "demo" else checkpoint(args.shape)
    input_ids = torch.randint(3, 1000, (args.sequences, args.length), generator=torch.Generator().manual_seed(0))
    if args.memory_of:
        print(measure_memory(Way(folder, *args.memory_of, input_ids)))
        return
    ways = [Way(folder, how, dtype, input_ids) for how, dtype in WAYS]
    print(f"{args.sequences} sequences of {args.length} tokens, {args.threads} threads, medians of {args.rounds}")
    print(f"{'':26}{'forward':>9}{'CPU s':>9}{'+ backw.':>9}{'CPU s':>9}{'MiB':>9}")
    for line in rows(args, ways):
        print(line, flush=True)
    for line in gradients(ways):
        print(line, flush=True)


if __name__ == "__main__":
    main()
