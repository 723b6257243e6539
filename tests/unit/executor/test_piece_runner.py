"""Steps in pieces on the CPU: the real runner over a stand-in for CUDA graphs, attention between the pieces.

Float32 on the compiled operators, where a row has the same bits in every batch: padded or not, replayed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.executor.model_runner import ModelRunner
from rollout.executor.piece_runner import PieceRunner, _CutAttention, graph_token_counts
from rollout.executor.token_buffers import TokenBuffers
from tests.captured_ranks import captured_gloo, captured_ranks
from tests.family_zoo import family_checkpoint
from tests.graph_loop import captured_engines
from tests.graph_stand_in import StandInGraphPool
from tests.kernels import native_ops
from tests.late_loop import overlap
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

PIECES = [2, 5, 9, 24]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 72,
    "chunked_prefill_size": 8,
    "max_running_requests": 7,
    "enable_return_routed_experts": True,
    "random_seed": 1,
}
EAGER = {"disable_cuda_graph": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    native_ops()
    return tiny_checkpoint(tmp_path_factory.mktemp("pieces") / "model", "moe_dense_first", seed=1)


@pytest.fixture
def pieces() -> Iterator[pytest.MonkeyPatch]:
    with captured_engines(pieces=PIECES) as patch:
        StandInGraphPool.reset_counts()
        yield patch


def play(harness: Harness, lengths: tuple[int, ...] = (2, 19, 5, 11, 3, 8, 1)) -> list[tuple]:
    """Send prompts of these lengths, some turns apart, so that prompts and decoding requests share steps."""
    rids = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(1, 250, (length,), generator=generator).tolist()
        params: dict[str, Any] = {"max_new_tokens": 4 + 3 * number % 11}
        if number % 2:
            params |= {"temperature": 0.9, "sampling_seed": number}
        fields = {"logprob_start_len": 0} if number == 3 else {}
        rids.append(harness.submit(prompt, f"r{number}", params, **fields))
        harness.tick()
        harness.tick()
    harness.run()
    harness.check_idle()
    results = [harness.results[rid] for rid in rids]
    scored = [x.finished.prompt_logprobs for x in results if x.finished is not None]
    return [(x.token_ids, x.logprobs, x.routes.tolist(), y and y.values) for x, y in zip(results, scored, strict=True)]


@pytest.mark.parametrize("in_flight", [False, True], ids=["sequential", "late"])
def test_pieces_give_what_steps_in_python_give(folder: Path, pieces: pytest.MonkeyPatch, in_flight: bool) -> None:
    """Compare prompts in chunks, requests that decode and retractions in a small pool, bit for bit."""
    expected = play(Harness(folder, **SMALL | EAGER))
    if in_flight:
        overlap(pieces)
    harness = Harness(folder, **SMALL)
    runner = harness.scheduler.runner
    assert runner.pieces is not None and runner.pieces.sizes == [2, 5, 9, 15]
    captured, in_python = StandInGraphPool.num_captures, []
    pieces.setattr(ModelRunner, "_computed", lambda self, batch: in_python.append(batch))
    assert play(harness) == expected
    assert not in_python and StandInGraphPool.num_captures == captured


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_latents_and_windows_in_pieces(tmp_path: Path, pieces: pytest.MonkeyPatch, family: str) -> None:
    folder = family_checkpoint(tmp_path / "model", family, 3, max_position_embeddings=512)
    settings = SMALL | {"max_total_tokens": 1200, "chunked_prefill_size": 64}
    lengths = (100, 7, 64, 130)
    expected = play(Harness(folder, **settings | EAGER), lengths)
    assert play(Harness(folder, **settings), lengths) == expected
    assert StandInGraphPool.num_replays > 20


@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2},
        {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True},
    ],
    ids=["tp2", "dp2 ep2"],
)
def test_ranks_replay_pieces_together(folder: Path, layout: dict[str, Any]) -> None:
    settings = SMALL | layout | {"num_threads": 1}
    with captured_ranks(PIECES):
        with ParallelHarness(folder, captured_gloo, **settings | EAGER) as harness:
            expected = play(harness)
        with ParallelHarness(folder, captured_gloo, **settings) as harness:
            counted: list[Any] = []
            for scheduler in harness.schedulers:
                assert scheduler.runner.pieces is not None
                scheduler.runner._computed = counted.append  # type: ignore[method-assign, assignment]
            assert play(harness) == expected
            assert not counted


def test_padding_of_pieces_touches_nothing_of_anybody(folder: Path, pieces: pytest.MonkeyPatch) -> None:
    harness = Harness(folder, **SMALL)
    pool, store = harness.scheduler.runner.kv_pool, harness.scheduler.runner.route_store
    assert store is not None
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(torch.nan)
    pool._epoch[:] = -1
    (result,) = harness.generate([list(range(1, 8))], {"max_new_tokens": 1})
    for tensor in pool.k:
        written = ~tensor.isnan().any(-1).any(-1)
        assert written[pool.padding_slot] and int(written.sum()) == 7 + 1
    assert int((pool._epoch >= 0).sum()) == 7 == int(store._written.sum())
    assert torch.tensor(result.logprobs).isfinite().all()


class _Launches(TorchDispatchMode):
    """Counts the operators that Python calls, views and allocations left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(argument.alias_info is not None for argument in func._schema.arguments)
        launches = func._schema.is_mutable or not is_view
        self.count += launches and "empty" not in func._schema.name
        return result


