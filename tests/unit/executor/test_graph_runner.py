"""Captured steps on the CPU: the real graph runner over a stand-in for CUDA graphs.

Float32 on the compiled operators, where a row has the same bits in every batch: padded or not, replayed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.capturer import RoutedExpertsCapturer
from eplb.expert_location import ExpertLocationMetadata
from eplb.load_dump import LoadDump
from rollout.attention.native_cpu import _CapturedCpuBackend
from rollout.core.errors import FatalError, StartupError
from rollout.core.messages.experts import (
    DumpExpertDistributionReqInput,
    StartExpertDistributionReqInput,
    StopExpertDistributionReqInput,
)
from rollout.core.messages.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from rollout.engine import build
from rollout.executor import graph_runner
from rollout.executor.graph_buffers import GraphBuffers
from rollout.executor.graph_runner import GraphRunner, graph_batch_sizes
from rollout.kernels.ops import plain_ops
from rollout.layers.moe.experts import Experts
from rollout.memory.window_pages import WindowPages
from tests.family_zoo import family_checkpoint
from tests.graph_loop import captured_engines
from tests.graph_stand_in import StandInGraphPool
from tests.kernels import native_ops
from tests.late_loop import overlap
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness

SMALL = {"max_total_tokens": 72, "chunked_prefill_size": 8, "max_running_requests": 7, "weight_version": "v0"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


@pytest.fixture
def graphs() -> Iterator[pytest.MonkeyPatch]:
    with captured_engines() as patch:
        StandInGraphPool.reset_counts()
        yield patch


def prompt_of(index: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, 250, (length,), generator=generator).tolist()


def asks() -> Iterator[tuple[list[int], dict[str, Any], dict[str, Any]]]:
    """Yield greedy and random requests of many lengths; some ask for more than is captured."""
    for index in range(12):
        params: dict[str, Any] = {"max_new_tokens": 5 + 7 * index % 19}
        if index % 2:
            params |= {"temperature": 0.7 + 0.1 * index, "sampling_seed": index}
        params |= {5: {"top_p": 0.6}, 7: {"min_p": 0.1, "top_p": 0.9}, 9: {"top_k": 5}}.get(index, {})
        fields: dict[str, Any] = {"top_logprobs_num": 2} if index == 4 else {}
        if index in (7, 9):
            fields = {"return_sampling_mask": True}
        yield prompt_of(index, 2 + 3 * index % 8), params, fields


def play(harness: Harness, prefix: str = "") -> list[tuple]:
    rids = [
        harness.submit(prompt, rid=f"{prefix}{number}", params=params, **fields)
        for number, (prompt, params, fields) in enumerate(asks())
    ]
    harness.run()
    harness.check_idle()
    results = [harness.results[rid] for rid in rids]
    return [(x.token_ids, x.logprobs, x.top, x.routes.tolist(), x.versions, x.mask) for x in results]


def runner_of(harness: Harness) -> GraphRunner:
    graphs = harness.scheduler.runner.graphs
    assert graphs is not None
    return graphs


@pytest.mark.parametrize("in_flight", [False, True], ids=["sequential", "late"])
def test_replays_give_what_steps_in_python_give(folders: list[Path], graphs: Any, in_flight: bool) -> None:
    """Tokens, log-probabilities and routes have the same bits, with padding and while the next step is in flight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "capture_all", lambda *args: None)
        expected = play(Harness(folders[0], **SMALL))
    if in_flight:
        overlap(graphs)
    harness = Harness(folders[0], **SMALL)
    assert runner_of(harness).sizes == [1, 2, 4, 7]
    captured = StandInGraphPool.num_captures
    assert captured == 8, "forward and sampling, for each size"
    assert play(harness) == expected
    assert StandInGraphPool.num_replays > 30
    assert StandInGraphPool.num_captures == captured


