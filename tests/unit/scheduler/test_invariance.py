"""A request has one result, tokens and routes, however it is batched, chunked, cached, retracted or streamed.

In float64 the arithmetic leaves no room for ties, so tokens and routes must be equal; log-probabilities may differ by
summation order only (1e-9).
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from tests.alternatives import chosen_rows
from tests.late_loop import loop  # noqa: F401
from tests.scheduler_harness import Harness, Result

NEW_TOKENS = 48
LOGPROB_TOLERANCE = 1e-9


@pytest.fixture(scope="module", params=[0, 1])
def checkpoint(request, tmp_path_factory: pytest.TempPathFactory):
    torch.set_num_threads(1)
    spec = CheckpointSpec(
        seed=request.param, hidden_size=64, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate_size=96,
        experts=12, top_k=3, moe_intermediate_size=32, context_length=512, vocab_size=600,
    )  # fmt: skip
    return make_checkpoint(tmp_path_factory.mktemp("model"), spec)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Draw random prompts of 1 to 60 tokens; every third one begins with a part of a shared prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(600) for _ in range(40)]
    result = []
    for i in range(count):
        own = [rng.randrange(600) for _ in range(rng.randint(1, 60))]
        result.append(shared[: rng.randint(1, 40)] + own[:20] if i % 3 == 0 else own)
    return result


def run(checkpoint, batch: list[list[int]], params: list[dict] | None = None, **settings) -> list[Result]:
    fields = settings.pop("fields", {})
    harness = Harness(checkpoint, dtype="float64", **settings)
    rids = [
        harness.submit(prompt, params={"max_new_tokens": NEW_TOKENS} | (params[i] if params else {}), **fields)
        for i, prompt in enumerate(batch)
    ]
    harness.run()
    harness.check_idle()
    return [harness.results[rid] for rid in rids]


def assert_same(results: list[Result], expected: list[Result]) -> None:
    for got, want in zip(results, expected, strict=True):
        assert got.token_ids == want.token_ids
        assert got.finished.reason == want.finished.reason
        rows = len(got.prompt_ids) + len(got.token_ids) - 1
        assert got.routes.shape[0] == rows
        assert np.array_equal(got.routes, want.routes)
        assert np.allclose(got.logprobs, want.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)


@pytest.fixture(scope="module")
def batch() -> list[list[int]]:
    return prompts(8)


@pytest.fixture(scope="module")
def alone(checkpoint, batch) -> list[Result]:
    """The reference: every request in a server of its own."""
    return [run(checkpoint, [prompt])[0] for prompt in batch]


def test_alone_or_among_64_others(checkpoint, batch, alone) -> None:
    others = prompts(64, seed=9)
    assert_same(run(checkpoint, batch + others, max_total_tokens=16384)[:8], alone)


@pytest.mark.parametrize("chunk", [1, 7, 64, -1])
def test_any_chunk_size_gives_the_same_results(checkpoint, batch, alone, chunk: int) -> None:
    assert_same(run(checkpoint, batch, chunked_prefill_size=chunk), alone)


def test_without_prefix_cache_results_are_the_same(checkpoint, batch, alone) -> None:
    assert_same(run(checkpoint, batch, disable_radix_cache=True), alone)


def test_prefix_hits_return_the_rows_of_the_forward_that_wrote_the_kv(checkpoint, batch, alone) -> None:
    harness = Harness(checkpoint, dtype="float64")
    harness.generate(batch, {"max_new_tokens": NEW_TOKENS})
    again = harness.generate(batch, {"max_new_tokens": NEW_TOKENS})
    assert_same(again, alone)
    assert all(r.finished.cached_tokens == len(r.prompt_ids) - 1 for r in again)


@pytest.mark.parametrize("pool", [150, 110])
def test_a_pool_so_small_that_requests_are_retracted(checkpoint, batch, alone, pool: int) -> None:
    results = run(checkpoint, batch, max_total_tokens=pool)
    assert_same(results, alone)
    retractions = [r.finished.num_retractions for r in results]
    assert sum(retractions) >= 3 and max(retractions) >= 2, retractions


def test_small_pool_without_prefix_cache(checkpoint, batch, alone) -> None:
    results = run(checkpoint, batch, max_total_tokens=110, disable_radix_cache=True, chunked_prefill_size=16)
    assert_same(results, alone)
    assert sum(r.finished.num_retractions for r in results) >= 3


def test_streamed_requests_give_the_same_results(checkpoint, batch, alone) -> None:
    results = run(checkpoint, batch, fields={"stream": True})
    assert_same(results, alone)
    assert all(r.num_messages == NEW_TOKENS for r in results)


def test_few_running_requests_give_the_same_results(checkpoint, batch, alone) -> None:
    assert_same(run(checkpoint, batch, max_running_requests=2), alone)


def test_seeded_samples_do_not_depend_on_the_batch(checkpoint, batch) -> None:
    seeded = {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 77}
    want = [run(checkpoint, [prompt], params=[seeded])[0] for prompt in batch[:4]]
    noise = [{"temperature": 1.2} for _ in range(20)]
    got = run(checkpoint, batch[:4] + prompts(20, seed=3), params=[seeded] * 4 + noise, max_total_tokens=300)
    assert_same(got[:4], want)
    assert len({tuple(r.token_ids) for r in want}) == 4


def test_four_samples_of_one_prompt_share_its_prefill(checkpoint, batch) -> None:
    seeds = [{"temperature": 1.0, "sampling_seed": i} for i in range(4)]
    prompt = max(batch, key=len)
    want = [run(checkpoint, [prompt], params=[p])[0] for p in seeds]
    got = run(checkpoint, [prompt] * 4, params=seeds)
    assert_same(got, want)
    assert [r.finished.cached_tokens for r in got] == [0] + [len(prompt) - 1] * 3


@pytest.mark.full(but="0")
def test_prompt_logprobs_do_not_depend_on_chunks_cache_or_retraction(checkpoint, batch) -> None:
    fields = {"logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [5, 9]}
    want = [run(checkpoint, [prompt], fields=fields)[0].finished.prompt_logprobs for prompt in batch]
    for settings in ({"chunked_prefill_size": 7}, {"max_total_tokens": 110}, {"disable_radix_cache": True}):
        for result, expected in zip(run(checkpoint, batch, fields=fields, **settings), want, strict=True):
            got = result.finished.prompt_logprobs
            assert len(got.values) == len(result.prompt_ids) and got.values[0] is None
            assert np.allclose(got.values[1:], expected.values[1:], rtol=0, atol=LOGPROB_TOLERANCE)
            assert got.alternatives.top_ids == expected.alternatives.top_ids
            count = len(got.values) - 1
            chosen = chosen_rows(got.alternatives, count), chosen_rows(expected.alternatives, count)
            assert np.allclose(*chosen, rtol=0, atol=LOGPROB_TOLERANCE)


def test_scoring_a_sequence_reproduces_the_sampled_logprobs(checkpoint, batch, alone) -> None:
    whole = [r.prompt_ids + r.token_ids for r in alone]
    harness = Harness(checkpoint, dtype="float64")
    for result, sequence in zip(alone, whole, strict=True):
        start = len(result.prompt_ids) - 1
        (scored,) = harness.generate([sequence], {"max_new_tokens": 0}, logprob_start_len=start)
        assert scored.token_ids == [] and scored.finished.reason.type == "length"
        assert np.allclose(scored.finished.prompt_logprobs.values[1:], result.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)
        assert np.array_equal(scored.routes, result.routes)
    harness.check_idle()


def test_start_len_drops_leading_rows_only(checkpoint, batch, alone) -> None:
    prompt, want = batch[1], alone[1]
    for start in (0, 1, len(prompt)):
        got = run(checkpoint, [prompt], fields={"routed_experts_start_len": start})[0]
        assert np.array_equal(got.routes, want.routes[start:])
