"""Regression tests of the scheduler, the prefix cache and the client: each fails on the code before its fix."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.client.sse import SseDecoder
from rollout.core.errors import BadRequest
from rollout.core.messages.io_struct import AbortReqInput, ControlReqOutput, FlushCacheReqInput, decode_output
from rollout.core.messages.unreadable import encode_output
from rollout.core.sampling_params import SamplingParams
from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_cache import NoPrefixCache, RadixCache
from tests.late_loop import captured_loop  # noqa: F401
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

PROMPT = [5, 9, 2, 6, 5, 3, 5]
LARGEST_FLOAT32 = 3.4028234663852886e38


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=1)


# --- 1: aborts and answers that cannot end the loop ---------------------------------------------------------------


@pytest.mark.parametrize("phase", ["running", "waiting"])
def test_engine_01_a_repeated_rid_in_an_abort_counts_once(folder: Path, phase: str) -> None:
    harness = Harness(folder)
    first = harness.submit(PROMPT, params={"max_new_tokens": 8})
    if phase == "running":
        harness.tick()
    other = harness.submit(PROMPT, params={"max_new_tokens": 8})
    harness.channel.inbox.append(AbortReqInput(rids=[first, "unknown", first, first]))
    harness.run()
    assert harness.results[first].finished.reason.type == "abort"
    assert harness.results[other].finished.reason.type == "length"
    harness.check_idle()


def test_engine_01_a_failing_abort_is_logged_and_the_loop_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    harness = Harness(folder)
    rid = harness.submit(PROMPT, params={"max_new_tokens": 8})
    with monkeypatch.context() as patched:
        patched.setattr(harness.scheduler, "abort", lambda rids: 1 / 0)
        harness.channel.inbox.append(AbortReqInput(rids=[rid]))
        harness.tick()
    harness.run()
    assert harness.results[rid].finished.reason.type == "length"
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_engine_01_an_answer_that_cannot_be_encoded_is_a_failed_answer(folder: Path) -> None:
    harness = Harness(folder)
    sent = harness.channel.send
    harness.channel.send = lambda message: sent(_through_msgpack(message))  # as over a socket
    harness.scheduler._verbs.update(
        {FlushCacheReqInput: lambda verb: ControlReqOutput(request_id=verb.request_id, success=True, data={"n": 2**70})}
    )
    answer = harness.control(FlushCacheReqInput)
    assert not answer.success and answer.status_code == 500


def _through_msgpack(message):
    return decode_output(encode_output(message))


# --- 14: what a key leaves behind in the prefix cache -------------------------------------------------------------


@pytest.mark.parametrize("disabled", [False, True])
def test_engine_14_roots_go_with_their_last_child(folder: Path, disabled: bool) -> None:
    harness = Harness(folder, max_total_tokens=256, disable_radix_cache=disabled)
    for index in range(60):  # more than the pool holds: eviction takes what the keys before left
        harness.generate([PROMPT], {"max_new_tokens": 4}, extra_key=f"key {index}")
    cache = harness.scheduler.cache.prefix_cache
    with_content = {namespace for namespace, root in cache._roots.items() if root.children}
    assert set(cache._roots) == with_content and len(with_content) <= 256 // len(PROMPT)
    assert disabled == (not with_content)
    harness.check_idle()


@pytest.mark.parametrize("kind", [RadixCache, NoPrefixCache])
def test_engine_14_a_root_lives_while_it_is_used(kind: type[RadixCache]) -> None:
    allocator = SlotAllocator(16)
    cache = kind(allocator)
    tokens = np.arange(4)
    node, _ = cache.match(("k", 0), tokens)
    cache.lock(node)
    cache.insert(("k", 0), tokens, allocator.alloc(4))
    assert cache.evict(16) == cache.num_cached == 0 or kind is RadixCache
    cache.evict(16)
    assert cache.match(("k", 0), tokens)[0] is node, "a second root would split one namespace in two"
    cache.unlock(node)
    assert not cache._roots and allocator.num_free == 16


# --- 19: the client's reader of events ----------------------------------------------------------------------------


def test_engine_19_reading_an_event_takes_time_in_proportion_to_its_size() -> None:
    def seconds() -> float:
        decoder, chunk = SseDecoder(), b"x" * 256
        start = time.perf_counter()
        assert not list(decoder.feed(b"data: "))
        for _ in range(12_000):
            assert not list(decoder.feed(chunk))
        (event,) = decoder.feed(b"\n\n")
        assert len(event) == 12_000 * 256
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.4  # 0.02 s; 18 GB were copied when it was quadratic


def test_engine_19_events_are_the_same_however_they_are_cut() -> None:
    stream = b'data: {"a": 1}\r\n\r\n: comment\ndata: two\ndata:lines\n\nid: 3\n\ndata: [DONE]\n\n'
    whole = list(SseDecoder().feed(stream))
    assert whole == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
    for size in (1, 2, 3, 7):
        decoder = SseDecoder()
        cut = [event for i in range(0, len(stream), size) for event in decoder.feed(stream[i : i + size])]
        assert cut == whole


# --- 20: temperatures beyond float32 ------------------------------------------------------------------------------


def test_engine_20_a_temperature_beyond_float32_is_refused() -> None:
    for temperature in (1e39, 1e308, float("inf"), float("nan")):
        with pytest.raises(BadRequest, match="temperature"):
            SamplingParams(temperature=temperature).validate(320)


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


# --- 9: samples of one prompt -------------------------------------------------------------------------------------


def steps_of_group(harness: Harness, prompt: list[int], n: int, new_tokens: int, **fields) -> int:
    """Steps until `n` samples of `prompt` have `new_tokens` tokens each."""
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
    """They must compute the prompt themselves; nothing is won by letting one go first."""
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
