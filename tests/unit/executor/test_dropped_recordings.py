"""Recordings that no longer hold are freed at once, without a search for cycles, which a worker rarely makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.executor.captures import Conditions
from rollout.executor.cuda_graph import CudaGraphPool
from rollout.scheduler.model_drafting import ModelDrafting
from tests import graph_stand_in
from tests.cuda_graph_stand_in import CudaStandIn, GraphStandIn
from tests.graph_loop import captured_engines
from tests.kernels import native_ops
from tests.mtp_zoo import mtp_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.executor.test_cuda_graph_pool import DEVICE
from tests.unit.executor.test_cuda_graph_pool import cuda as cuda  # a fixture
from weight_sync.known_calls import without_collections


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """Pause the collector, and list all graphs and captures that are made."""
    found: list[weakref.ref[Any]] = []
    for kind in (GraphStandIn, graph_stand_in._Capture):
        begin: Any = kind.__init__

        def noted(self: Any, begin: Any = begin) -> None:
            begin(self)
            found.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", noted)
    with without_collections():
        yield found


def alive(made: list[weakref.ref[Any]]) -> int:
    return sum(one() is not None for one in made)


def test_a_pool_frees_graphs_with_their_replay(cuda: CudaStandIn, made: list[weakref.ref[Any]]) -> None:
    """Drop whole recordings, and pieces around work that holds the function that cut them."""
    pool = CudaGraphPool(DEVICE)

    def run(between: Callable[[Callable[[], None]], None]) -> None:
        def work() -> None:
            assert between is not None

        cuda.launch()
        between(work)
        cuda.launch()

    replays = [pool.capture_in_pieces(run), pool.capture(cuda.launch)]
    cuda.graphs.clear()
    assert alive(made) == len(made) == 3
    replays.clear()
    assert not alive(made)


def test_runners_free_the_recordings_that_they_drop(
    tmp_path: Path, made: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    native_ops()
    checkpoint = mtp_checkpoint(tmp_path / "mtp", "glm4_moe", 3)
    settings: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 400, "max_running_requests": 2}
    settings |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "context_length": 128}
    with captured_engines([2], [4]):
        harness = Harness(checkpoint, **settings)
        scheduler = harness.scheduler
        drafting = scheduler._steps._drafting
        assert isinstance(drafting, ModelDrafting) and drafting.runner.graphs is not None
        runner, of_draft = scheduler.runner, drafting.runner.graphs
        assert runner.graphs is not None and runner.pieces is not None
        before = alive(made)
        monkeypatch.setattr(Conditions, "have_changed", lambda self, with_routes: True)
        of_draft._seen = of_draft._hold_for = None, None
        for dropped in (runner.pieces, runner.graphs):
            dropped._renew(False)
            assert alive(made) < before, type(dropped).__name__
            before = alive(made)
        of_draft._renew()
    assert before and not alive(made)
