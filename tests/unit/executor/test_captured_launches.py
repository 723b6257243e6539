"""The launches of captured decode steps on several ranks, counted as they are recorded.

The real engine, runner and dispatchers with the operators of CUDA, over the stand-ins for captures and for NCCL.  The
kernels of these operators are left out, as nothing here compares bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreted import interpreted_ops  # before any kernel

# isort: split
from triton.runtime import interpreter

from rollout.distributed.communicator import Communicator
from rollout.distributed.parallel import join
from rollout.engine import build
from rollout.kernels.gpu import fused_experts
from rollout.model.decoder import DecoderLayer
from rollout.scheduler.scheduler import Scheduler
from tests import parallel_harness
from tests.captured_ranks import captured_gloo, captured_ranks
from tests.graph_stand_in import StandInGraphPool, launch
from tests.kernels import native_ops
from tests.late_loop import overlap
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 96,
    "chunked_prefill_size": 8,
    "max_running_requests": 2,
    "enable_return_routed_experts": True,
    "random_seed": 1,
    "num_threads": 1,
}
DP2 = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"tp_size": 2},
    "tp2 ep2": {"tp_size": 2, "ep_size": 2},
    "dp2 ep2": DP2 | {"ep_size": 2},
    "dp2, experts split": DP2,
}
BEGIN, END = "a layer begins", "a layer ends"
GATHER, EXCHANGE, SUM = "all_gather over ranks", "all_to_all over ranks", "sum_in_order"
SUM_OF_RANKS = [GATHER, SUM]

# FlashInfer merges its parts in a launch of its own; here attention is one call.
ATTENTION = ["mm", "qk_norm_rope_store_kernel", "paged_attention", "mm"]
ROUTER = ["add_rms_norm_kernel", "route_kernel"]
EXPERTS = ["gate_up_kernel", "down_kernel"]
ITS_SUM = "weighted_sum_kernel"
LAYERS: dict[str, list[str]] = {
    "one rank": [*ATTENTION, *ROUTER, *EXPERTS],
    "tp2": [*ATTENTION, *SUM_OF_RANKS, *ROUTER, *EXPERTS, ITS_SUM, *SUM_OF_RANKS],
    "tp2 ep2": [*ATTENTION, *SUM_OF_RANKS, *ROUTER, "sub", *EXPERTS, ITS_SUM, *SUM_OF_RANKS],
    "dp2 ep2": [*ATTENTION, *ROUTER, GATHER, "sub", *EXPERTS, ITS_SUM, EXCHANGE, SUM],
    "dp2, experts split": [*ATTENTION, *ROUTER, GATHER, *EXPERTS, ITS_SUM, EXCHANGE, SUM],
}
"""The launches behind the norm that begins a layer."""
HEADS = {name: ["mm"] for name in LAYOUTS} | {name: ["mm", GATHER, "clone"] for name in ("tp2", "tp2 ep2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    native_ops()
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "moe", "moe", tie=False)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Leave the kernels of CUDA's operators out, and mark where layers begin and end."""
    compute = DecoderLayer.__call__

    def kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(_nothing, self.fn.__name__)

    def marked(self: DecoderLayer, *args: Any) -> Any:
        launch(_nothing, BEGIN)
        out = compute(self, *args)
        launch(_nothing, END)
        return out

    ops = interpreted_ops().replace(graph_safe=True)
    with captured_ranks() as patch:
        patch.setattr(build, "select_ops", lambda *_, **__: ops)
        patch.setattr(interpreter.GridExecutor, "__call__", kernel)
        patch.setattr(DecoderLayer, "__call__", marked)
        yield patch


def _nothing() -> None:
    """Do nothing."""


def recordings(folder: Path, layout: dict[str, Any]) -> list[list[str]]:
    """Return what every rank records of a step of two requests: its forward, and its sampling."""
    if layout:
        with ParallelHarness(folder, captured_gloo, **SETTINGS | layout) as harness:
            schedulers = harness.schedulers
    else:
        schedulers = [Harness(folder, **SETTINGS).scheduler]
    found = [scheduler.runner.graphs._pool.recordings for scheduler in schedulers]
    assert all(one == found[0] for one in found)
    return found[0][:2]


