"""vLLM's token endpoint on a real server: the same tokens, log-probabilities and routes as SGLang's endpoint gives."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

PROMPT = [5, 17, 3, 42, 8, 9, 23]
LAYERS, TOP_K = 3, 3
CONTEXT = 2048  # long enough for a request to be met while it runs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3, context_length=CONTEXT)
    with ServerProcess(folder, enable_return_routed_experts=True, max_total_tokens=4096) as running:
        yield running


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(server: ServerProcess, token_ids: list[int], path: str = "/inference/v1/generate", **params: Any) -> Any:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 1} | params
    return post(server, path, {"token_ids": token_ids, "sampling_params": params})


def npy(choice: dict[str, Any]) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


def logprobs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 11, "top_k": 20, "n": 3}])
def test_both_dialects_say_the_same(server: ServerProcess, params: dict[str, Any]) -> None:
    server.http.post("/flush_cache")
    choices = ask(server, PROMPT, **params)["choices"]
    server.http.post("/flush_cache")
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
    samples = post(server, "/generate", body)
    samples = samples if isinstance(samples, list) else [samples]
    assert len(choices) == len(samples)
    for choice, sample in zip(choices, samples):
        meta = sample["meta_info"]
        assert choice["token_ids"] == sample["output_ids"]
        assert logprobs(choice) == [entry[0] for entry in meta["output_token_logprobs"]]
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(-1, LAYERS, TOP_K)
        assert np.array_equal(npy(choice), rows) and npy(choice).dtype == np.uint8
    if params:
        assert len({tuple(choice["token_ids"]) for choice in choices}) > 1


def test_a_second_turn_continues_the_routes_of_the_first(server: ServerProcess) -> None:
    """A new turn follows the exact token ids of the first; its rows start where the first turn's end."""
    [first] = ask(server, PROMPT)["choices"]
    known = PROMPT + first["token_ids"]
    prompt = [*known, 77, 12, 5]
    reply = ask(server, prompt, routed_experts_prompt_start=len(known) - 1)
    [second] = reply["choices"]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(known) - 1
    joined = np.concatenate([npy(first), npy(second)])
    server.http.post("/flush_cache")
    whole = npy(ask(server, prompt)["choices"][0])
    assert joined.shape == whole.shape and np.array_equal(joined[: len(known) - 1], whole[: len(known) - 1])
    assert len(npy(second)) == len(prompt) - len(known) + len(second["token_ids"])


def test_skyrls_path_returns_the_same_tokens_and_routes(server: ServerProcess) -> None:
    [plain], [packed] = ask(server, PROMPT)["choices"], ask(server, PROMPT, "/skyrl/v1/generate")["choices"]
    routes = packed["routed_experts"]
    rows = np.frombuffer(base64.b64decode(routes["data"]), dtype=routes["dtype"]).reshape(routes["shape"])
    assert packed["token_ids"] == plain["token_ids"] and np.array_equal(rows, npy(plain))


def test_prompt_logprobs_are_those_of_scoring(server: ServerProcess) -> None:
    """SGLang's scoring, vLLM's tokens, completions and chats return the same ones, each with the best tokens."""
    body = {
        "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": 3,
    }  # fmt: skip
    meta = post(server, "/generate", body)["meta_info"]
    shared = {"max_tokens": 1, "prompt_logprobs": 3}
    forms = [
        post(server, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": shared})["prompt_logprobs"],
        post(server, "/v1/completions", {"prompt": PROMPT} | shared)["choices"][0]["prompt_logprobs"],
        post(server, "/v1/chat/completions", {"input_ids": PROMPT, "messages": []} | shared)["prompt_logprobs"],
    ]
    own, top = meta["input_token_logprobs"], meta["input_top_logprobs"]
    for entries in forms:
        assert len(entries) == len(PROMPT) and entries[0] is None
        for position in range(1, len(PROMPT)):
            values = entries[position]
            assert next(iter(values)) == str(PROMPT[position])
            assert values[str(PROMPT[position])]["logprob"] == pytest.approx(own[position][0], abs=1e-4)
            by_rank = {value["rank"]: name for name, value in values.items()}
            assert [int(by_rank[rank]) for rank in (1, 2, 3)] == [entry[1] for entry in top[position]]


def test_a_sample_ends_with_the_context(server: ServerProcess) -> None:
    for params in ({"max_tokens": None}, {"max_tokens": 10_000}):
        [choice] = ask(server, [7] * (CONTEXT - 20), **params)["choices"]
        assert len(choice["token_ids"]) == 20 and choice["finish_reason"] == "length"


def test_a_stream_and_an_abort(server: ServerProcess) -> None:
    """The tokens that arrived before the abort are a prefix of the whole sample."""
    params = {"max_tokens": 2000, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": PROMPT, "sampling_params": params, "request_id": "mine", "stream": True}
    aborted = threading.Event()
    chunks = []
    with server.http.stream("POST", "/inference/v1/generate", json=body) as reply:
        for line in reply.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            chunks.append(json.loads(line.removeprefix("data: ")))
            if not aborted.is_set():
                aborted.set()
                server.http.post("/abort_request", json={"rid": "mine"})
    token_ids = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == "abort" and 0 < len(token_ids) < 2000
    assert len(npy(last)) == len(PROMPT) + len(token_ids) - 1
    [whole] = ask(server, PROMPT, max_tokens=50)["choices"]
    assert whole["token_ids"][: len(token_ids)] == token_ids[:50]


def test_a_refusal_changes_nothing(server: ServerProcess) -> None:
    before = server.http.get("/get_load").json()
    for params in ({"n": 0}, {"temperature": -1}, {"bad_words": [" "]}, {"routed_experts_prompt_start": 99}):
        reply = server.http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": params})
        assert reply.status_code == 400 and next(iter(params)).split("_")[0] in reply.json()["error"]["message"]
    assert server.http.get("/get_load").json() == before
    assert len(ask(server, PROMPT)["choices"][0]["token_ids"]) == 12