def launches_of_prompt(harness: Harness, length: int) -> int:
    """Return the launches from Python of the forward of a prompt, a replayed piece counted as one."""
    counted, forward = _Launches(), harness.scheduler.runner.forward
    replays = StandInGraphPool.num_replays

    def seen(batch: Any) -> Any:
        with counted:
            return forward(batch)

    harness.scheduler.runner.forward = seen  # type: ignore[method-assign]
    harness.generate([list(range(1, length + 1))], {"max_new_tokens": 1})
    harness.scheduler.runner.forward = forward  # type: ignore[method-assign]
    return counted.count + StandInGraphPool.num_replays - replays


def test_launches_from_python_of_a_layer_with_prompts(tmp_path: Path, pieces: pytest.MonkeyPatch) -> None:
    """A layer costs three: a piece, its attention, and the copy of the result.  On a CPU its operators are seven."""
    folders = [tiny_checkpoint(tmp_path / str(layers), "moe_dense_first", 1, layers=layers) for layers in (2, 4)]
    found = []
    for more in ({}, EAGER):
        counts = []
        for folder in folders:
            harness = Harness(folder, **SMALL | more)
            harness.scheduler.runner.recorded = None  # as on CUDA, where no tape is played
            counts.append(launches_of_prompt(harness, 8))
        found.append((counts[1] - counts[0]) / 2)
    assert found == [3, 7], found


def test_token_counts_to_capture_grow_by_a_quarter_at_most() -> None:
    assert graph_token_counts(20) == [8, 16, 20]
    counts = graph_token_counts(2048)
    assert counts == sorted(set(counts)) and counts[-1] == 2048 and len(counts) == 25
    assert all(two <= 1.25 * one for one, two in pairwise(counts[4:]))


# --- wrong runners ----------------------------------------------------------------------------------------------------


def padding_not_filled(patch: pytest.MonkeyPatch) -> None:
    """Keep the tokens of an earlier, larger step in the rows beyond the current step (wrong)."""
    patch.setattr(TokenBuffers, "_pad", lambda self, first: setattr(self, "count", first))


def planned_once(patch: pytest.MonkeyPatch) -> None:
    """Attend to the step that was planned first (wrong)."""
    forward = PieceRunner.forward

    def planned(self: PieceRunner, batch: Any, with_routes: bool) -> Any:
        known, plan = vars(self).setdefault("_was_planned", False), self._attention.plan
        self._was_planned = True  # type: ignore[attr-defined]
        if known:
            self._attention.plan = lambda batch: None  # type: ignore[method-assign]
        try:
            return forward(self, batch, with_routes)
        finally:
            self._attention.plan = plan  # type: ignore[method-assign]

    patch.setattr(PieceRunner, "forward", planned)


def attention_recorded(patch: pytest.MonkeyPatch) -> None:
    """Record attention, to no token at all, in the piece (wrong)."""
    attend = _CutAttention.attend

    def recorded(self: _CutAttention, *given: Any, **named: Any) -> torch.Tensor:
        self._between = lambda work: work()
        return attend(self, *given, **named)

    patch.setattr(_CutAttention, "attend", recorded)


@pytest.mark.mutant
@pytest.mark.parametrize(
    "wrong", [padding_not_filled, planned_once, attention_recorded], ids=lambda wrong: wrong.__name__
)
def test_wrong_pieces_are_noticed(
    folder: Path, pieces: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    settings = SMALL | {"disable_radix_cache": True}
    expected = play(Harness(folder, **settings | EAGER))
    assert play(Harness(folder, **settings)) == expected
    wrong(pieces)
    try:
        found = play(Harness(folder, **settings))
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return
    assert found != expected
