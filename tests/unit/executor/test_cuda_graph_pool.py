"""Calls of `CudaGraphPool` to torch, against a stand-in for `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollout.executor import cuda_graph
from rollout.executor.cuda_graph import CudaGraphPool, graph_pools
from tests.cuda_graph_stand_in import CudaStandIn, GraphStandIn, Stream

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaStandIn:
    stand_in = CudaStandIn()
    for name in ("graph_pool_handle", "current_stream", "stream", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphStandIn)
    monkeypatch.setattr(GraphStandIn, "cuda", stand_in, raising=False)
    return stand_in


def captured(cuda: CudaStandIn) -> list[Callable[[], None]]:
    pool = CudaGraphPool(DEVICE)
    return [pool.capture(cuda.launch) for _ in range(3)]


def test_graphs_of_a_pool(cuda: CudaStandIn) -> None:
    replays = captured(cuda)
    assert [graph.launches for graph in cuda.graphs] == [1, 1, 1], "a capture records one run"
    assert {graph.pool for graph in cuda.graphs} == {(0, 1)} and cuda.handles == 1
    replays[1]()
    assert [graph.replays for graph in cuda.graphs] == [0, 1, 0]
    CudaGraphPool(DEVICE)
    assert cuda.handles == 2, "another pool has other memory"


def test_pieces_are_graphs_around_the_work_between(cuda: CudaStandIn) -> None:
    done: list[int] = []

    def run(between: Callable[[Callable[[], None]], None]) -> None:
        cuda.launch()
        for number in range(2):
            between(lambda: done.append(len([graph for graph in cuda.graphs if graph.replays])))
            for _ in range(number + 1):
                cuda.launch()

    replay = CudaGraphPool(DEVICE).capture_in_pieces(run)
    assert [graph.launches for graph in cuda.graphs] == [1, 1, 2] and {graph.pool for graph in cuda.graphs} == {(0, 1)}
    assert len(done) == 6, "twice to warm up, and once between the captures"
    done.clear()
    replay()
    assert done == [1, 2] and [graph.replays for graph in cuda.graphs] == [1, 1, 1]


def test_only_cuda_devices_have_pools(cuda: CudaStandIn) -> None:
    assert graph_pools(torch.device("cpu")) is None
    make = graph_pools(DEVICE)
    assert make is not None and isinstance(make(), CudaGraphPool)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["does not wait before", "does not wait after", "no warm-up"])
def test_a_wrong_order_is_noticed(cuda: CudaStandIn, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    wait = Stream.wait_stream
    if wrong == "no warm-up":
        monkeypatch.setattr(cuda_graph, "_WARM_UPS", 0)
    else:
        skipped = (lambda self: self is not cuda.default) if "before" in wrong else (lambda self: self is cuda.default)
        monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None if skipped(self) else wait(self, other))
    with pytest.raises(AssertionError):
        captured(cuda)
