"""Captured decode steps through DeepEP's low-latency mode: the bits of the same engine in Python.

Ranks are threads over stand-ins: `deep_ep` of release 1.2, whose low-latency calls a capture records, and NCCL.
Bfloat16 on the compiled operators, where a row has the same bits in every batch.

    low_latency   experts move while requests run: where they lie changes no bit
    auto          steps of more than `MOST` tokens a rank go through normal mode, in Python, between replays of the
                  others.  There the place of experts decides how sums are rounded, so that they move between requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rollout.core.messages.experts import EplbRebalanceReqInput, GetExpertLocationReqInput
from rollout.distributed.communicator import Communicator
from rollout.engine import build
from rollout.executor import graph_runner
from rollout.kernels.operators.fused_experts import weighted_sum
from rollout.kernels.ops import Ops
from rollout.layers.moe.dispatchers import select
from rollout.layers.moe.dispatchers.base import DispatchOutput, PackedRows
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher
from rollout.layers.moe.dispatchers.deep_ep_library import DeepEpApi, DeepEpShape
from rollout.layers.moe.dispatchers.deep_ep_modes import LowLatencyMode, NormalMode
from tests.adapters import write_adapter
from tests.captured_ranks import captured_gloo, captured_ranks
from tests.deepep_stand_in import stand_in
from tests.graph_stand_in import StandInGraphPool, launch
from tests.kernels import native_ops
from tests.late_loop import overlap
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness

MOST = 4  # tokens of a rank that low-latency mode takes here
TOP_K, SLOTS, INNER = 3, 10, 16  # two experts of eight are held twice
MODEL: dict[str, Any] = {
    "hidden_size": 2048,  # the least that low-latency mode takes
    "heads": 2,
    "kv_heads": 2,
    "moe_intermediate_size": INNER,
    "dtype": "bfloat16",
    "top_k": TOP_K,
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_total_tokens": 128,
    "chunked_prefill_size": 8,
    "max_running_requests": MOST,
    "enable_return_routed_experts": True,
    "random_seed": 1,
    "num_threads": 1,
    "tp_size": 2,
    "ep_size": 2,
    "moe_a2a_backend": "deepep",
    "ep_num_redundant_experts": SLOTS - 8,
    "enable_eplb": True,
    "eplb_rebalance_num_iterations": 100_000,
}
DP2: dict[str, Any] = {"dp_size": 2, "enable_dp_attention": True}
ENGINES: dict[str, dict[str, Any]] = {
    "dp2, low_latency": DP2 | {"deepep_mode": "low_latency"},
    "dp2, auto": DP2 | {"deepep_mode": "auto"},
    "tp2, low_latency": {"deepep_mode": "low_latency"},
    "tp2, auto": {"deepep_mode": "auto"},
}


class Load(NamedTuple):
    """The experts of one layer and rank in one step: rows that were expected, that came, and that there is room for."""

    expected: int
    rows: int
    places: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    native_ops()
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "moe", seed=3, **MODEL)


@contextmanager
def deep_ep(loads: list[Load]) -> Iterator[pytest.MonkeyPatch]:
    """Let engines use the stand-in of DeepEP, and experts of packed rows that note their `loads`."""

    def dispatcher(_: None, communicator: Communicator, shape: DeepEpShape) -> DeepEpDispatcher:
        library, shape = stand_in(communicator, "1.2"), replace(shape, max_low_latency_tokens=MOST)
        return DeepEpDispatcher(library, communicator, shape, has_rdma=True)

    with captured_ranks() as patch:
        select_ops = build.select_ops
        patch.setattr(build, "select_ops", lambda *args, **named: _packing(select_ops(*args, **named), loads))
        patch.setattr(select, "require_deep_ep", lambda _: None)
        patch.setattr(select, "DeepEpDispatcher", dispatcher)
        yield patch


def _packing(ops: Ops, loads: list[Load]) -> Ops:
    """Return the operators with experts of packed rows, which write nothing to places without a row."""

    def packed_experts(
        hidden_PND: torch.Tensor,
        counts_P: torch.Tensor,
        expected: int,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        def compute() -> None:
            out_PND.fill_(torch.nan)
            loads.append(Load(expected, int(counts_P.sum()), num_rows))
            ids_R1 = PackedRows(counts_P).local_ids(num_rows)
            filled_R = ids_R1.squeeze(1) >= 0
            rows_RD = hidden_PND.flatten(0, 1)[filled_R]
            if rows_RD.shape[0]:
                out = ops.fused_experts(rows_RD, ids_R1[filled_R], None, w13, w2, INNER, *rest)
                out_PND.flatten(0, 1)[filled_R] = out.squeeze(1)

        out_PND, num_rows = torch.empty_like(hidden_PND), hidden_PND.shape[0] * hidden_PND.shape[1]
        launch(compute, "packed_experts")
        return out_PND

    return ops.replace(packed_experts=packed_experts)


class Ran(NamedTuple):
    """Answers before, during and after a rebalance, where experts lie after it, and the parts that were replayed."""

    answers: list[tuple[Any, ...]]
    location: list[list[int]]
    num_replays: int


def run(folder: Path, captures: bool, adapted: str = "", **settings: Any) -> Ran:
    """Decode between prompts that are too long for low-latency mode, and move experts while requests run.

    The requests that `adapted` names have the adapter "a".
    """
    settings = SETTINGS | settings | {"disable_cuda_graph": not captures}
    with ParallelHarness(folder, captured_gloo, **settings) as harness:
        runners = [scheduler.runner.graphs for scheduler in harness.schedulers]
        assert all((runner is not None) == captures for runner in runners)
        replays = StandInGraphPool.num_replays

        def submit(name: str, length: int, tokens: int) -> str:
            params = {"max_new_tokens": tokens, "temperature": 0.8, "sampling_seed": length}
            prompt = list(range(length, 2 * length))
            lora_name = "a" if name in adapted else None
            return harness.submit(prompt, name, params, dp_rank=len(rids) % harness.num_dp_ranks, lora_name=lora_name)

        rids: list[str] = []
        for name, length, tokens in (("a", 3, 12), ("b", 9, 9), ("c", 2, 5)):
            rids.append(submit(name, length, tokens))
        for _ in range(6):
            harness.tick()
        if settings["deepep_mode"] == "auto":
            harness.run()
        moved = harness.control(EplbRebalanceReqInput, algorithm="balanced")
        assert moved.success and moved.data["rebalanced"], moved.message
        rids += [submit("d", 11, 6), submit("e", 2, 8)]
        harness.run()
        harness.check_idle()
        location = harness.control(GetExpertLocationReqInput).data["physical_to_logical_map"]
        results = [harness.results[rid] for rid in rids]
        answers = [(x.token_ids, x.logprobs, x.routes.tolist()) for x in results]
        return Ran(answers, location, StandInGraphPool.num_replays - replays)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ran:
    """Return the work of an engine in Python that uses both modes."""
    with deep_ep([]):
        return run(folder, captures=False, **ENGINES["dp2, auto"])


@pytest.mark.full(but=("dp2, auto",))
@pytest.mark.parametrize("engine", ENGINES)
def test_replays_give_what_steps_in_python_give(folder: Path, engine: str) -> None:
    """The same tokens, log-probabilities and routes; the same loads, by which experts are moved."""
    loads: list[Load] = []
    with deep_ep(loads):
        plain = run(folder, captures=False, **ENGINES[engine])
        loads.clear()
        found = run(folder, captures=True, **ENGINES[engine])
    assert found.answers == plain.answers and found.location == plain.location
    assert plain.num_replays == 0 and found.num_replays > 20
    check_loads(loads)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["dp2, low_latency", "dp2, auto"])
def test_replays_give_the_same_while_the_host_is_a_step_ahead(folder: Path, engine: str) -> None:
    with deep_ep([]) as patch:
        overlap(patch)
        plain = run(folder, captures=False, **ENGINES[engine])
        found = run(folder, captures=True, **ENGINES[engine])
    assert found.answers == plain.answers and found.num_replays > 20


def adapter_of_experts(folder: Path) -> Path:
    """Write an adapter of all experts of a layer."""
    generator = torch.Generator().manual_seed(0)
    modules = {
        f"model.layers.1.mlp.experts.{expert}.down_proj": (
            torch.randn(2, INNER, generator=generator),
            torch.randn(2048, 2, generator=generator),
        )
        for expert in range(8)
    }
    return write_adapter(folder, modules, 1.0)


class RecordedGather(NamedTuple):
    """Ranks whose exchange of slots a capture records, as it does on a device."""

    ranks: Communicator

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_empty(self.ranks.size, *tensor.shape)
        launch(lambda: out.copy_(self.ranks.all_gather(tensor)), "all_gather of slots")
        return out


class GathersOnTheDevice(LowLatencyMode):
    def __init__(self, buffer: Any, shape: DeepEpShape, communicator: Communicator) -> None:
        super().__init__(buffer, shape, communicator)
        self.communicator: Any = RecordedGather(communicator)


class DropsSlots(GathersOnTheDevice):
    """A wrong mode: rows come without a slot."""

    def dispatch_adapted(self, *args: torch.Tensor) -> DispatchOutput:
        return super().dispatch_adapted(*args[:3], torch.full_like(args[3], -1))


class TakesTheNeighboursSlots(GathersOnTheDevice):
    """A wrong mode: each token has the slot of the one before."""

    def dispatch_adapted(self, *args: torch.Tensor) -> DispatchOutput:
        return super().dispatch_adapted(*args[:3], args[3].roll(1))


def carry_slots_on_the_device(patch: pytest.MonkeyPatch, mode: type[LowLatencyMode] = GathersOnTheDevice) -> None:
    """Let captures record exchanges of slots, and let experts with adapters take empty slots, as on CUDA devices."""
    select_ops = build.select_ops

    def selected(*arguments: Any, **named: Any) -> Ops:
        ops = select_ops(*arguments, **named)

        def adapted_experts(
            hidden_RD: torch.Tensor,
            ids_RS: torch.Tensor,
            weights_RS: torch.Tensor | None,
            *rest: Any,
            expected: int | None = None,
        ) -> torch.Tensor:
            most = rest[0].shape[0] - 1
            filled_RS = (ids_RS >= 0) & (ids_RS <= most)
            out_RSD = ops.adapted_experts(hidden_RD, ids_RS.clamp(0, most), None, *rest)
            out_RSD = out_RSD.masked_fill(~filled_RS.unsqueeze(2), 0.0)
            return out_RSD if weights_RS is None else weighted_sum(out_RSD, weights_RS.masked_fill(~filled_RS, 0.0))

        return ops.replace(adapted_experts=adapted_experts)

    use(patch, mode)
    patch.setitem(DeepEpDispatcher.modes, DeepEpApi.LOW_LATENCY, (None, mode))
    patch.setattr(build, "select_ops", selected)


def mistakes_of_adapters(folder: Path, adapter: Path, engine: str, mode: type[LowLatencyMode]) -> set[str]:
    """Return what goes wrong with slots of steps after the capture, while experts move.

    Ranks have requests with the adapter and without.
    """
    settings = ENGINES[engine] | {"enable_lora": True, "lora_paths": f"a={adapter}"}
    with deep_ep([]) as patch:
        carry_slots_on_the_device(patch, mode)
        plain = run(folder, captures=False, adapted="ad", **settings)
        found = run(folder, captures=True, adapted="ad", **settings)
        without = run(folder, captures=True, **settings)
    assert found.location == plain.location and plain.num_replays == 0 and found.num_replays > 20
    differ = [one != other for one, other in zip(found.answers, without.answers, strict=True)]
    checks = {
        "replays": found.answers == plain.answers,
        "the adapter counts": differ[0] and differ[3],
        "others have the bits of a batch without": not (differ[1] or differ[2] or differ[4]),
    }
    return {check for check, holds in checks.items() if not holds}


@pytest.mark.full(but=("dp2, auto",))
@pytest.mark.parametrize("engine", ENGINES)
def test_replays_bring_the_adapters_of_rows(folder: Path, tmp_path: Path, engine: str) -> None:
    adapter = adapter_of_experts(tmp_path / "adapter")
    assert mistakes_of_adapters(folder, adapter, engine, GathersOnTheDevice) == set()


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("mode", "mistake"),
    [
        (DropsSlots, "the adapter counts"),
        (TakesTheNeighboursSlots, "others have the bits of a batch without"),
    ],
)
def test_wrong_slots_in_captured_steps_are_noticed(
    folder: Path, tmp_path: Path, mode: type[LowLatencyMode], mistake: str
) -> None:
    adapter = adapter_of_experts(tmp_path / "adapter")
    assert mistake in mistakes_of_adapters(folder, adapter, "dp2, low_latency", mode)


CAPTURED = {"auto": [1, 2, MOST], "low_latency": [1, 2, MOST, MOST + 2], "normal": None}


@pytest.mark.parametrize("mode", CAPTURED)
def test_mode_and_size_decide_which_steps_are_captured(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    settings = SETTINGS | DP2 | {"deepep_mode": mode, "max_running_requests": MOST + 2}
    with deep_ep([]), ParallelHarness(folder, captured_gloo, **settings) as harness:
        runners = [scheduler.runner.graphs for scheduler in harness.schedulers]
    assert [None if runner is None else runner.sizes for runner in runners] == [CAPTURED[mode]] * 2
    said = capsys.readouterr().err
    reason = "deep_ep waits on the host for the number of rows, in steps of"
    assert (f"steps of more than {MOST} requests are not captured: {reason} {MOST + 2} tokens" in said) == (
        mode == "auto"
    )
    assert (f"steps are not captured, decoding is slower: {reason} 1 tokens" in said) == (mode == "normal")


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_experts_have_the_adapters_of_rows_of_other_ranks(folder: Path, tmp_path: Path, mode: str) -> None:
    """Log-probabilities as by all_to_all, but for roundings of sums."""
    path = adapter_of_experts(tmp_path / "adapter")
    lora: dict[str, Any] = {"enable_lora": True, "lora_paths": f"a={path}", "disable_cuda_graph": True}
    prompts = [list(range(5 + number, 11 + number)) for number in range(4)]

    def scores(names: list[str | None], **settings: Any) -> list[float]:
        with ParallelHarness(folder, captured_gloo, **SETTINGS | DP2 | lora | settings) as harness:
            asked = enumerate(zip(prompts, names, strict=True))
            params = {"max_new_tokens": 1, "temperature": 0.0}
            rids = [
                harness.submit(prompt, str(number), params, dp_rank=number % 2, lora_name=name)
                for number, (prompt, name) in asked
            ]
            harness.run()
            return [harness.results[rid].logprobs[0] for rid in rids]

    with deep_ep([]) as patch:
        select_ops = build.select_ops  # compiled operators take no empty slots
        few = lambda *args, **named: select_ops(*args, **named).replace(takes_empty_slots=False)  # noqa: E731
        patch.setattr(build, "select_ops", few)
        found = scores(["a", None, None, "a"], deepep_mode=mode)
        wanted = scores(["a", None, None, "a"], moe_a2a_backend="all_to_all")
        without = scores([None] * 4, moe_a2a_backend="all_to_all")
    assert found == pytest.approx(wanted, abs=0.05)
    assert max(abs(one - other) for one, other in zip(found[::3], without[::3], strict=True)) > 0.2, "it must count"


def check_loads(loads: list[Load]) -> None:
    """Check that experts compute the rows that came, and take tiles for about as many, not for the room."""
    assert loads
    for load in loads:
        most = load.places // SLOTS  # tokens of a rank
        assert load.rows <= 2 * most * TOP_K and load.expected <= most * TOP_K


# --- what is wrong --------------------------------------------------------------------------------------------------


class KeepsItsHandle(LowLatencyMode):
    """A wrong mode: where rows came from is as it was at the capture."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        (src_info, layout_range, *sizes), *rest = work.handle
        with _disable_current_modes():
            kept = layout_range.clone()
        work.handle = (src_info, kept, *sizes), *rest
        return work


