"""Captured steps with adapters on the CPU: one recording holds for all adapters that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.adapters.peft_folder import read_adapter
from rollout.executor.graph_buffers import GraphBuffers
from tests.adapters import save_adapter
from tests.captured_ranks import captured_gloo, captured_ranks
from tests.family_zoo import family_checkpoint
from tests.graph_loop import captured_engines
from tests.graph_stand_in import StandInGraphPool
from tests.kernels import native_ops
from tests.late_loop import overlap
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

SEED = 3
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 96,
    "chunked_prefill_size": 8,
    "max_running_requests": 7,
    "random_seed": 1,
    "enable_lora": True,
    "max_loras_per_batch": 3,
    "max_lora_rank": 8,
    "enable_return_routed_experts": True,
}
EAGER = {"disable_cuda_graph": True}
GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
NAMES = ("a", None, "b", None, "a", "b", None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and adapters a, b and c of it."""
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("captured")
    found = {"model": family_checkpoint(base / "model", "qwen3_moe", SEED)}
    for seed, name in enumerate("abc"):
        found[name] = save_adapter(
            base / name, "qwen3_moe", SEED, seed, target_modules=["q_proj", "v_proj", "o_proj"], r=4 + seed
        )
    return found


@pytest.fixture
def graphs() -> Iterator[pytest.MonkeyPatch]:
    with captured_engines(pieces=[2, 5, 9, 24]) as patch:
        StandInGraphPool.reset_counts()
        yield patch


def settings_of(folders: dict[str, Path], **settings: Any) -> dict[str, Any]:
    return SMALL | {"lora_paths": f"a={folders['a']},b={folders['b']}"} | settings


def play(harness: Harness, names: tuple[str | None, ...] = NAMES, new_tokens: int = 8) -> list[tuple]:
    """Send requests with these adapters, some turns apart, so that steps of all kinds follow each other."""
    rids = []
    for number, name in enumerate(names):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(1, 100, (2 + 5 * number % 11,), generator=generator).tolist()
        rids.append(harness.submit(prompt, params={"max_new_tokens": new_tokens + number}, lora_name=name))
        for _ in range(3):
            harness.tick()
    harness.run()
    results = [harness.results[rid] for rid in rids]
    return [(each.token_ids, each.logprobs, each.routes.tolist()) for each in results]


@pytest.mark.parametrize("in_flight", [False, True], ids=["sequential", "late"])
def test_replays_with_adapters_give_what_steps_in_python_give(
    folders: dict[str, Path], graphs: pytest.MonkeyPatch, in_flight: bool
) -> None:
    """Requests of two adapters and of none: tokens, log-probabilities and routes have the same bits."""
    expected = play(Harness(folders["model"], **settings_of(folders, **EAGER)))
    assert expected[0] != play(Harness(folders["model"], **settings_of(folders, **EAGER)), (None, *NAMES[1:]))[0]
    if in_flight:
        overlap(graphs)
    harness = Harness(folders["model"], **settings_of(folders))
    captured = StandInGraphPool.num_captures
    assert captured == 4 * 3 + 4 * 2, "the forward with and without adapters and one sampling; pieces in both forms"
    assert play(harness) == expected
    assert StandInGraphPool.num_captures == captured and StandInGraphPool.num_replays > 40


def test_recordings_hold_for_adapters_that_come_later(folders: dict[str, Path], graphs: pytest.MonkeyPatch) -> None:
    harness, eager = (Harness(folders["model"], **settings_of(folders, **each)) for each in ({}, EAGER))
    captured = StandInGraphPool.num_captures
    assert play(harness) == play(eager)
    for each in (harness, eager):
        each.scheduler.runner.state.adapters.load("c", read_adapter(folders["c"]))
        each.scheduler.runner.state.adapters.load("a", read_adapter(folders["c"]))  # a second version, in another slot
    names = ("c", "a", None, "b")
    found = play(harness, names)
    assert found == play(eager, names) and StandInGraphPool.num_captures == captured


def test_adapters_of_latents_are_captured(graphs: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Adapters of `kv_b_proj` are applied before attention and after it."""
    folders = {"model": family_checkpoint(tmp_path / "model", "deepseek_v3", SEED)}
    for seed, name in enumerate("ab"):
        folders[name] = save_adapter(
            tmp_path / name, "deepseek_v3", SEED, seed, target_modules=["kv_b_proj"], r=4 + seed
        )
    expected = play(Harness(folders["model"], **settings_of(folders, **EAGER)), ("a", None, "b"))
    assert play(Harness(folders["model"], **settings_of(folders)), ("a", None, "b")) == expected
    assert StandInGraphPool.num_replays > 10


def test_groups_of_attention_dp_replay_one_form(folders: dict[str, Path]) -> None:
    """Requests of one group have adapters, and no request of the other: both replay the form with adapters."""
    names = ("a", None, "b", None, "a", None)
    with captured_ranks(pieces=[2, 5, 9, 24]):
        settings = settings_of(folders, **GROUPS)
        with ParallelHarness(folders["model"], captured_gloo, **settings | EAGER) as harness:
            expected = play(harness, names)
        StandInGraphPool.reset_counts()
        with ParallelHarness(folders["model"], captured_gloo, **settings) as harness:
            captured = StandInGraphPool.num_captures
            assert play(harness, names) == expected
        assert StandInGraphPool.num_captures == captured and StandInGraphPool.num_replays > 40


@pytest.mark.mutant
def test_adapters_that_stay_in_the_buffers_are_noticed(folders: dict[str, Path]) -> None:
    fill = GraphBuffers.fill

    def forgetful(self: GraphBuffers, batch: Any) -> None:
        self._have_adapters = False
        fill(self, batch)

    settings = settings_of(folders, **GROUPS)
    with captured_ranks() as patch:
        with ParallelHarness(folders["model"], captured_gloo, **settings | EAGER) as harness:
            expected = play(harness, ("a", "a", None, None), 12)
        patch.setattr(GraphBuffers, "fill", forgetful)
        with ParallelHarness(folders["model"], captured_gloo, **settings) as harness:
            assert play(harness, ("a", "a", None, None), 12) != expected
