"""Captured steps of engines with several ranks: the bits of the same engine in Python, and one decision of all ranks.

Float32 on the compiled operators, where a row has the same bits in every batch: padded or not, replayed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rollout.core.forward_batch import StepKind
from rollout.core.messages.experts import StartExpertDistributionReqInput, StopExpertDistributionReqInput
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import UpdateWeightsFromTensorReqInput
from rollout.engine import build_graphs
from rollout.executor.graph_runner import GraphRunner
from tests.captured_ranks import Ask, Ran, captured_gloo, captured_ranks, run_processes
from tests.graph_stand_in import StandInGraphPool
from tests.kernels import native_ops
from tests.late_loop import overlap
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 96,
    "chunked_prefill_size": 8,
    "max_running_requests": 7,
    "enable_return_routed_experts": True,
    "random_seed": 1,
    "num_threads": 1,
    "weight_version": "v0",
}
DP2: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2 ep2": {"tp_size": 2, "ep_size": 2},
    "dp2 ep2": DP2 | {"ep_size": 2},
    "dp2, experts split": DP2,
}
FOUR = {"tp4, dp2 ep2": DP2 | {"tp_size": 4, "ep_size": 2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


@pytest.fixture
def graphs() -> Iterator[pytest.MonkeyPatch]:
    with captured_ranks() as patch:
        yield patch


def asks(num_dp_ranks: int) -> Iterator[Ask]:
    """Yield requests of many lengths.  The first rank has more of them than the second, and ends last."""
    for index in range(9):
        params: dict[str, Any] = {"max_new_tokens": 3 + 5 * index % 13 if index % 3 else 14}
        if index % 2:
            params |= {"temperature": 0.7 + 0.1 * index, "sampling_seed": index}
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(1, 250, (2 + 3 * index % 7,), generator=generator).tolist()
        yield Ask(prompt, params, (index % 3 == 2) * (num_dp_ranks - 1))


def play(harness: ParallelHarness, prefix: str = "") -> list[tuple]:
    rids = []
    for number, ask in enumerate(asks(harness.num_dp_ranks)):
        rids.append(harness.submit(ask.prompt, f"{prefix}{number}", ask.params, dp_rank=ask.dp_rank))
    harness.run()
    harness.check_idle()
    results = [harness.results[rid] for rid in rids]
    return [(x.token_ids, x.logprobs, x.routes.tolist()) for x in results]


@pytest.mark.parametrize("in_flight", [False, True], ids=["sequential", "late"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *FOUR])
def test_replays_give_what_steps_in_python_give(
    folders: list[Path], graphs: pytest.MonkeyPatch, layout: str, in_flight: bool
) -> None:
    settings = SETTINGS | (LAYOUTS | FOUR)[layout]
    with ParallelHarness(folders[0], captured_gloo, **settings | {"disable_cuda_graph": True}) as harness:
        assert all(scheduler.runner.graphs is None for scheduler in harness.schedulers)
        expected = play(harness)
    if in_flight:
        overlap(graphs)
    with ParallelHarness(folders[0], captured_gloo, **settings) as harness:
        runners = [scheduler.runner.graphs for scheduler in harness.schedulers]
        assert all(runner is not None and runner.sizes == [1, 2, 4, 7] for runner in runners)
        captured, replayed = StandInGraphPool.num_captures, StandInGraphPool.num_replays
        assert play(harness) == expected
        assert StandInGraphPool.num_replays - replayed > 20 * len(runners)
        assert StandInGraphPool.num_captures == captured


def test_a_refresh_and_a_recorder_find_all_ranks_together(folders: list[Path], graphs: pytest.MonkeyPatch) -> None:
    """New weights need no capture; routes that a recorder wants from now on need one, on all ranks in one step."""
    settings = SETTINGS | LAYOUTS["dp2 ep2"] | {"enable_return_routed_experts": False}

    def run(captures: bool) -> list[Any]:
        more = {"disable_cuda_graph": not captures}
        with ParallelHarness(folders[0], captured_gloo, **settings | more) as harness:
            found: list[Any] = []
            prompts = [[5, 6, 7], [8, 9]]

            def note() -> None:
                results = harness.generate(prompts, {"max_new_tokens": 6})
                found.append([(x.token_ids, x.logprobs) for x in results])
                numbers.append(StandInGraphPool.num_captures)

            numbers = [StandInGraphPool.num_captures]
            note()
            payload = bytearray(save(logical_tensors(folders[1])))
            assert harness.control(PauseGenerationReqInput).success
            assert harness.control(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors").success
            assert harness.control(ContinueGenerationReqInput).success
            note()
            assert harness.control(StartExpertDistributionReqInput, mode="stat").success
            note()
            assert harness.control(StopExpertDistributionReqInput).success
            note()
            changed = [two > one for one, two in pairwise(numbers)]
            assert changed == [False, False, captures, captures]
            return found

    assert run(True) == run(False)


def test_ranks_capture_what_all_of_them_can(
    folders: list[Path], graphs: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank cannot capture steps of 4 requests, or none: then no rank does."""
    whole, most = build_graphs.captured_sizes, [0]

    def sizes(args: Any, model: Any) -> tuple[list[int], str | None]:
        found, reason = whole(args, model)
        return (found[: most[0]], "its memory") if model.parallel.tp.rank else (found, reason)

    graphs.setattr(build_graphs, "captured_sizes", sizes)
    for kept, expected in ((2, [1, 2]), (0, None)):
        most[0] = kept
        with ParallelHarness(folders[0], captured_gloo, **SETTINGS | LAYOUTS["tp2"]) as harness:
            runners = [scheduler.runner.graphs for scheduler in harness.schedulers]
            assert [None if runner is None else runner.sizes for runner in runners] == [expected] * 2
    said = capsys.readouterr().err
    assert "steps of more than 2 requests are not captured: its memory" in said
    assert "steps are not captured, decoding is slower: another rank of the engine cannot" in said


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"moe_a2a_backend": "all_to_all", "ep_size": 2}, "the all_to_all dispatcher waits for the counts"),
        ({"disable_native_kernels": True}, "plain torch"),
    ],
)
def test_what_cannot_be_captured_says_why(
    folders: list[Path],
    graphs: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    reason: str,
) -> None:
    with ParallelHarness(folders[0], captured_gloo, **SETTINGS | DP2 | settings) as harness:
        assert all(scheduler.runner.graphs is None for scheduler in harness.schedulers)
    assert reason in capsys.readouterr().err