def test_rows_with_filters_and_masks_are_sampled_in_the_graph(folders: list[Path], graphs: pytest.MonkeyPatch) -> None:
    harness, sampled = Harness(folders[0], **SMALL), []
    sample = GraphRunner.sample
    graphs.setattr(GraphRunner, "sample", lambda *given: sampled.append(sample(*given)) or sampled[-1])
    params = {"max_new_tokens": 6, "temperature": 1.0, "min_p": 1e-4}
    rid = harness.submit(prompt_of(1, 5), params=params, return_sampling_mask=True)
    harness.submit(prompt_of(2, 5), params={"max_new_tokens": 4})
    harness.run()
    counts = harness.results[rid].mask.counts
    assert len(counts) == 6 and max(counts) > 1 and len(sampled) >= 4 and None not in sampled


def test_a_replay_records_this_steps_routes(folders: list[Path], graphs: pytest.MonkeyPatch) -> None:
    """Regression of a known fault elsewhere: rows of routes that the step before left in the captured buffer."""
    harness = Harness(folders[0], **SMALL)
    store, seen = harness.scheduler.runner.route_store, []
    assert store is not None
    write = store.write
    graphs.setattr(store, "write", lambda slots, rows: (seen.append(rows.clone()), write(slots, rows)))
    harness.generate([prompt_of(1, 5)], {"max_new_tokens": 12})
    decodes = [rows for rows in seen if len(rows) == 1]
    assert len(decodes) >= 10 and any(not torch.equal(one, two) for one, two in pairwise(decodes))
    whole = Harness(folders[0], **SMALL | {"disable_cuda_graph": True})
    again = whole.generate([prompt_of(1, 5)], {"max_new_tokens": 12})[0]
    assert harness.results["r1"].routes.tolist() == again.routes.tolist()


def test_padding_touches_nothing_of_anybody(folders: list[Path], graphs: Any) -> None:
    """Three requests in a step of four: KV goes to their slots and to the padding slot, rows to their slots alone."""
    harness = Harness(folders[0], **SMALL)
    pool, store = harness.scheduler.runner.kv_pool, harness.scheduler.runner.route_store
    assert store is not None
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(torch.nan)
    pool._epoch[:] = -1
    results = harness.generate([prompt_of(index, 4) for index in range(3)], {"max_new_tokens": 9})
    used = 3 * (4 + 8)
    written = [~tensor.isnan().any(-1).any(-1) for tensor in pool.k]
    for slots in written:
        assert slots[pool.padding_slot] and int(slots.sum()) == used + 1
    assert int((pool._epoch >= 0).sum()) == used == int(store._written.sum())
    assert len(store._written) == len(pool._epoch) == pool.padding_slot
    assert all(torch.tensor(result.logprobs).isfinite().all() for result in results)


@pytest.mark.parametrize("captures_routes", [True, False], ids=["captured", "from then on"])
def test_expert_loads_count_no_padding(folders: list[Path], graphs: Any, captures_routes: bool) -> None:
    """An engine that captured no routes at the start captures its steps anew with them, once."""
    settings = SMALL | {"enable_return_routed_experts": captures_routes}

    def counts(**more: Any) -> Any:
        harness = Harness(folders[0], **settings | more)
        assert harness.control(StartExpertDistributionReqInput, mode="stat").success
        harness.generate([prompt_of(index, 4) for index in range(3)], {"max_new_tokens": 9})
        answer = harness.control(DumpExpertDistributionReqInput)
        assert harness.control(StopExpertDistributionReqInput).success
        harness.generate([prompt_of(index, 4) for index in range(3)], {"max_new_tokens": 9})
        return {name: counts.tolist() for name, counts in LoadDump.from_message(answer.data["dump"]).tensors.items()}

    assert counts() == counts(disable_cuda_graph=True)
    assert StandInGraphPool.num_replays