def layers_of(forward: list[str]) -> tuple[list[list[str]], list[str]]:
    """Return the launches of each layer, and the others."""
    layers, others, inside = [], [], False
    for name in forward:
        if name in (BEGIN, END):
            inside = name == BEGIN
            layers += [[]] if inside else []
        else:
            (layers[-1] if inside else others).append(name)
    return layers, others


@pytest.mark.parametrize("layout", LAYOUTS)
def test_launches_of_a_step(folder: Path, patch: pytest.MonkeyPatch, layout: str) -> None:
    """On a lone rank the next norm sums the outputs of experts; on several it begins with their sum over ranks."""
    forward, sampling = recordings(folder, LAYOUTS[layout])
    norm = "experts_norm_kernel" if layout == "one rank" else "add_rms_norm_kernel"
    layers, others = layers_of(forward)
    assert layers == [["add_rms_norm_kernel", *LAYERS[layout]], [norm, *LAYERS[layout]]]
    routes = ["stack", "copy_"]
    assert others == ["index_select", "index_select", norm, "copy_", *routes]
    assert sampling == [*HEADS[layout], "sampler"]


def test_more_assignments_have_a_plan_as_on_one_rank(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused_experts, "few_assignments", lambda _: 0)
    for layout in ("one rank", "dp2 ep2"):
        _, second = layers_of(recordings(folder, LAYOUTS[layout])[0])[0]
        expected = list(LAYERS[layout])
        expected.insert(expected.index("gate_up_kernel"), "plan_kernel")
        assert second[1:] == expected


class SharedMemory:
    """Sums in memory of one another's devices, which are one launch.  This one copies its own part."""

    def __init__(self, group: Communicator) -> None:
        """Take any group."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(tensor)
        launch(lambda: out.copy_(tensor), "peer_sum_kernel")
        return out


def test_a_sum_in_memory_of_other_devices_is_one_launch(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parallel_harness, "join", partial(join, connect_peers=SharedMemory))
    expected = [*ATTENTION, "peer_sum_kernel", *ROUTER, "sub", *EXPERTS, ITS_SUM, "peer_sum_kernel"]
    layers, _ = layers_of(recordings(folder, LAYOUTS["tp2 ep2"])[0])
    assert [layer[1:] for layer in layers] == [expected] * 2


# --- the host -----------------------------------------------------------------------------------------------------


HOST = {"tp2": ["tp broadcast"], "dp2 ep2": ["tp broadcast", "attn_dp all_gather"]}


@pytest.mark.parametrize("layout", HOST)
def test_what_the_host_does_beside_replays(folder: Path, layout: str) -> None:
    """A turn shares time and messages, and token counts where there are several: before the step ahead is finished."""
    events: list[str] = []

    def noted(method: Any, name: Any) -> Any:
        def call(*args: Any) -> Any:
            if threading.current_thread().name.startswith("rank0"):
                events.append(name(*args))
            return method(*args)

        return call

    with captured_ranks() as patch:
        overlap(patch)
        patch.setattr(Communicator, "_run", noted(Communicator._run, lambda self, verb, *_: f"{self.name} {verb}"))
        patch.setattr(StandInGraphPool, "_replay", noted(StandInGraphPool._replay, lambda *_: "replay"))
        patch.setattr(Scheduler, "_finish", noted(Scheduler._finish, lambda *_: "finish the step before"))
        with ParallelHarness(folder, captured_gloo, **SETTINGS | LAYOUTS[layout]) as harness:
            for dp_rank in range(harness.num_dp_ranks):
                harness.submit([5, 6, 7], params={"max_new_tokens": 20}, dp_rank=dp_rank)
            for _ in range(4):
                harness.tick()
            events.clear()
            for _ in range(3):
                harness.tick()
    assert events == [*HOST[layout], "replay", "replay", "finish the step before"] * 3
