"""Engines and small models of these tests.

On a device a model is of sizes that its kernels and FlashInfer take, in bfloat16, so that what is tested is what would
serve; a dry run has the tiny models of the other tests in float32.  Few batch sizes are captured, so that an engine
starts in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine import build_graphs
from rollout.executor.graph_runner import GraphRunner
from tests.gpu.needs import not_run
from tests.graph_loop import captured_engines
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness, Result

CAPTURED_MAX = 8
LOGPROB_SLACK = {"cuda": 0.06, "cpu": 1e-4}
"""The effect of another order of sums on a log-probability: bfloat16 rounds logits of about 8 to multiples of 0.03."""
_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 128,
    "experts": 16,
    "top_k": 4,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "dtype": "bfloat16",
}


def checkpoint(folder: Path, device: torch.device, kind: str = "moe_dense_first", seed: int = 0, **more: Any) -> Path:
    """Write a random checkpoint of a kind of `tests/model_zoo.py`, in sizes that suit the device."""
    return tiny_checkpoint(folder, kind, seed, **(_WIDE if device.type == "cuda" else {}) | more)


def engine(folder: Path, device: torch.device, **settings: Any) -> Harness:
    """Return a real scheduler on `device`, driven step by step; `settings` are fields of `ServerArgs`."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    defaults = {"device": str(device), "dtype": dtype, "cuda_graph_max_bs": CAPTURED_MAX}
    return Harness(folder, **defaults | settings)


def graphs_of(harness: Harness) -> GraphRunner:
    """Return the recordings of an engine; without any the test is not run."""
    graphs = harness.scheduler.runner.graphs
    if graphs is None:
        backend = type(harness.scheduler.runner.attention).__name__
        not_run(f"no step is captured with {backend}: docs/gpu_offline.md says how to install FlashInfer")
    return graphs


@contextmanager
def recordings(device: torch.device) -> Iterator[None]:
    """Let engines built inside capture their steps: by CUDA graphs, or in a dry run by the stand-in for them."""
    with nullcontext() if device.type == "cuda" else captured_engines([1, 2, 4, CAPTURED_MAX], [4, 16, 64]):
        yield


class NoRecording:
    """A `GraphPool` that captures nothing: what would be recorded is called again, on the same buffers."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def capture_in_pieces(self, run: Callable[[Callable[[Callable[[], None]], None]], None]) -> Callable[[], None]:
        return self.capture(lambda: run(lambda work: work()))


@contextmanager
def called_instead_of_captured() -> Iterator[None]:
    """Let engines built inside run eagerly the steps that others replay, in the same way otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_graphs, "graph_pools", lambda device: NoRecording)
        yield


def disagreement(ours: Sequence[Result], theirs: Sequence[Result], slack: float) -> str | None:
    """Return how the answers to the same requests differ by more than rounding; None where they do not.

    Log-probabilities may differ by `slack`.  Where another token is sampled, both must be as likely, give or take that,
    and what follows is not compared.
    """
    for one, other in zip(ours, theirs, strict=True):
        if len(one.token_ids) != len(other.token_ids):
            return f"{one.rid}: {len(one.token_ids)} and {len(other.token_ids)} tokens"
        pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
        for at, (token, another, logprob, its) in enumerate(pairs):
            if abs(logprob - its) > slack:
                return f"{one.rid}, token {at}: {token} at {logprob:.4f} and {another} at {its:.4f}"
            if token != another:
                break
    return None


def facts_of(results: Sequence[Result]) -> list[tuple[list[int], list[float], bytes]]:
    """Return tokens, log-probabilities and rows of experts, which are equal where their bits are."""
    return [(one.token_ids, one.logprobs, one.routes.tobytes()) for one in results]
