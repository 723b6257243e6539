"""Scoring over HTTP: the compact form against the nested one, 256 likely tokens, and what is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from capture.token_logprobs import TokenLogprobs
from rollout.client import AsyncRolloutClient, ServerError
from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

VOCAB = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3, vocab_size=VOCAB, context_length=8192
    )
    settings = {"enable_return_routed_experts": True, "max_total_tokens": 20_000, "chunked_prefill_size": 256}
    with ServerProcess(folder, **settings) as running:
        yield running


def sequences(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, length).tolist() for length in lengths]


def generate(server: ServerProcess, **body: Any) -> Any:
    answer = server.http.post("/generate", json={"return_logprob": True} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def matrix(entries: list[Any], column: int) -> list[Any]:
    return [[entry[column] for entry in row] for row in entries]


@pytest.mark.parametrize("top_k", [0, 5, 256, VOCAB])
def test_scores_equal_those_in_nested_lists(server: ServerProcess, top_k: int) -> None:
    ids = sequences(2, 33, 700, 90)
    results = server.client.score(ids, top_k=top_k, temperature=0.8, token_ids_logprob=[4, 250], concurrency=3)
    params = {"max_new_tokens": 0, "temperature": 0.8}
    asked = {"logprob_start_len": 0, "top_logprobs_num": top_k, "token_ids_logprob": [4, 250]}
    answers = generate(server, input_ids=ids, sampling_params=params, **asked)  # with prefix hits as far as there are
    for result, answer in zip(results, answers, strict=True):
        meta = answer["meta_info"]
        assert result.logprobs.tolist() == [value for value, *_ in meta["input_token_logprobs"][1:]]
        assert result.chosen_logprobs.tolist() == matrix(meta["input_token_ids_logprobs"][1:], 0)
        assert result.top_ids.shape == result.top_logprobs.shape == (len(result), top_k)
        if top_k:
            assert result.top_logprobs.tolist() == matrix(meta["input_top_logprobs"][1:], 0)
            assert result.top_ids.tolist() == matrix(meta["input_top_logprobs"][1:], 1)
        if top_k == VOCAB:
            assert all(sorted(row) == list(range(VOCAB)) for row in result.top_ids.tolist())
            np.testing.assert_allclose(np.exp(result.top_logprobs).sum(axis=1), 1, rtol=1e-5)


def test_a_later_start_gives_the_same_rows(server: ServerProcess) -> None:
    (ids,) = sequences(120)
    (whole,) = server.client.score([ids], top_k=256)
    for start in (1, 2, 60, 119, 120):
        (part,) = server.client.score([ids], start=start, top_k=256)
        assert len(part) == 120 - start
        for name in ("logprobs", "top_ids", "top_logprobs"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[start - 1 :])


def test_sampled_tokens_have_the_same_scores(server: ServerProcess) -> None:
    """Scores have the same bits in both forms, at once and in a stream, and scored afterwards."""
    (prompt,) = sequences(40, seed=5)
    body = {
        "input_ids": prompt, "top_logprobs_num": 256, "token_ids_logprob": [7],
        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 1, "ignore_eos": True},
    }  # fmt: skip
    lists, compact = generate(server, **body), generate(server, **body, logprobs_format="compact")
    rows = TokenLogprobs.decode_text(compact["meta_info"]["output_logprobs"])
    rows.require(lists["output_ids"], 40)
    assert rows.logprobs.tolist() == [value for value, *_ in lists["meta_info"]["output_token_logprobs"]]
    assert rows.top_ids.tolist() == matrix(lists["meta_info"]["output_top_logprobs"], 1)
    assert rows.top_logprobs.tolist() == matrix(lists["meta_info"]["output_top_logprobs"], 0)
    *_, last = server.client.stream(
        input_ids=prompt, sampling_params=body["sampling_params"], return_logprob=True, top_logprobs_num=256,
        token_ids_logprob=[7], logprobs_format="compact",
    )  # fmt: skip
    assert last.logprob_arrays is not None and last.logprob_arrays.encode() == rows.encode()
    assert last.logprobs == rows.logprobs.tolist() and last.prompt_logprob_arrays is None
    (scored,) = server.client.score([prompt + lists["output_ids"]], start=40, top_k=256)
    assert np.array_equal(scored.logprobs, rows.logprobs) and np.array_equal(scored.top_logprobs, rows.top_logprobs)
    assert np.array_equal(scored.top_ids, rows.top_ids)


def test_routes_of_scored_sequences_and_their_replay(server: ServerProcess) -> None:
    ids = sequences(20, 50, seed=2)
    first = server.client.score(ids, top_k=3, return_routed_experts=True)
    routes = [result.routed_experts for result in first]
    assert [len(each) for each in routes if each is not None] == [19, 49]
    again = server.client.score(ids, top_k=3, replay_routed_experts=routes)
    for ours, theirs in zip(first, again, strict=True):
        assert np.array_equal(ours.logprobs, theirs.logprobs) and np.array_equal(ours.top_ids, theirs.top_ids)


def test_the_asynchronous_client_scores(server: ServerProcess) -> None:
    ids = sequences(30, 40, 50, seed=3)

    async def score() -> list[list[Any]]:
        async with AsyncRolloutClient(server.url) as client:
            return await asyncio.gather(*[client.score([each], top_k=8) for each in ids])

    expected = server.client.score(ids, top_k=8)
    for (ours,), theirs in zip(asyncio.run(score()), expected, strict=True):
        assert np.array_equal(ours.top_logprobs, theirs.top_logprobs)
    assert [span.version for result in expected for span in result.weight_versions] == ["default"] * 3


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "an unknown format": ({"logprobs_format": "zip"}, 400, "logprobs_format"),
    "a format of a wrong type": ({"logprobs_format": ["compact"]}, 400, "logprobs_format"),
    "text in arrays": ({"logprobs_format": "compact", "return_text_in_logprobs": True}, 400, "no text"),
    "more than 1024": ({"top_logprobs_num": 1025}, 400, "0..1024"),
    "more than the vocabulary": ({"top_logprobs_num": VOCAB + 1}, 400, "vocabulary"),
    "a negative number": ({"top_logprobs_num": -1}, 400, "0..1024"),
    "a start after the prompt": ({"logprob_start_len": 4}, 400, "logprob_start_len"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_fields_are_refused_with_one_reason(server: ServerProcess, case: str) -> None:
    fields, status, reason = BAD[case]
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    answer = server.http.post("/generate", json=body | fields)
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]


def test_the_client_passes_a_refusal_on(server: ServerProcess) -> None:
    for options in ({"top_k": 1025}, {"token_ids_logprob": [VOCAB]}, {"temperature": -1.0}):
        with pytest.raises(ServerError) as caught:
            server.client.score(sequences(5), **options)
        assert caught.value.status == 400


def test_the_compact_form_may_hold_eight_times_as_much(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "moe_dense_first", seed=3, vocab_size=VOCAB)
    with ServerProcess(folder, max_total_tokens=4096, max_logprob_entries=1000) as server:
        body = {"input_ids": [1] * 101, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        body |= {"logprob_start_len": 1, "top_logprobs_num": 80}
        refused = server.http.post("/generate", json=body)
        assert refused.status_code == 413 and "over the limit of 1000" in refused.json()["error"]["message"]
        assert server.http.post("/generate", json=body | {"logprobs_format": "compact"}).status_code == 200
        body["top_logprobs_num"] = 81
        refused = server.http.post("/generate", json=body | {"logprobs_format": "compact"})
        assert refused.status_code == 413 and "over the limit of 8000" in refused.json()["error"]["message"]


def test_a_large_answer_does_not_hold_up_others(server: ServerProcess) -> None:
    """Other calls are answered while an answer of 8 x 1500 x 300 entries is made."""
    ids = sequences(*[1500] * 8, seed=7)
    done = threading.Event()

    def score() -> None:
        try:
            server.client.score(ids, top_k=VOCAB)
        finally:
            done.set()

    worker = threading.Thread(target=score)
    worker.start()
    slowest, answered = 0.0, 0
    while not done.is_set():
        begin = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=30.0, trust_env=False).status_code == 200
        slowest, answered = max(slowest, time.monotonic() - begin), answered + 1
        time.sleep(0.01)
    worker.join()
    assert answered > 3 and slowest < 4.0, (answered, slowest)
    print(f"slowest of {answered} pings: {slowest * 1000:.0f} ms")
