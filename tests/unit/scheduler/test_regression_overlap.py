"""Five mistakes that mini-sglang made in its overlap loop, each named by its fix there: none of them is possible here.

Each has the wrong variant that the test catches.  Devices and streams are played (`tests/device_stand_in.py`,
`tests/streams_stand_in.py`), so that what is read too early is stale every time, not once in a thousand runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.make_checkpoint.run import make_checkpoint
from rollout.core.host_copy import HostCopies, to_device
from rollout.distributed.parallel import Parallel
from rollout.executor import input_builder
from rollout.memory import cache_manager, kv_pool
from rollout.memory.kv_pool import NewestTokens
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode
from rollout.sampling import torch_sampler
from rollout.scheduler import scheduler
from rollout.scheduler import step as step_module
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.seeds import SeedSource
from rollout.scheduler.step import StepRunner
from tests.device_engine import device_engine, stand_in_device
from tests.device_stand_in import DEVICE, RaceError
from tests.late_loop import overlap
from tests.model_zoo import tiny_spec
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from tests.streams_stand_in import Stream

PROMPTS = [[7, 3, 9, 4, 11, 2], list(range(20, 39)), [5, 6, 7]]
LENGTHS = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("overlap") / "model", tiny_spec(seed=1))


def tokens_of(harness: Harness) -> list[list[int]]:
    harness.generate(PROMPTS, LENGTHS)
    return [result.token_ids for result in harness.results.values()]


# --- 46255ef: the event for "copies done" was recorded on another stream than theirs ----------------------------------


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
    """Wrong: the event is recorded on a stream of its own."""
    want = tokens_of(Harness(folder, disable_native_kernels=True, disable_overlap_schedule=False))

    def close(self: HostCopies) -> None:
        self._done = Stream().record_event()  # type: ignore[assignment]

    monkeypatch.setattr(HostCopies, "close", close)
    with pytest.raises((AssertionError, IndexError)):  # garbage is no token and no slot
        assert tokens_on_a_stream(folder) == want


# --- 20fcd7f: the next plan wrote into the pinned buffer that a transfer of the last one still read -------------------


def test_mini_sglang_20fcd7f_nothing_is_planned_into_memory_in_flight(folder: Path) -> None:
    """Transfers are done when a step's event is waited for: one launch later.  A write before is a `RaceError`."""
    want = tokens_of(Harness(folder, disable_native_kernels=True, disable_overlap_schedule=False))
    with stand_in_device():
        assert tokens_of(device_engine(folder)) == want


def one_buffer_each(patch: pytest.MonkeyPatch) -> None:
    """Wrong: one pinned buffer for every shape, used again without an event."""
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


# --- 94fe255: a node of the prefix tree kept a view of an index tensor that was used again ----------------------------


class KeepsAView(RadixCache):
    """Wrong: what is inserted is not copied: it is a row of the slot table, which the next request gets."""

    def insert_below(self, node: RadixNode, tokens: np.ndarray, slots: torch.Tensor) -> tuple[RadixNode, int]:
        node, known = super().insert_below(node, tokens, slots)
        if known < len(tokens):
            node.slots = slots[known:]
        return node, known


def hit_after_the_row_was_used_again(folder: Path) -> bool:
    """Return whether a prefix gives what it gave before, and no slot is in two places."""
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


# --- ef4367f: the dummy next token of a prompt that is not complete went into the live table --------------------------


def rows_with_a_token_too_early(folder: Path, patch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the table of newest tokens that were set while the prompt of their request was not complete."""
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
    """Wrong: every extend of a step gets a token in the table."""
    enqueue = StepRunner._enqueue

    def with_dummies(self: StepRunner, plan: Any, *rest: Any) -> Any:
        step = enqueue(self, plan, *rest)
        rows = [item.req.pool_index for item in plan.extends if not item.completes]
        if rows:
            self._cache.pool.newest_tokens.put(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))
        return step

    monkeypatch.setattr(StepRunner, "_enqueue", with_dummies)
    assert rows_with_a_token_too_early(folder, monkeypatch) != []


# --- 690f55a: ranks that share requests sampled from generators of their own ------------------------------------------


class OwnEntropy(SeedSource):
    """Wrong: each rank asks its own system."""

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