@pytest.mark.parametrize("staging", ["host", "device", "journal", "in_place"])
def test_a_refresh_is_seen_without_a_new_capture(
    folders: list[Path], graphs: Any, tmp_path: Path, staging: str
) -> None:
    journal = {"weight_journal_dir": str(tmp_path)} if staging == "journal" else {}
    settings = SMALL | {"weight_staging": staging} | journal
    expected = [Harness(folder, **settings | {"disable_cuda_graph": True}) for folder in folders]
    harness = Harness(folders[0], **settings)
    captured = StandInGraphPool.num_captures
    prompts = [prompt_of(index, 4) for index in range(3)]
    for version, fresh in enumerate(expected):
        if version:
            answer = refresh(harness, logical_tensors(folders[1]), "v1")
            assert answer.success, answer.message
        found = harness.generate(prompts, {"max_new_tokens": 9})
        wanted = fresh.generate(prompts, {"max_new_tokens": 9})
        assert [(x.token_ids, x.logprobs) for x in found] == [(x.token_ids, x.logprobs) for x in wanted]
        assert [x.routes.tolist() for x in found] == [x.routes.tolist() for x in wanted]
        assert found[0].versions == [(f"v{version}", 0, 9)]
    assert StandInGraphPool.num_captures == captured


def test_windows_with_pages_of_their_own(graphs: Any, tmp_path: Path) -> None:
    """Requests that pass from page to page; padding writes to the last slot of either pool."""
    folder = family_checkpoint(tmp_path / "model", "gpt_oss", 3, max_position_embeddings=512)
    settings = SMALL | {"max_total_tokens": 1200, "chunked_prefill_size": 64}
    answers, prompts = [], [prompt_of(index, 100 + 9 * index) for index in range(3)]
    for more in ({"disable_cuda_graph": True}, {}):
        harness = Harness(folder, **settings | more)
        assert isinstance(harness.scheduler.cache.states, WindowPages)
        pool = harness.scheduler.runner.kv_pool
        assert {len(k) for k in pool.k} == {pool.padding_slot + 1, pool.window_padding_slot + 1}
        answers.append([(x.token_ids, x.logprobs) for x in harness.generate(prompts, {"max_new_tokens": 60})])
        harness.check_idle()
    assert answers[0] == answers[1]
    assert StandInGraphPool.num_replays > 100


def moved(harness: Harness, map_row: list[int]) -> None:
    """Move the experts, weights and tables, to their slots by the map."""
    state = harness.scheduler.runner.state
    placement, experts = (
        state.placement,
        [layer for _, layer in state.model.named_layers() if isinstance(layer, Experts)],
    )
    old = placement.metadata.physical_to_logical_map
    new = torch.tensor(map_row).expand_as(old).clone()
    with state.mutate("test"):
        for layer, layer_experts in enumerate(experts):
            order = torch.stack([(old[layer] == expert).nonzero()[0, 0] for expert in new[layer]])
            for tensor in layer_experts.slot_tensors():
                tensor.copy_(tensor[order])
        placement.adopt(ExpertLocationMetadata(new, placement.num_logical_experts))
        state.publish_placement()


def test_a_placement_changes_under_the_recordings(folders: list[Path], graphs: Any) -> None:
    """A step is captured anew only if its calls change: from experts in order of slots to experts in another order."""
    harness = Harness(folders[0], **SMALL)
    expected = play(harness)
    num_experts = harness.scheduler.runner.state.placement.num_logical_experts
    captures = []
    for turn, shift in enumerate((3, 5, 0)):
        moved(harness, [(expert + shift) % num_experts for expert in range(num_experts)])
        before = StandInGraphPool.num_captures
        assert play(harness, f"{turn}-") == expected
        captures.append(StandInGraphPool.num_captures - before)
    assert captures[0] > 0 and captures[1] == 0 and captures[2] > 0


def test_a_weight_that_moved_is_noticed(folders: list[Path], graphs: Any) -> None:
    """Steps are captured anew if an address changes, against the promise that addresses stay."""
    harness = Harness(folders[0], **SMALL)
    captured = StandInGraphPool.num_captures
    expected = play(harness)
    move_a_weight(harness)
    assert play(harness, "again") == expected
    assert StandInGraphPool.num_captures > captured


def move_a_weight(harness: Harness) -> None:
    """Move a weight to another address at a commit, and overwrite its old memory."""
    state = harness.scheduler.runner.state
    head = state.model.lm_head.weight
    old = torch.empty(0, dtype=head.dtype).set_(head)
    head.set_(head.clone())
    old.zero_()
    with state.mutate("test"):
        state.relabel(state.epoch.weight_version)


