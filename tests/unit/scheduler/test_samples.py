"""Samples of one prompt run together, and the highest temperature samples only allowed tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.late_loop import captured_loop  # noqa: F401
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

PROMPT = [5, 9, 2, 6, 5, 3, 5]
LARGEST_FLOAT32 = 3.4028234663852886e38


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=1)


@pytest.mark.parametrize("disable_native_kernels", [False, True])
def test_engine_20_the_highest_temperature_samples_what_it_may(folder: Path, disable_native_kernels: bool) -> None:
    torch.manual_seed(0)
    harness = Harness(folder, disable_native_kernels=disable_native_kernels)
    params = {"temperature": LARGEST_FLOAT32, "min_new_tokens": 12, "max_new_tokens": 12, "ignore_eos": False}
    results = harness.generate([PROMPT] * 4, params)
    for result in results:
        assert len(result.token_ids) == 12 and np.isfinite(result.logprobs).all()
        assert not {0, 2} & set(result.token_ids), "an end token before the minimum length"
    assert len({tuple(result.token_ids) for result in results}) > 1


def steps_of_group(harness: Harness, prompt: list[int], n: int, new_tokens: int, **fields) -> int:
    """Return the number of steps until `n` samples of `prompt` have `new_tokens` tokens each."""
    rids = [harness.submit(prompt, params={"max_new_tokens": new_tokens}, **fields) for _ in range(n)]
    stats = harness.scheduler.stats
    before = stats.num_steps
    while any(harness.results[rid].finished is None for rid in rids):
        harness.tick()
        assert stats.num_steps - before < 10_000
    first = harness.results[rids[0]].token_ids
    assert all(harness.results[rid].token_ids == first for rid in rids) and len(first) == new_tokens
    return stats.num_steps - before


GROUP = {"max_total_tokens": 65_536, "max_running_requests": 256, "enable_return_routed_experts": False}


@pytest.mark.full(but=("sequential-1-64", "sequential-7", "sequential-64-64"))
@pytest.mark.parametrize(("n", "new_tokens", "most"), [(64, 64, 66), (256, 128, 132)])
@pytest.mark.parametrize("prompt_len", [1, 2, 7, 64])
def test_engine_09_samples_of_one_prompt_run_together(
    folder: Path, n: int, new_tokens: int, most: int, prompt_len: int
) -> None:
    harness = Harness(folder, **GROUP)
    prompt = list(range(10, 10 + prompt_len))
    assert steps_of_group(harness, prompt, n, new_tokens) <= most
    assert harness.scheduler.stats.num_steps <= most
    assert steps_of_group(harness, prompt, n, new_tokens) == new_tokens, "a prompt that is cached: all at once"
    harness.check_idle()


@pytest.mark.parametrize(("chunk", "prompt_len"), [(32, 64), (32, 65), (16, 64), (64, 64), (63, 64), (64, 300)])
def test_engine_09_with_chunked_prefill(folder: Path, chunk: int, prompt_len: int) -> None:
    harness = Harness(folder, chunked_prefill_size=chunk, **GROUP)
    prompt_steps = -(-prompt_len // chunk)
    last_tokens = -(-63 // chunk)  # each sample computes the last prompt token itself
    assert steps_of_group(harness, [7] * prompt_len, 64, 64) <= prompt_steps + last_tokens + 63 + 1


def test_engine_09_several_groups_together(folder: Path) -> None:
    harness = Harness(folder, **GROUP)
    prompts = [[index] * 40 for index in range(10, 18)]
    for prompt in prompts:
        for _ in range(16):
            harness.submit(prompt, params={"max_new_tokens": 32})
    harness.run()
    assert harness.scheduler.stats.num_steps <= 34
    assert harness.scheduler.stats.num_cached_tokens == 8 * 15 * 39, "each prompt was computed once"


def test_engine_09_samples_that_score_their_prompt_do_not_wait_for_one_another(folder: Path) -> None:
    """Each sample must compute the prompt itself, so letting one go first would save no work."""
    harness = Harness(folder, **GROUP)
    assert steps_of_group(harness, [7] * 20, 16, 16, logprob_start_len=0) == 16


def test_engine_09_in_a_small_pool(folder: Path) -> None:
    """A pool for an eighth of the group: it is busy from the second step on, and little is computed twice."""
    harness = Harness(folder, **GROUP | {"max_total_tokens": 64 + 8 * 64})
    computed = 0
    forward = harness.scheduler.runner.forward

    def counted(batch):
        nonlocal computed
        computed += batch.num_tokens
        return forward(batch)

    harness.scheduler.runner.forward = counted
    assert steps_of_group(harness, [7] * 64, 64, 64) <= 190  # 273 when they entered one a step
    assert computed <= 1.1 * (64 + 64 * 64)
    harness.check_idle()


@pytest.mark.parametrize("dp_size", [1, 2])
def test_engine_09_on_two_ranks(folder: Path, dp_size: int) -> None:
    layout = {"tp_size": 2, "dp_size": dp_size, "enable_dp_attention": dp_size > 1}
    with ParallelHarness(folder, dtype="float32", max_total_tokens=8192, **layout) as harness:
        rids = [harness.submit([7] * 20, params={"max_new_tokens": 16}, dp_rank=index % dp_size) for index in range(64)]
        harness.run()
        assert all(len(harness.results[rid].token_ids) == 16 for rid in rids)
        assert all(scheduler.stats.num_steps <= 18 for scheduler in harness.schedulers)
        harness.check_idle()
