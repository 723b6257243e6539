"""Results do not depend on the time when a step is finished, before the launch of the next step or after it.

Every kind of request runs in a small pool, with aborts and refreshes in between, over both loops.  Wrong engines make
mistakes that the late loop shows, and some that it alone shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capture.capturer import RoutedExpertsCapturer
from examples.make_checkpoint.run import make_checkpoint
from rollout.core.args.server_cli import add_cli_args, server_args_from_namespace
from rollout.core.host_copy import HostCopies, to_device
from rollout.core.messages.io_struct import AbortReqInput, ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.distributed.parallel import Parallel
from rollout.executor import input_builder, model_runner
from rollout.memory import cache_manager, kv_pool
from rollout.memory.kv_pool import NewestTokens
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode
from rollout.sampling import torch_sampler
from rollout.scheduler import scheduler
from rollout.scheduler import step as step_module
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.in_flight import InFlight
from rollout.scheduler.req import Req
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.seeds import SeedSource
from rollout.scheduler.step import StepRunner
from tests.device_engine import device_engine, stand_in_device
from tests.device_stand_in import DEVICE, RaceError
from tests.late_loop import overlap
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_spec
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness, Result
from tests.streams_stand_in import Stream

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
    """Draw a random prompt; indices that are equal modulo 7 share a prefix."""
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
    """Return whether the results of the engine are the same; an engine that fails has none."""
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
    """A wrong engine lets steps share the memory of their routes."""

    _memory: torch.Tensor | None = None

    def finish_step(self) -> torch.Tensor:
        rows_TLK = super().finish_step()
        if self._memory is None:
            self._memory = torch.empty(512, *rows_TLK.shape[1:], dtype=rows_TLK.dtype)
        return self._memory[: len(rows_TLK)].copy_(rows_TLK)


def one_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_runner, "RoutedExpertsCapturer", OneBuffer)


def lengths_of_the_list(patch: pytest.MonkeyPatch) -> None:
    """Count only tokens that have reached the host as tokens on the device (wrong)."""

    def device_len(self: Req) -> int:
        return self._device_len if self._num_steps is None else self.num_tokens - 1

    setter = Req.device_len.fset  # type: ignore[attr-defined]
    patch.setattr(Req, "device_len", property(device_len, setter))


def tokens_of_the_list(patch: pytest.MonkeyPatch) -> None:
    """Give the next step the newest token that has reached the host (wrong)."""
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
    """Enter the results of a step for a request that has ended meanwhile (wrong)."""
    finish = StepRunner.finish

    def entered(self: StepRunner, step: InFlight, *rest: Any) -> Any:
        return finish(self, step._replace(num_ended=self._num_ended), *rest)

    patch.setattr(StepRunner, "finish", entered)


def stale_histories(patch: pytest.MonkeyPatch) -> None:
    """Apply penalties without the token in flight (wrong)."""
    patch.setattr(DecodeBatch, "needs_history", property(lambda self: False, lambda self, value: None), raising=False)


def never_enters_the_table(patch: pytest.MonkeyPatch) -> None:
    """Read the table without entering tokens: they do not follow requests when the batch changes (wrong)."""

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
    """Run requests over two refreshes and a new label, and list their wrong version spans.

    The right version of a token is the one in force when the step that sampled it was launched.
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
    """A wrong engine labels a step when its results are processed.  Only a late loop shows it."""
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


# --- mistakes of mini-sglang's loop, by the commits that mended them there --------------------------------------------


PROMPTS = [[7, 3, 9, 4, 11, 2], list(range(20, 39)), [5, 6, 7]]
LENGTHS = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("overlap") / "model", tiny_spec(seed=1))


def tokens_of(harness: Harness) -> list[list[int]]:
    harness.generate(PROMPTS, LENGTHS)
    return [result.token_ids for result in harness.results.values()]


def tokens_on_a_stream(folder: Path) -> list[list[int]]:
    """Return the tokens of an engine whose steps run on a stream that is not the default one."""
    with stand_in_device() as device:
        harness = device_engine(folder)
        with device.streams.stream(device.streams.new()):
            return tokens_of(harness)


def test_mini_sglang_46255ef_results_are_read_after_their_copies(folder: Path) -> None:
    want = tokens_of(Harness(folder, disable_native_kernels=True, disable_overlap_schedule=False))
    assert tokens_on_a_stream(folder) == want


def test_mini_sglang_46255ef_copies_and_event_share_a_stream_whatever_is_current() -> None:
    with stand_in_device() as device:
        value, copies, other = torch.ones(3, device=DEVICE), HostCopies(DEVICE), device.streams.new()
        with device.streams.stream(other):
            copied = copies.copy(value)
            assert copied.isnan().all(), "nobody has waited so far"
            copies.close()
        assert other.end == 0
        copies.wait()
        assert copied.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.mutant
def test_mini_sglang_46255ef_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong engine records the event on a stream of its own."""
    want = tokens_of(Harness(folder, disable_native_kernels=True, disable_overlap_schedule=False))

    def close(self: HostCopies) -> None:
        self._done = Stream().record_event()  # type: ignore[assignment]

    monkeypatch.setattr(HostCopies, "close", close)
    with pytest.raises((AssertionError, IndexError)):  # garbage is no token and no slot
        assert tokens_on_a_stream(folder) == want


def test_mini_sglang_20fcd7f_nothing_is_planned_into_memory_in_flight(folder: Path) -> None:
    """Transfers end when the loop waits for a step's event, one launch later.  An earlier write is a `RaceError`."""
    want = tokens_of(Harness(folder, disable_native_kernels=True, disable_overlap_schedule=False))
    with stand_in_device():
        assert tokens_of(device_engine(folder)) == want