def test_released_memory_comes_back_under_the_recordings(folders: list[Path], graphs: Any) -> None:
    harness = Harness(folders[0], **SMALL, enable_memory_saver=True, enable_weights_cpu_backup=True)
    captured = StandInGraphPool.num_captures
    expected = play(harness)
    assert harness.control(ReleaseMemoryOccupationReqInput).success
    table = harness.scheduler.cache.pool.table
    assert int(table[-1, 0]) == 0
    assert harness.control(ResumeMemoryOccupationReqInput).success
    assert int(table[-1, 0]) == harness.scheduler.runner.kv_pool.padding_slot
    assert play(harness, "again") == expected
    assert StandInGraphPool.num_captures == captured


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("qwen3_moe", {"disable_native_kernels": True}, "plain torch"),
        ("qwen3_moe", {"attention_backend": "torch_native"}, "TorchNativeBackend cannot be captured"),
    ],
)
def test_what_cannot_be_captured_says_why(
    tmp_path: Path, graphs: Any, capsys: pytest.CaptureFixture[str], family: str, settings: dict, reason: str
) -> None:
    harness = Harness(family_checkpoint(tmp_path / "model", family, 1), **SMALL, **settings)
    assert harness.scheduler.runner.graphs is None
    said = capsys.readouterr().err
    assert "steps are not captured, decoding is slower: " in said and reason in said


def test_a_replay_takes_a_plan_of_its_own(folders: list[Path], graphs: pytest.MonkeyPatch) -> None:
    """First runs on a GPU: a replay without its plan read freed indices, and the device was lost."""
    harness = Harness(folders[0], **SMALL)
    expected = play(harness)
    runner = runner_of(harness)
    steps = {size: step for (size, _), step in runner._captured.items()}
    samples, replays = runner._sampling, StandInGraphPool.num_replays
    plan = runner.plan_padding(2)
    for wrong in (steps[4].forward, samples[2]):
        with pytest.raises(
            FatalError, match=r"of a captured step of \d requests was replayed without a plan of its own"
        ):
            wrong(plan)
    steps[2].forward(plan)
    with pytest.raises(FatalError, match="forward of a captured step of 2"):
        steps[2].forward(plan)
    stale = runner.plan_padding(2)
    newest = runner.plan_padding(4)
    with pytest.raises(FatalError, match="forward of a captured step of 2"):
        steps[2].forward(stale)
    steps[4].forward(newest)
    samples[4](newest)
    with pytest.raises(FatalError, match="sample of a captured step of 4"):
        samples[4](newest)
    assert StandInGraphPool.num_replays == replays + 3
    assert play(harness, "again") == [
        (*one[:4], *two[4:]) for one, two in zip(expected, play(harness, "more"), strict=True)
    ]


def test_an_operator_that_waits_ends_the_start(folders: list[Path], graphs: pytest.MonkeyPatch) -> None:
    """The operators read the routes on the host, and wrongly claim that they can be captured."""
    graphs.setattr(build, "select_ops", lambda *_, **__: plain_ops().replace(graph_safe=True))
    with pytest.raises(
        StartupError, match=r"^capturing steps failed: .* give a smaller --cuda-graph-max-bs or --piece"
    ):
        Harness(folders[0], **SMALL)


def test_a_cpu_captures_nothing(folders: list[Path]) -> None:
    assert Harness(folders[0], **SMALL).scheduler.runner.graphs is None


def test_batch_sizes_to_capture_grow_up_to_the_largest_batch() -> None:
    assert graph_batch_sizes(1) == [1]
    assert graph_batch_sizes(3) == [1, 2, 3]
    assert graph_batch_sizes(24) == [1, 2, 4, 8, 12, 16, 24]
    sizes = graph_batch_sizes(600)
    assert sizes == sorted(set(sizes)) and sizes[-3:] == [544, 576, 600] and 256 in sizes


