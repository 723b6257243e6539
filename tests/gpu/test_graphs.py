"""CUDA graphs: a replay is the step that it recorded, of this step's numbers, and takes no memory.

"Eager" below runs the same step on the same buffers by calling what would be captured, so that bits can be compared;
against an engine without graphs at all, whose kernels and batch sizes are others, rounding is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.errors import FatalError
from rollout.core.messages.io_struct import FlushCacheReqInput
from rollout.executor.graph_runner import GraphRunner
from rollout.kernels.gpu import launch_options
from tests.gpu.engines import (
    CAPTURED_MAX,
    LOGPROB_SLACK,
    called_instead_of_captured,
    checkpoint,
    disagreement,
    engine,
    facts_of,
    graphs_of,
    recordings,
)
from tests.gpu.needs import need_cuda
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [checkpoint(base / f"v{seed}", device, seed=seed) for seed in (1, 2)]


@pytest.fixture(autouse=True)
def _recordings(device: torch.device) -> Iterator[None]:
    with recordings(device):
        yield


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 300 for j in range(3 + 5 * i % 29)] for i in range(count)]


def staggered(harness: Harness, count: int, **params: Any) -> list[str]:
    """Run requests of different lengths that come one by one, so that every batch size up to `count` occurs."""
    rids = []
    for i, prompt in enumerate(prompts(count)):
        rids.append(harness.submit(prompt, params={"max_new_tokens": NEW_TOKENS - i} | params))
        harness.tick()
    harness.run()
    harness.check_idle()
    return rids


def said(harness: Harness, count: int, **params: Any) -> list[tuple[list[int], list[float], bytes]]:
    return facts_of([harness.results[rid] for rid in staggered(harness, count, **params)])


class Replays:
    """The number of steps that were replayed, and of others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.replayed = self.other = 0
        usual = GraphRunner.forward

        def forward(runner: GraphRunner, *arguments: Any) -> Any:
            found = usual(runner, *arguments)
            self.replayed += found is not None
            self.other += found is None
            return found

        patch.setattr(GraphRunner, "forward", forward)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "sampling_seed": 7}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_replay_is_what_it_recorded_bit_for_bit(
    params: dict[str, Any], folders: list[Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, log-probabilities and experts agree, in padded and full sizes, also if sampling is not captured."""
    harness, replays = engine(folders[0], device, random_seed=5), Replays(monkeypatch)
    graphs_of(harness)
    got = said(harness, CAPTURED_MAX - 1, **params)
    assert replays.replayed > NEW_TOKENS // 2
    with called_instead_of_captured():
        eager = engine(folders[0], device, random_seed=5)
    assert got == said(eager, CAPTURED_MAX - 1, **params)


def test_graphs_on_and_off_agree(folders: list[Path], device: torch.device, facts: dict[str, Any]) -> None:
    on, off = engine(folders[0], device), engine(folders[0], device, disable_cuda_graph=True)
    graphs_of(on)
    assert off.scheduler.runner.graphs is None
    both = [[harness.results[rid] for rid in staggered(harness, CAPTURED_MAX)] for harness in (on, off)]
    facts["same bits"] = facts_of(both[0]) == facts_of(both[1])
    assert disagreement(*both, LOGPROB_SLACK[device.type]) is None


@pytest.mark.parametrize("graphs", [True, False])
def test_dependent_launch_changes_no_bit(
    graphs: bool, folders: list[Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that read before its predecessor had written would give other bits, in some of many steps."""
    first = [said(engine(folders[0], device, disable_cuda_graph=not graphs), CAPTURED_MAX) for _ in range(2)]
    monkeypatch.setattr(launch_options, "FIRST_CAPABILITY", launch_options.NEVER)
    assert first == [said(engine(folders[0], device, disable_cuda_graph=not graphs), CAPTURED_MAX)] * 2


def test_a_larger_batch_than_was_captured_runs_without(
    folders: list[Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, replays = engine(folders[0], device), Replays(monkeypatch)
    graphs_of(harness)
    results = harness.generate(prompts(CAPTURED_MAX + 3), {"max_new_tokens": 6})
    assert replays.other > 3 and all(len(one.token_ids) == 6 for one in results)
    harness.check_idle()


def test_rows_of_experts_are_this_step_s(folders: list[Path], device: torch.device) -> None:
    """A buffer that a replay does not fill anew would hold the experts of the step before: they differ everywhere."""
    harness = engine(folders[0], device)
    graphs_of(harness)
    results = harness.generate(prompts(5), {"max_new_tokens": NEW_TOKENS})
    for one in results:
        decoded = one.routes[len(one.prompt_ids) :]
        assert len(decoded) == NEW_TOKENS - 1
        assert sum((row == before).all() for row, before in zip(decoded[1:], decoded[:-1], strict=True)) < 5
    scored = engine(folders[0], device, disable_cuda_graph=True)
    whole = [one.prompt_ids + one.token_ids for one in results]
    for one, again in zip(results, scored.generate(whole, {"max_new_tokens": 0}), strict=True):
        same = (one.routes == again.routes[: len(one.routes)]).mean()
        assert same > (0.999 if device.type == "cpu" else 0.9), "experts of the sequence when it is scored at once"


def test_a_refresh_needs_no_new_recording(folders: list[Path], device: torch.device) -> None:
    harness, fresh = engine(folders[0], device), engine(folders[1], device)
    graphs = graphs_of(harness)
    old = said(harness, 5)
    before = dict(graphs._captured)
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    harness.control(FlushCacheReqInput)
    new = said(harness, 5)
    assert {each: id(step) for each, step in graphs._captured.items()} == {n: id(step) for n, step in before.items()}
    assert new != old and new == said(fresh, 5)


def test_a_replay_allocates_nothing(folders: list[Path], device: torch.device, facts: dict[str, Any]) -> None:
    need_cuda(device, "allocator of CUDA memory")
    harness = engine(folders[0], device)
    graphs = graphs_of(harness)
    said(harness, 4)
    torch.cuda.synchronize()
    for (size, _), step in graphs._captured.items():
        plan = graphs.plan_padding(size)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step.forward(plan)
        if size in graphs._sampling:
            graphs._sampling[size](plan)
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, f"size {size}"
    reserved = torch.cuda.memory_reserved()
    said(harness, 4)
    facts["reserved MiB"] = torch.cuda.memory_reserved() >> 20
    assert torch.cuda.memory_reserved() == reserved


def test_a_stale_buffer_would_be_seen(
    folders: list[Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that is left out every fourth time gives the results of the step before."""
    harness = engine(folders[0], device)
    graphs_of(harness)
    right = said(harness, 3)
    turn = 0
    guarded = GraphRunner._guarded

    def sometimes(runner: GraphRunner, replay: Callable[[], None], size: int, part: str, after: list[str]) -> Any:
        def leave_some_out() -> None:
            nonlocal turn
            turn += part == "forward"
            if part != "forward" or turn % 4:
                replay()

        return guarded(runner, leave_some_out, size, part, after)

    monkeypatch.setattr(GraphRunner, "_guarded", sometimes)
    assert said(engine(folders[0], device), 3) != right


def test_a_replay_takes_a_plan_of_its_own(folders: list[Path], device: torch.device) -> None:
    """A replay without one launches nothing, so that the device is not lost to indices that were freed."""
    harness = engine(folders[0], device)
    graphs = graphs_of(harness)
    said(harness, 2)
    ((first, _), small), ((second, _), large) = list(graphs._captured.items())[:2]
    plan = graphs.plan_padding(first)
    small.forward(plan)
    for again in (small.forward, large.forward):
        with pytest.raises(FatalError, match="without a plan of its own"):
            again(plan)
    stale = graphs.plan_padding(first)
    large.forward(graphs.plan_padding(second))
    with pytest.raises(FatalError, match="without a plan of its own"):
        small.forward(stale)
    assert said(harness, 2)
