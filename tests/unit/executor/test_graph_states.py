"""Captured steps of a model with recurrent layers: states, snapshots and prefixes as in steps in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.executor.graph_buffers import GraphBuffers
from tests.captured_ranks import captured_gloo, captured_ranks
from tests.family_zoo import family_checkpoint
from tests.graph_loop import captured_engines
from tests.graph_stand_in import StandInGraphPool
from tests.kernels import native_ops
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

SMALL = {"max_total_tokens": 300, "max_running_requests": 5, "state_snapshot_interval": 4, "max_state_rows": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    native_ops()
    return family_checkpoint(tmp_path_factory.mktemp("models") / "m", "qwen3_next", 1)


@pytest.fixture
def graphs() -> Iterator[pytest.MonkeyPatch]:
    with captured_engines() as patch:
        StandInGraphPool.reset_counts()
        yield patch


def play(harness: Harness, with_masks: bool = False, num_dp_ranks: int = 1) -> list[tuple[Any, ...]]:
    """Run prompts of many lengths, then the same with their answers, whose prefixes have snapshots from decoding.

    `with_masks`: rows with filters want their masks.  The last data-parallel rank has fewer requests than the first.
    """
    filters: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 20}
    prompts, found = [list(range(3 + n, 8 + 3 * n)) for n in range(7)], []
    for turn in range(2):
        rids = [
            harness.submit(
                prompt,
                rid=f"{turn}.{n}",
                params={"max_new_tokens": 4 + 2 * n} | (filters | {"sampling_seed": n} if masked else {}),
                return_sampling_mask=masked,
                dp_rank=(n % 3 == 2) * (num_dp_ranks - 1),
            )
            for n, prompt in enumerate(prompts)
            for masked in [with_masks and n % 2 == 1]
        ]
        harness.run()
        harness.check_idle()
        results = [harness.results[rid] for rid in rids]
        finished = [x.finished for x in results]
        assert all(one is not None for one in finished)
        cached = [one.cached_tokens for one in finished if one is not None]
        assert turn == 0 or sum(cached) > 0
        found += [(x.token_ids, x.logprobs, x.mask, tokens) for x, tokens in zip(results, cached, strict=True)]
        prompts = [[*prompt, *x.token_ids, 9] for prompt, x in zip(prompts, results, strict=True)]
    return found


def test_replays_give_what_steps_in_python_give(folder: Path, graphs: pytest.MonkeyPatch) -> None:
    expected = play(Harness(folder, **SMALL, disable_cuda_graph=True))
    harness = Harness(folder, **SMALL)
    assert harness.scheduler.runner.graphs is not None
    assert play(harness) == expected
    assert StandInGraphPool.num_replays > 20


@pytest.mark.parametrize("layout", [{}, {"dp_size": 2, "enable_dp_attention": True, "ep_size": 2}], ids=["tp2", "dp2"])
def test_ranks_replay_with_states_and_masks(folder: Path, layout: dict[str, Any]) -> None:
    """Steps with prompts stay in Python, as states would go through their padding."""
    settings: dict[str, Any] = SMALL | {"tp_size": 2, "dtype": "float32", "chunked_prefill_size": 8} | layout
    with captured_ranks(pieces=[8]):
        found = []
        for captures in (False, True):
            with ParallelHarness(folder, captured_gloo, **settings, disable_cuda_graph=not captures) as harness:
                runners = [scheduler.runner for scheduler in harness.schedulers]
                assert [runner.graphs is not None for runner in runners] == [captures] * 2
                assert all(runner.pieces is None for runner in runners)
                found.append(play(harness, with_masks=True, num_dp_ranks=harness.num_dp_ranks))
        assert found[0] == found[1] and any(mask.counts for _, _, mask, _ in found[0])
        assert StandInGraphPool.num_replays > 40


def padding_keeps_its_state(patch: pytest.MonkeyPatch) -> None:
    """Let padding rows write the row of the first request (wrong)."""
    make = GraphBuffers.__init__

    def wrong(self: GraphBuffers, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._padding[6] = 4

    patch.setattr(GraphBuffers, "__init__", wrong)


def snapshots_are_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GraphBuffers, "_fill_snapshots", lambda self, snapshots: None)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [padding_keeps_its_state, snapshots_are_left_out])
def test_wrong_buffers_are_noticed(
    folder: Path, graphs: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    expected = play(Harness(folder, **SMALL, disable_cuda_graph=True))
    wrong(graphs)
    assert play(Harness(folder, **SMALL)) != expected
