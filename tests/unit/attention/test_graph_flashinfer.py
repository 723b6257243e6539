"""Captured steps with FlashInfer's wrappers, both over their stand-ins: plans, fixed buffers and padding meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.attention.flashinfer import CapturedFlashInfer, FlashInferBackend
from rollout.attention.registry import ATTENTION_BACKENDS
from rollout.memory.kv_pool import KVPool
from tests.family_zoo import family_checkpoint
from tests.flashinfer_stand_in import Stream, stand_in
from tests.graph_loop import captured_engines
from tests.graph_stand_in import StandInGraphPool, is_capturing, launch
from tests.kernels import native_ops
from tests.late_loop import overlap
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness


class GraphStream(Stream):
    """A stream whose kernels are recorded with torch's; calls that cannot be captured raise."""

    @property
    def capturing(self) -> list[tuple[Any, ...]] | None:  # type: ignore[override]
        return [] if is_capturing() else None

    def enqueue(self, work: Callable[[], None]) -> None:
        launch(work)


class OnStandIn(FlashInferBackend):
    def __init__(self, kv: KVPool) -> None:
        library = stand_in((torch.float32,))
        del library.stream.capturing
        library.stream.__class__ = GraphStream
        super().__init__(kv, library, library.Event)

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    torch.set_num_threads(1)
    native_ops()
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", (__name__, "OnStandIn"))
    with captured_engines() as patch:
        StandInGraphPool.reset_counts()
        overlap(patch)
        yield patch


def checkpoint(family: str, folder: Path) -> Path:
    if family == "qwen3_moe":
        return tiny_checkpoint(folder, head_dim=64)
    sizes = {"head_dim": 64} if family == "gpt_oss" else {"kv_lora_rank": 128, "qk_rope_head_dim": 64}
    return family_checkpoint(folder, family, 0, **sizes)


def play(folder: Path, **settings: Any) -> list[tuple]:
    """Run requests of many lengths, which end one after the other, and return their results."""
    defaults = {"max_running_requests": 6, "chunked_prefill_size": 16, "max_total_tokens": 400}
    harness = Harness(folder, attention_backend="flashinfer", **defaults | settings)
    generator = torch.Generator().manual_seed(1)
    for number in range(8):
        prompt = torch.randint(1, 250, (2 + 5 * number,), generator=generator).tolist()
        params = {"max_new_tokens": 4 + 3 * number, "temperature": float(number % 2), "sampling_seed": number}
        harness.submit(prompt, params=params)
    harness.run()
    harness.check_idle()
    return [(x.token_ids, x.logprobs, x.routes.tolist()) for x in harness.results.values()]


@pytest.mark.full(but="qwen3_moe")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_replays_give_what_steps_in_python_give(family: str, engines: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Heads, windows with sinks, latents.  torch weighs sinks, so their last bits depend on the number of rows."""
    folder = checkpoint(family, tmp_path / "model")
    expected = play(folder, disable_cuda_graph=True)
    assert not StandInGraphPool.num_replays
    for (token_ids, logprobs, routes), wanted in zip(play(folder), expected, strict=True):
        assert token_ids == wanted[0] and routes == wanted[2]
        assert logprobs == (pytest.approx(wanted[1], abs=1e-5) if family == "gpt_oss" else wanted[1])
    assert StandInGraphPool.num_replays > 30


@pytest.mark.mutant
def test_a_plan_of_the_capture_is_noticed(engines: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong engine plans the wrappers only before the capture."""
    folder = checkpoint("qwen3_moe", tmp_path / "model")
    expected = play(folder, disable_cuda_graph=True)
    plan = CapturedFlashInfer.plan

    def once(self: Any, batch: Any) -> None:
        if self._sequences is None:
            plan(self, batch)

    engines.setattr(CapturedFlashInfer, "plan", once)
    assert play(folder) != expected
