"""Requests that pool: chunks, batches, cached prefixes, retractions, refreshes and aborts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.core.messages.io_struct import AbortReqInput, ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.pooling import PoolingParams
from rollout.core.messages.req_output import PooledRows
from rollout.scheduler import pooling
from rollout.scheduler.req import PoolRecord
from tests.head_zoo import headed_checkpoint, headed_model, scores
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(2, 320, size=size).tolist() for size in (40, 3, 17, 64, 1)]
KINDS = [PoolingParams(kind=kind) for kind in ("last", "mean", "cls", "all")]
SCORES = [PoolingParams(scores=True), PoolingParams(kind="all", scores=True)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    headed_checkpoint(folder, "qwen3_moe", "ForSequenceClassification")
    return folder


def start(folder: Path, **settings: Any) -> Harness:
    return Harness(folder, enable_return_routed_experts=False, **settings)


def submit(harness: Harness, prompt: list[int], params: PoolingParams, **fields: Any) -> str:
    return harness.submit(prompt, params={"max_new_tokens": 0}, pooling=params, return_logprob=False, **fields)


def finished(harness: Harness, rid: str) -> PooledRows:
    record = harness.results[rid].finished
    assert record is not None and record.pooled is not None
    return record.pooled


def pool(harness: Harness, prompts: list[list[int]], params: PoolingParams) -> list[PooledRows]:
    rids = [submit(harness, prompt, params) for prompt in prompts]
    harness.run()
    return [finished(harness, rid) for rid in rids]


@pytest.mark.parametrize("params", [*KINDS, *SCORES], ids=repr)
def test_the_bits_depend_on_neither_batch_nor_chunks_nor_cache(classifier: Path, params: PoolingParams) -> None:
    alone = start(classifier, disable_radix_cache=True)
    expected = [pool(alone, [prompt], params)[0].data for prompt in PROMPTS]
    together = start(classifier)
    assert [rows.data for rows in pool(together, PROMPTS, params)] == expected
    assert [rows.data for rows in pool(together, PROMPTS, params)] == expected, "with cached prefixes"
    in_chunks = start(classifier, chunked_prefill_size=7, max_running_requests=3, max_total_tokens=96)
    assert [rows.data for rows in pool(in_chunks, PROMPTS, params)] == expected
    for harness in (alone, together, in_chunks):
        harness.check_idle()


def test_a_cached_prefix_is_used_for_the_last_token_alone(classifier: Path) -> None:
    """The cache does not hold the hidden states that all other kinds need."""
    harness, prompt = start(classifier), PROMPTS[0]
    for params in (*KINDS, *SCORES):
        for _ in range(2):
            rid = submit(harness, prompt, params)
            harness.run()
        record = harness.results[rid].finished
        assert record is not None
        assert record.cached_tokens == (len(prompt) - 1 if params.kind == "last" else 0)


def test_a_mean_that_skipped_cached_tokens_would_be_noticed(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant of the rule above."""
    expected = pool(start(classifier), [PROMPTS[0]], PoolingParams(kind="mean"))
    monkeypatch.setattr(PoolingParams, "reads_all", False)
    harness = start(classifier)
    pool(harness, [PROMPTS[0]], PoolingParams())
    assert pool(harness, [PROMPTS[0]], PoolingParams(kind="mean"))[0].data != expected[0].data


@pytest.mark.parametrize("kind", ["mean", "all"])
def test_a_retraction_keeps_what_was_pooled(classifier: Path, kind: Any) -> None:
    params = PoolingParams(kind=kind)
    expected = pool(start(classifier), [PROMPTS[3]], params)[0]
    harness = start(classifier, chunked_prefill_size=10)
    rid = submit(harness, PROMPTS[3], params)
    for _ in range(3):
        harness.tick()
    harness.scheduler.retract(harness.scheduler.queues.holding_kv())
    harness.run()
    assert harness.results[rid].finished.num_retractions == 1
    assert finished(harness, rid).data == expected.data


def test_a_refresh_carries_the_head(classifier: Path, tmp_path: Path) -> None:
    """It is as every other tensor: a refresh without it is not complete, and answers name the version."""
    harness, prompt, params = start(classifier), PROMPTS[0], PoolingParams(scores=True)
    before = pool(harness, [prompt], params)[0]
    other = headed_checkpoint(tmp_path, "qwen3_moe", "ForSequenceClassification", seed=8)
    tensors = logical_tensors(tmp_path)
    headless = {name: tensor for name, tensor in tensors.items() if name != "score.weight"}
    refused = refresh(harness, headless, "v1")
    assert not refused.success and "score.weight" in refused.message
    assert pool(harness, [prompt], params)[0] == before
    assert refresh(harness, tensors, "v1").success
    after = pool(harness, [prompt], params)[0]
    assert list(map(_span, after.versions)) == [("v1", len(prompt) - 1, len(prompt))]
    assert after.data == pool(start(tmp_path), [prompt], params)[0].data
    got = torch.from_numpy(np.frombuffer(after.data, "<f4").copy())
    torch.testing.assert_close(got, scores(other, prompt), rtol=1e-4, atol=2e-5)


def _span(span: Any) -> tuple[str, int, int]:
    return span.version, span.start, span.end


def test_a_mean_names_every_version_that_made_it(classifier: Path) -> None:
    harness = start(classifier, chunked_prefill_size=16)
    rid = submit(harness, PROMPTS[0], PoolingParams(kind="mean"))
    harness.tick()
    weight = headed_model("qwen3_moe", "ForSequenceClassification", seed=8).score.weight.detach()
    harness.control(PauseGenerationReqInput, mode="in_place")
    assert refresh(harness, {"score.weight": weight}, "v1", coverage="partial").success
    harness.control(ContinueGenerationReqInput)
    harness.run()
    assert list(map(_span, finished(harness, rid).versions)) == [("default", 0, 16), ("v1", 16, 40)]


def test_an_aborted_request_has_no_rows(classifier: Path) -> None:
    harness = start(classifier, chunked_prefill_size=8)
    rid = submit(harness, PROMPTS[3], PoolingParams(kind="all"))
    harness.tick()
    harness.channel.inbox.append(AbortReqInput(rids=[rid]))
    harness.run()
    record = harness.results[rid].finished
    assert record is not None and record.reason.type == "abort" and record.pooled is None
    harness.check_idle()


def test_rows_are_cut_and_then_scaled() -> None:
    rows = np.array([[3.0, 4.0, 9.0], [0.0, 0.0, 1.0]], dtype=np.float32)
    record = PoolRecord(PoolingParams(kind="all", dimensions=2, normalise=True), rows=[rows], next_position=2)
    message = pooling.pooled_rows(record)
    assert message is not None and (message.num_rows, message.num_columns) == (2, 2)
    got = np.frombuffer(message.data, "<f4").reshape(2, 2)
    np.testing.assert_array_equal(got, np.array([[0.6, 0.8], [0.0, 0.0]], dtype=np.float32))