def test_ranks_without_a_device_transport_say_why(
    folders: list[Path], graphs: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ParallelHarness(folders[0], **SETTINGS | LAYOUTS["tp2"]):
        pass
    assert "the ranks of the engine exchange tensors through the host" in capsys.readouterr().err


WANTED = HiddenStatesParams(layers=(0, 1, 2, 3))


def play_wanting(harness: ParallelHarness, wants: Callable[[int], HiddenStatesParams | None]) -> list[tuple]:
    """Play `asks`, of which some want hidden states."""
    given = enumerate(asks(harness.num_dp_ranks))
    rids = [
        harness.submit(ask.prompt, str(number), ask.params, dp_rank=ask.dp_rank, hidden_states=wants(number))
        for number, ask in given
    ]
    harness.run()
    harness.check_idle()
    results = [harness.results[rid] for rid in rids]
    states = [None if x.finished is None else x.finished.hidden_states for x in results]
    return [(x.token_ids, x.logprobs, x.routes.tolist(), y) for x, y in zip(results, states, strict=True)]


@pytest.mark.parametrize("in_flight", [False, True], ids=["sequential", "late"])
@pytest.mark.parametrize("layout", ["tp2", "dp2 ep2"])
def test_steps_that_keep_hidden_states_run_in_python_on_all_ranks(
    folders: list[Path], graphs: pytest.MonkeyPatch, layout: str, in_flight: bool
) -> None:
    """Requests that want none, or the final ones alone, are replayed before and after."""
    settings = SETTINGS | LAYOUTS[layout]
    final = HiddenStatesParams(layers=(3,))
    choices = [(lambda n: WANTED if n in (2, 3) else None, 2), (lambda n: final if n % 2 else None, 20)]
    if in_flight:
        overlap(graphs)
    for wants, least in choices:
        with ParallelHarness(folders[0], captured_gloo, **settings | {"disable_cuda_graph": True}) as harness:
            expected = play_wanting(harness, wants)
        with ParallelHarness(folders[0], captured_gloo, **settings) as harness:
            replayed = StandInGraphPool.num_replays
            assert play_wanting(harness, wants) == expected
            assert StandInGraphPool.num_replays - replayed > least
        assert [states is not None for *_, states in expected] == [wants(n) is not None for n in range(9)]


# --- a process a rank -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2", "dp2 ep2"])
def test_processes_of_an_engine_replay_together(folders: list[Path], tmp_path: Path, layout: str) -> None:
    settings = SETTINGS | LAYOUTS[layout]
    requests = list(asks(settings.get("dp_size", 1)))
    plain = run_processes(folders[0], settings, requests, tmp_path / "plain", captures=False)
    found = run_processes(folders[0], settings, requests, tmp_path / "captured", captures=True)
    for one, two in zip(plain, found, strict=True):
        assert isinstance(one, Ran) and isinstance(two, Ran), (one, two)
        assert one.answers == two.answers
        assert one.num_replays == 0 and two.num_replays > 20
        assert one.num_eager > two.num_eager
    assert len({ran.num_eager for ran in found if isinstance(ran, Ran)}) == 1, "all take the same steps in Python"


def alone(patch: pytest.MonkeyPatch) -> None:
    """Let each rank choose its size by its own tokens (wrong)."""
    chosen = GraphRunner._size_for

    def by_its_own(self: GraphRunner, batch: Any) -> int | None:
        counts, batch.global_num_tokens = batch.global_num_tokens, None
        try:
            return chosen(self, batch)
        finally:
            batch.global_num_tokens = counts

    patch.setattr(GraphRunner, "_size_for", by_its_own)


def prompts_of_others(patch: pytest.MonkeyPatch) -> None:
    """Let each rank replay if it only decodes itself, whatever the others have (wrong)."""
    chosen = GraphRunner._size_for

    def by_its_own(self: GraphRunner, batch: Any) -> int | None:
        batch.kind_everywhere = StepKind.PROMPTS if batch.extend_lens else StepKind.DECODE
        return chosen(self, batch)

    patch.setattr(GraphRunner, "_size_for", by_its_own)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [alone, prompts_of_others], ids=lambda wrong: wrong.__name__)
def test_ranks_that_choose_alone_are_noticed(
    folders: list[Path], tmp_path: Path, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    settings = SETTINGS | LAYOUTS["dp2 ep2"]
    requests = list(asks(2))
    plain = run_processes(folders[0], settings, requests, tmp_path / "plain", captures=False)
    found = run_processes(folders[0], settings, requests, tmp_path / "wrong", captures=True, wrong=wrong)
    assert all(isinstance(ran, Ran) for ran in plain)
    answers = [ran.answers if isinstance(ran, Ran) else ran for ran in found]
    assert answers != [ran.answers for ran in plain if isinstance(ran, Ran)]