def use(patch: pytest.MonkeyPatch, mode: type[LowLatencyMode]) -> None:
    patch.setitem(DeepEpDispatcher.modes, DeepEpApi.NORMAL_AND_LOW_LATENCY, (NormalMode, mode))


def stale_handles(patch: pytest.MonkeyPatch) -> None:
    use(patch, KeepsItsHandle)


def leaves_the_buffer_dirty(patch: pytest.MonkeyPatch) -> None:
    """Leave the buffer as it is between a step in normal mode and a replay (wrong)."""
    patch.setattr(DeepEpDispatcher, "_clean", lambda self: None)


def takes_padding_for_requests(patch: pytest.MonkeyPatch) -> None:
    """Begin the results of a step with its second row, so that padding counts (wrong)."""
    patch.setattr(graph_runner, "_owned", lambda buffer, count: buffer.roll(-1, 0)[:count].clone())


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [stale_handles, leaves_the_buffer_dirty, takes_padding_for_requests])
def test_wrong_captures_are_noticed(folder: Path, plain: Ran, wrong: Callable[[pytest.MonkeyPatch], None]) -> None:
    with deep_ep([]) as patch:
        wrong(patch)
        with pytest.raises(AssertionError):
            assert run(folder, captures=True, **ENGINES["dp2, auto"]).answers == plain.answers


@pytest.mark.mutant
def test_tiles_by_padding_are_noticed(folder: Path, plain: Ran) -> None:
    """The answers are the same, as no tile changes a bit."""
    loads: list[Load] = []
    dispatch = DeepEpDispatcher.dispatch

    def expecting_a_row_in_each_place(*given: Any) -> DispatchOutput:
        work = dispatch(*given)
        work.expected = work.hidden_RD.shape[0]
        return work

    with deep_ep(loads) as patch:
        patch.setattr(DeepEpDispatcher, "dispatch", expecting_a_row_in_each_place)
        assert run(folder, captures=True, **ENGINES["dp2, auto"]).answers == plain.answers
    with pytest.raises(AssertionError):
        check_loads(loads)