# --- wrong runners ----------------------------------------------------------------------------------------------------


def stale_routes(patch: pytest.MonkeyPatch) -> None:
    """Make captures write routes into a buffer that no replay reads (wrong)."""
    begin = RoutedExpertsCapturer.begin_step_in
    patch.setattr(RoutedExpertsCapturer, "begin_step_in", lambda self, rows: begin(self, torch.empty_like(rows)))


def padding_not_filled(patch: pytest.MonkeyPatch) -> None:
    """Keep the content of an earlier, larger step in the rows beyond the current step (wrong)."""
    patch.setattr(GraphBuffers, "_pad", lambda self, first: setattr(self, "_num_real", first))


def outputs_not_copied(patch: pytest.MonkeyPatch) -> None:
    """Return buffers instead of copies, so that the next replay overwrites outputs (wrong)."""
    patch.setattr(graph_runner, "_owned", lambda buffer, count: buffer[:count])


def too_small_a_graph(patch: pytest.MonkeyPatch) -> None:
    """Choose the graph of the next smaller batch size (wrong)."""
    bisect = graph_runner.bisect_left
    patch.setattr(graph_runner, "bisect_left", lambda sizes, count: max(bisect(sizes, count) - 1, 0))


def planned_once(patch: pytest.MonkeyPatch) -> None:
    """Plan attention only before the capture (wrong)."""
    plan = _CapturedCpuBackend.plan

    def first(self: _CapturedCpuBackend, batch: Any) -> None:
        if not vars(self).setdefault("_was_planned", False):
            self._was_planned = True  # type: ignore[attr-defined]
            plan(self, batch)

    patch.setattr(_CapturedCpuBackend, "plan", first)


def inputs_replaced(patch: pytest.MonkeyPatch) -> None:
    """Replace the captured buffers by the step's tensors (wrong)."""
    fill = GraphBuffers.fill

    def replaced(self: GraphBuffers, batch: Any) -> None:
        kept = self._input_ids
        self._input_ids = kept.clone()
        fill(self, batch)

    patch.setattr(GraphBuffers, "fill", replaced)


def settings_of_others(patch: pytest.MonkeyPatch) -> None:
    """Sample all rows with the temperatures and seeds of the first batch (wrong)."""
    takes = GraphRunner._takes

    def taken(self: GraphRunner, info: Any) -> bool:
        known = self._plain_of is not None
        return takes(self, info) if not known else self._sampler.plain_rows(info, "cpu") is not None

    patch.setattr(GraphRunner, "_takes", taken)


def positions_of_the_capture(patch: pytest.MonkeyPatch) -> None:
    """Draw every token with the number of the first position (wrong)."""
    patch.setattr(GraphBuffers, "fill_positions", lambda self, positions: None)


WRONG = [
    stale_routes,
    padding_not_filled,
    outputs_not_copied,
    too_small_a_graph,
    planned_once,
    inputs_replaced,
    settings_of_others,
    positions_of_the_capture,
]


def is_right(folder: Path, expected: list[tuple]) -> bool:
    """Tell whether an engine without a prefix cache gives the expected results.

    Without that cache, slots of KV are soon reused by another request.
    """
    try:
        return play(Harness(folder, **SMALL, disable_radix_cache=True)) == expected
    except (AssertionError, IndexError, KeyError, RuntimeError, ValueError):
        return False


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_runner_is_noticed(
    folders: list[Path], graphs: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    expected = play(Harness(folders[0], **SMALL | {"disable_cuda_graph": True}))
    overlap(graphs)
    assert is_right(folders[0], expected)
    wrong(graphs)
    assert not is_right(folders[0], expected)


@pytest.mark.mutant
def test_addresses_that_nobody_compares_are_noticed(folders: list[Path], graphs: pytest.MonkeyPatch) -> None:
    harness = Harness(folders[0], **SMALL)
    expected = play(harness)
    graphs.setattr(GraphRunner, "_renew", lambda self, with_routes: None)
    move_a_weight(harness)
    assert play(harness, "again") != expected