def one_buffer_each(patch: pytest.MonkeyPatch) -> None:
    """Use one pinned buffer for every shape again, without an event (wrong)."""
    buffers: dict[Any, torch.Tensor] = {}

    def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        key = (tensor.shape, tensor.dtype)
        if key not in buffers:
            buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return buffers[key].copy_(tensor).to(device, non_blocking=True)

    for module in (kv_pool, input_builder, torch_sampler, step_module):
        patch.setattr(module, "to_device", sent)


@pytest.mark.mutant
def test_mini_sglang_20fcd7f_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_buffer_each(monkeypatch)
    with stand_in_device(), pytest.raises(RaceError):
        tokens_of(device_engine(folder))


def test_mini_sglang_20fcd7f_live_arrays_may_advance_once_they_are_sent() -> None:
    """The arrays of the decode batch grow in place right after a launch."""
    with stand_in_device():
        positions = torch.tensor([3, 4])
        sent = to_device(positions, DEVICE)
        positions += 1
        torch.cuda.synchronize()
        assert sent.tolist() == [3, 4]


class KeepsAView(RadixCache):
    """A wrong cache keeps a row of the slot table without a copy; the next request gets that row."""

    def insert_below(self, node: RadixNode, tokens: np.ndarray, slots: torch.Tensor) -> tuple[RadixNode, int]:
        node, known = super().insert_below(node, tokens, slots)
        if known < len(tokens):
            node.slots = slots[known:]
        return node, known


def hit_after_the_row_was_used_again(folder: Path) -> bool:
    """Return whether a prefix gives the same results as before, and no slot is in two places."""
    harness = Harness(folder, disable_overlap_schedule=False)
    first, other = PROMPTS[1], [9] * 19
    results = [harness.generate([prompt], LENGTHS)[0] for prompt in (first, other, first)]
    assert results[2].finished is not None and results[2].finished.cached_tokens == len(first) - 1
    try:
        harness.check_idle()
    except AssertionError:
        return False
    return results[0].token_ids == results[2].token_ids and bool((results[0].routes == results[2].routes).all())


def test_mini_sglang_94fe255_the_prefix_tree_owns_its_slots(folder: Path) -> None:
    assert hit_after_the_row_was_used_again(folder)


@pytest.mark.mutant
def test_mini_sglang_94fe255_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_manager, "RadixCache", KeepsAView)
    assert not hit_after_the_row_was_used_again(folder)


def rows_with_a_token_too_early(folder: Path, patch: pytest.MonkeyPatch) -> list[int]:
    """List rows of the table of newest tokens that were set while the prompt of their request was not complete."""
    harness, early = Harness(folder, chunked_prefill_size=4, disable_overlap_schedule=False), []
    put = NewestTokens.put

    def watched(self: NewestTokens, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        partial = harness.scheduler.queues.partial
        early.extend(row for row in rows.tolist() if partial is not None and row == partial.pool_index)
        put(self, rows, token_ids)

    patch.setattr(NewestTokens, "put", watched)
    harness.submit(PROMPTS[0], params=LENGTHS | {"max_new_tokens": 20})
    for _ in range(3):
        harness.tick()
    harness.submit(PROMPTS[1], params=LENGTHS)
    harness.run()
    want = Harness(folder).generate([PROMPTS[1]], LENGTHS)[0]
    assert harness.results["r2"].token_ids == want.token_ids
    return early


def test_mini_sglang_ef4367f_an_incomplete_prompt_has_no_next_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_with_a_token_too_early(folder, monkeypatch) == []


@pytest.mark.mutant
def test_mini_sglang_ef4367f_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong engine sets a token in the table for every extend of a step."""
    enqueue = StepRunner._enqueue

    def with_dummies(self: StepRunner, plan: Any, *rest: Any) -> Any:
        step = enqueue(self, plan, *rest)
        rows = [item.req.pool_index for item in plan.extends if not item.completes]
        if rows:
            self._cache.pool.newest_tokens.put(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))
        return step

    monkeypatch.setattr(StepRunner, "_enqueue", with_dummies)
    assert rows_with_a_token_too_early(folder, monkeypatch) != []


class OwnEntropy(SeedSource):
    """A wrong engine draws the seed on each rank from its own system."""

    def __init__(self, random_seed: int, parallel: Parallel) -> None:
        self._generator = np.random.default_rng()


def ranks_agree(folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Return whether both ranks of an engine sample the same tokens for requests without a seed."""
    records: dict[int, dict[str, list[int]]] = {0: {}, 1: {}}
    emit: Callable = Scheduler._emit

    def noted(self: Scheduler, reqs: Any) -> None:
        reqs = list(reqs)
        records[self.parallel.position.world_rank].update({req.rid: list(req.output_ids) for req in reqs})
        emit(self, reqs)

    patch.setattr(Scheduler, "_emit", noted)
    overlap(patch)
    harness = ParallelHarness(folder, tp_size=2, random_seed=None)
    try:
        harness.generate(PROMPTS, {"max_new_tokens": 12, "temperature": 1.0})
    finally:
        harness.close()
    assert len(records[0]) == len(PROMPTS) and all(len(tokens) == 12 for tokens in records[0].values())
    return records[0] == records[1]


def test_mini_sglang_690f55a_ranks_sample_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_agree(folder, monkeypatch)


@pytest.mark.mutant
def test_mini_sglang_690f55a_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SeedSource", OwnEntropy)
    assert not ranks_agree(folder, monkeypatch)
