"""Nothing depends on when a step is finished: a loop that finishes each after the launch of the next gives the same.

Every kind of request, in a small pool, with aborts and refreshes in between, over both loops; and six engines with a
mistake that only the late loop shows, or that it shows too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.capturer import RoutedExpertsCapturer
from examples.make_checkpoint.run import make_checkpoint
from rollout.core.args.server_cli import add_cli_args, server_args_from_namespace
from rollout.core.messages.io_struct import AbortReqInput, ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.executor import model_runner
from rollout.memory.kv_pool import NewestTokens
from rollout.scheduler import step as step_module
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.req import Req
from rollout.scheduler.step import InFlight, StepRunner
from tests.late_loop import overlap
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_spec
from tests.scheduler_harness import Harness, Result

SMALL = {"max_total_tokens": 56, "chunked_prefill_size": 8, "max_running_requests": 6, "weight_version": "v0"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("late")
    old, new = (make_checkpoint(base / name, tiny_spec(seed=seed)) for name, seed in (("old", 1), ("new", 2)))
    return old, new


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: overlap(monkeypatch)


ASKS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (5, {"max_new_tokens": 12}, {}),
    (19, {"max_new_tokens": 1}, {"top_logprobs_num": 3}),
    (9, {"max_new_tokens": 20, "temperature": 1.0, "sampling_seed": 7}, {"stream": True}),
    (11, {"max_new_tokens": 15, "temperature": 1.0, "sampling_seed": 3, "repetition_penalty": 3.0}, {}),
    (14, {"max_new_tokens": 0}, {"logprob_start_len": 0}),
    (3, {"max_new_tokens": 16, "min_new_tokens": 9, "stop_token_ids": list(range(0, 300, 2))}, {}),
    (7, {"max_new_tokens": 18, "temperature": 1.0, "sampling_seed": 5, "stop_token_ids": list(range(0, 300, 9))}, {}),
    (12, {"max_new_tokens": 14, "frequency_penalty": 1.5}, {"token_ids_logprob": [4, 1], "top_logprobs_num": 2}),
    (20, {"max_new_tokens": 9}, {"logprob_start_len": 2, "token_ids_logprob": [8]}),
    (9, {"max_new_tokens": 20, "temperature": 1.0, "sampling_seed": 11, "presence_penalty": 1.0}, {"stream": True}),
]


def prompt_of(index: int, length: int) -> list[int]:
    """Some share a prefix."""
    generator = torch.Generator().manual_seed(index % 7)
    return torch.randint(1, 250, (length,), generator=generator).tolist()


def generate(folder: Path) -> list[Result]:
    harness = Harness(folder, **SMALL)
    rids = [
        harness.submit(prompt_of(index, length), params=params, **fields)
        for index, (length, params, fields) in enumerate(ASKS)
    ]
    harness.run()
    harness.check_idle()
    assert harness.scheduler.stats.num_retractions
    return [harness.results[rid] for rid in rids]


def facts(result: Result) -> tuple:
    finished = result.finished
    assert (finished is not None and finished.prompt_logprobs is None) or finished.prompt_logprobs.values
    scored = finished.prompt_logprobs
    return (
        result.token_ids,
        result.logprobs,
        result.top,
        result.chosen,
        finished.reason,
        result.versions,
        result.routes.tolist(),
        scored and (scored.values, scored.alternatives, scored.versions),
    )


def is_same(folder: Path, expected: list[Result]) -> bool:
    """Return whether the results of the engine are the same; an engine that fails gives none."""
    try:
        found = generate(folder)
    except (AssertionError, IndexError, KeyError, RuntimeError):
        return False
    return [facts(result) for result in found] == [facts(result) for result in expected]


def test_all_kinds_of_requests_get_the_same(folders: tuple[Path, Path], late: Callable[[], None]) -> None:
    expected = generate(folders[0])
    late()
    for found, result in zip(generate(folders[0]), expected, strict=True):
        assert facts(found) == facts(result)


# --- wrong engines ----------------------------------------------------------------------------------------------------


class OneBuffer(RoutedExpertsCapturer):
    """Wrong: steps share the memory of their routes."""

    _memory: torch.Tensor | None = None

    def finish_step(self) -> torch.Tensor:
        rows_TLK = super().finish_step()
        if self._memory is None:
            self._memory = torch.empty(512, *rows_TLK.shape[1:], dtype=rows_TLK.dtype)
        return self._memory[: len(rows_TLK)].copy_(rows_TLK)


def one_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_runner, "RoutedExpertsCapturer", OneBuffer)


def lengths_of_the_list(patch: pytest.MonkeyPatch) -> None:
    """Wrong: what a request has on the device is taken from the tokens that have reached the host."""

    def device_len(self: Req) -> int:
        return self._device_len if self._num_steps is None else self.num_tokens - 1

    setter = Req.device_len.fset  # type: ignore[attr-defined]
    patch.setattr(Req, "device_len", property(device_len, setter))


def tokens_of_the_list(patch: pytest.MonkeyPatch) -> None:
    """Wrong: the next step is given the newest token that has reached the host."""
    build_batch = step_module.build_forward_batch
    launch, batch_of = StepRunner.launch, []

    def launched(self: StepRunner, plan: Any, *rest: Any) -> InFlight:
        batch_of[:] = [plan.decodes]
        return launch(self, plan, *rest)

    def built(*args: Any) -> Any:
        batch = build_batch(*args)
        newest = torch.tensor([(req.output_ids or [0])[-1] for req in batch_of[0]], dtype=torch.int64)
        batch.input_ids = torch.cat([batch.input_ids[: len(batch.input_ids) - len(newest)], newest])
        return batch

    patch.setattr(StepRunner, "launch", launched)
    patch.setattr(step_module, "build_forward_batch", built)


def enters_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """Wrong: what a step computed for a request that has ended meanwhile is entered."""
    finish = StepRunner.finish

    def entered(self: StepRunner, step: InFlight, *rest: Any) -> Any:
        return finish(self, step._replace(num_ended=self._num_ended), *rest)

    patch.setattr(StepRunner, "finish", entered)


def stale_histories(patch: pytest.MonkeyPatch) -> None:
    """Wrong: penalties are applied without the token in flight."""
    patch.setattr(DecodeBatch, "needs_history", property(lambda self: False, lambda self, value: None), raising=False)


def never_enters_the_table(patch: pytest.MonkeyPatch) -> None:
    """Wrong: tokens do not follow their requests when the batch changes."""

    def get(self: NewestTokens, rows: torch.Tensor) -> torch.Tensor:
        return self._tokens if rows is self._rows else self._table.index_select(0, rows)

    patch.setattr(NewestTokens, "get", get)


WRONG = [one_buffer, lengths_of_the_list, tokens_of_the_list, enters_after_the_end, stale_histories]


@pytest.mark.parametrize("wrong", [*WRONG, never_enters_the_table], ids=lambda wrong: wrong.__name__)
def test_a_mistake_is_noticed(
    folders: tuple[Path, Path],
    late: Callable[[], None],
    wrong: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = generate(folders[0])
    late()
    assert is_same(folders[0], expected)
    wrong(monkeypatch)
    assert not is_same(folders[0], expected)


@pytest.mark.parametrize("wrong", [one_buffer, tokens_of_the_list, enters_after_the_end, stale_histories])
def test_mistakes_that_a_sequential_loop_hides(
    folders: tuple[Path, Path], wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(folders[0])
    wrong(monkeypatch)
    assert is_same(folders[0], expected)


# --- versions ---------------------------------------------------------------------------------------------------------


def refreshed_while_running(folders: tuple[Path, Path]) -> list[str]:
    """Objections to the version spans of requests that run over two refreshes and a new label.

    The truth is what was in force when the step that sampled a token was launched.
    """
    harness = Harness(folders[0], weight_version="v0")
    steps, sampled = harness.scheduler._steps, {}
    launch = steps.launch

    def noted(*args: Any) -> InFlight:
        version = harness.scheduler.runner.state.epoch.weight_version
        step = launch(*args)
        for req in step.sampling:
            sampled.setdefault(req.rid, []).append(version)
        return step

    steps.launch = noted  # type: ignore[method-assign]
    rids = [harness.submit(prompt_of(i, 6 + i), params={"max_new_tokens": 600}) for i in range(3)]
    for _ in range(10):
        harness.tick()
    for version, folder in (("v1", folders[1]), ("v2", folders[0])):
        assert refresh(harness, logical_tensors(folder), version).success
        for _ in range(5):
            harness.tick()
    harness.channel.inbox.append(AbortReqInput(rids=rids[:1]))
    harness.tick()
    harness.channel.inbox.append(AbortReqInput(abort_all=True))
    harness.run()
    harness.check_idle()
    objections = []
    for rid in rids:
        result, versions, start = harness.results[rid], [], 0
        for version, tokens in groupby(sampled[rid][: len(harness.results[rid].token_ids)]):
            end = start + len(list(tokens))
            versions.append((version, start, end))
            start = end
        assert len(versions) == 3 and len(result.token_ids) == len(result.logprobs) > 20
        if result.versions != versions:
            objections.append(f"{rid}: {result.versions} instead of {versions}")
    return objections


@pytest.mark.parametrize("is_late", [False, True])
def test_tokens_are_labelled_with_the_weights_that_made_them(
    folders: tuple[Path, Path], late: Callable[[], None], is_late: bool
) -> None:
    if is_late:
        late()
    assert refreshed_while_running(folders) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_stamps_of_what_is_in_force_at_the_end_of_a_step_are_noticed(
    folders: tuple[Path, Path], late: Callable[[], None], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: a step is labelled when its results are processed.  Only a late loop shows it."""
    finish = StepRunner.finish

    def stamped_late(self: StepRunner, step: InFlight, *rest: Any) -> Any:
        return finish(self, step._replace(epoch=self._runner.state.epoch), *rest)

    monkeypatch.setattr(StepRunner, "finish", stamped_late)
    if is_late:
        late()
    assert bool(refreshed_while_running(folders)) == is_late


# --- gates ------------------------------------------------------------------------------------------------------------


def test_nothing_is_in_flight_behind_a_closed_gate(folders: tuple[Path, Path], late: Callable[[], None]) -> None:
    late()
    harness = Harness(folders[0])
    rid = harness.submit([1, 2, 3], params={"max_new_tokens": 30})
    for _ in range(6):
        harness.tick()
    assert harness.scheduler._in_flight is not None and len(harness.results[rid].token_ids) == 0
    assert harness.control(PauseGenerationReqInput, mode="in_place").data["num_running"] == 1
    assert harness.scheduler._in_flight is None
    (req,) = harness.scheduler.queues.running
    known = len(req.output_ids)
    assert known == 6 and req.device_len == req.num_tokens - 1
    assert not harness.tick() and len(req.output_ids) == known
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    harness.check_idle()
    assert len(harness.results[rid].token_ids) == 30


# --- which loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "overlaps"),
    [
        ([], False),
        (["--device", "cuda"], True),
        (["--device", "cuda:1"], True),
        (["--no-disable-overlap-schedule"], True),
        (["--device", "cuda", "--disable-overlap-schedule"], False),
        (["--disable-overlap-schedule"], False),
    ],
    ids=str,
)
def test_steps_overlap_on_a_device_unless_it_is_said_otherwise(words: list[str], overlaps: bool) -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    args = server_args_from_namespace(parser.parse_args(["--model-path", "m", *words]))
    assert args.overlaps is overlaps
