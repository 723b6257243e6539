"""vLLM's token endpoint over real sockets: what its clients check of a reply, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishReason
from rollout.http.vllm import generate as fmt
from rollout.http.vllm.generate import TokenGenerateRequest
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import NUM_EXPERTS, TOP_K, logprob_of
from tests.tiny_tokenizer import write_model_folder

PATH = "/inference/v1/generate"
SPLICE = b'"routed_experts":{"data":"'
"""The place at which prime-rl's and SkyRL's clients cut the routes out of a reply before they parse it."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, enable_return_routed_experts=True, vllm_routed_experts="dict") as server:
        yield server


@pytest.fixture
def npy_server(tmp_path: Path) -> Iterator[Live]:
    with live_server(write_model_folder(tmp_path), enable_return_routed_experts=True) as server:
        yield server


def ask(live: Live, path: str = PATH, *, token_ids: list[int], **body: Any) -> dict[str, Any]:
    reply = live.client.post(path, json={"token_ids": token_ids} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def wide_rows(start: int, end: int) -> np.ndarray:
    """Return the stand-in's rows as [rows, 2 hidden layers, K], of which the first layer is dense."""
    positions = np.arange(start, end)[:, None]
    chosen = (positions + np.arange(TOP_K)) % NUM_EXPERTS
    return np.stack([np.zeros_like(chosen), chosen], axis=1)


def envelope_array(routes: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(routes["data"]), dtype=routes["dtype"]).reshape(routes["shape"])


def test_a_reply_holds_what_clients_check(live: Live) -> None:
    """Each token has one entry with its id and a number; usage counts the tokens from the cache."""
    reply = ask(
        live, token_ids=[5, 6], request_id="r-1", model="m", sampling_params={"max_tokens": 3, "logprobs": 1}
    )  # fmt: skip
    [choice] = reply["choices"]
    assert (reply["request_id"], reply["model"], choice["index"]) == ("r-1", "m", 0)
    assert (choice["token_ids"], choice["finish_reason"]) == ([5, 6, 5], "length")
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["token_id:5", "token_id:6", "token_id:5"]
    assert [entry["logprob"] for entry in content] == [logprob_of(i) for i in (5, 6, 5)]
    assert content[1]["top_logprobs"] == [{"token": "token_id:6", "token_id": 6, "logprob": logprob_of(6)}]
    assert reply["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert reply["metadata"]["weight_version"] == "v0" and choice["weight_versions"][0]["end"] == 3
    assert reply["prompt_logprobs"] is None and "prompt_token_ids" not in reply and "mm_placeholders" not in reply


def test_the_prompt_comes_back_where_asked_for(live: Live) -> None:
    reply = ask(live, token_ids=[5, 6], sampling_params={"max_tokens": 1}, return_token_ids=True)
    assert (reply["prompt_token_ids"], reply["mm_placeholders"]) == ([5, 6], {})
    assert reply["choices"][0]["logprobs"] is None


def test_minus_infinity_is_a_number_and_not_a_sentinel() -> None:
    request = TokenGenerateRequest(token_ids=[1], sampling_params={"logprobs": 0})
    meta = {"output_token_logprobs": [[float("-inf"), 7, None]], "finish_reason": None}
    native = {"output_ids": [7], "meta_info": meta}
    [entry] = fmt.choice(request, 0, native)["logprobs"]["content"]
    assert math.isfinite(entry["logprob"]) and entry["logprob"] != -9999.0
    assert math.isfinite(np.float32(entry["logprob"]))


def test_sampling_parameters_by_vllms_names(live: Live) -> None:
    params = {
        "max_tokens": 4, "min_tokens": 1, "seed": 2**62, "stop": ["x"], "stop_token_ids": [9], "top_k": 0, "n": 2,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "detokenize": True, "output_kind": 2,
    }  # fmt: skip
    live.scheduler.received.clear()
    reply = ask(
        live, token_ids=[5, 6], sampling_params=params, cache_salt="s", priority=-7,
        kv_transfer_params={"do_remote_decode": False},
    )  # fmt: skip
    assert [choice["token_ids"] for choice in reply["choices"]] == [[5, 6, 5, 6]] * 2
    assert reply["kv_transfer_params"] == {"do_remote_decode": False}
    assert reply["usage"]["prompt_tokens"] == 2
    message = live.sent(TokenizedGenerateReqInput)[0]
    got = message.sampling_params
    assert (got.max_new_tokens, got.min_new_tokens, got.sampling_seed, got.top_k) == (4, 1, 2**62, -1)
    assert (got.stop, got.no_stop_trim, got.skip_special_tokens) == (["x"], True, False)
    assert message.extra_key.startswith("s") and message.priority == -7


@pytest.mark.parametrize("params", [{}, {"max_tokens": None}, {"max_tokens": 1000}])
def test_a_sample_ends_with_the_context(live: Live, params: dict[str, Any]) -> None:
    """A sample of which more was asked for ends, too: the turns of an agent grow, its `max_tokens` does not shrink."""
    [choice] = ask(live, token_ids=[5, 6], sampling_params=params | {"ignore_eos": True})["choices"]
    assert len(choice["token_ids"]) == 158 and choice["finish_reason"] == "length"


@pytest.mark.parametrize("params", [{"min_tokens": 150}, {"min_tokens": 500, "max_tokens": 1000}])
def test_the_least_length_ends_with_the_context_too(live: Live, params: dict[str, Any]) -> None:
    [choice] = ask(live, token_ids=[5] * 100, sampling_params=params)["choices"]
    assert len(choice["token_ids"]) == 60 and choice["finish_reason"] == "length"
    status, said = live.refused(PATH, token_ids=[5], sampling_params={"min_tokens": 5, "max_tokens": 4})
    assert status == 400 and "min_new_tokens" in said


def test_no_seed_may_be_said_in_words_of_vllm(live: Live) -> None:
    live.scheduler.received.clear()
    ask(live, token_ids=[5], sampling_params={"seed": -1, "max_tokens": 1})
    assert live.sent(TokenizedGenerateReqInput)[0].sampling_params.sampling_seed is None


def test_what_generate_takes_is_taken_here(live: Live) -> None:
    live.scheduler.received.clear()
    fields = {"extra_key": "k", "session_id": "s", "max_kv_version_lag": 1, "routed_dp_rank": 0}
    ask(live, token_ids=[5], sampling_params={"max_tokens": 1}, **fields)
    [message] = live.sent(TokenizedGenerateReqInput)
    assert (message.extra_key, message.session_id, message.max_kv_version_lag) == ("k", "s", 1)


def test_prompt_logprobs_hold_each_token_with_its_rank(live: Live) -> None:
    params = {"max_tokens": 1, "prompt_logprobs": 1}
    none, six = ask(live, token_ids=[5, 6], sampling_params=params)["prompt_logprobs"]
    assert none is None and six["6"]["logprob"] == logprob_of(6) and six["6"]["rank"] == 1


def test_the_splice_finds_the_routes(live: Live) -> None:
    """The reply has prime-rl's form, and its client cuts it at the right bytes."""
    reply = live.client.post(
        PATH, json={"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "routed_experts_prompt_start": 2}}
    )
    raw = reply.content
    start = raw.index(SPLICE) + len(SPLICE)
    end = raw.index(b'"', start)
    payload = json.loads(raw[:start] + raw[end:])
    routes = payload["choices"][0]["routed_experts"]
    assert routes == {"data": "", "shape": [3, 2, TOP_K], "start": 2, "dtype": "uint8"}
    routes["data"] = raw[start:end]
    assert np.array_equal(envelope_array(routes), wide_rows(2, 5))


def test_skyrl_gets_its_packed_form(live: Live) -> None:
    reply = live.client.post("/skyrl/v1/generate", json={"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}})
    assert SPLICE in reply.content
    routes = reply.json()["choices"][0]["routed_experts"]
    assert set(routes) == {"data", "shape", "dtype"} and routes["dtype"] == "uint8"
    assert np.array_equal(envelope_array(routes), wide_rows(0, 3))


def test_vllms_own_form_is_the_default(npy_server: Live) -> None:
    """The request need not ask for it: proxies drop such fields.  SGLang's endpoint stays without routes."""
    [choice] = ask(npy_server, token_ids=[5, 6], sampling_params={"max_tokens": 2})["choices"]
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert rows.dtype == np.uint8 and np.array_equal(rows, wide_rows(0, 3))
    assert "routed_experts" not in npy_server.generate(input_ids=[5, 6])["meta_info"]


def test_a_server_that_records_no_routes(tmp_path: Path) -> None:
    with live_server(write_model_folder(tmp_path), captures=False) as server:
        assert ask(server, token_ids=[5], sampling_params={"max_tokens": 1})["choices"][0]["routed_experts"] is None
        status, message = server.refused("/skyrl/v1/generate", token_ids=[5], sampling_params={"max_tokens": 1})
        assert status == 400 and "--enable-return-routed-experts" in message


def test_a_stream_adds_up_to_the_plain_reply(live: Live) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "n": 2, "logprobs": 0}, "cache_salt": "slow"}
    plain = ask(live, **body)
    with live.client.stream(
        "POST", PATH, json=body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    ) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[0]["prompt_token_ids"] == [5, 6] and not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    for choice in plain["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert [e for part in parts for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == "length" and parts[-1]["routed_experts"] == choice["routed_experts"]
        assert all(part["finish_reason"] is None and part["routed_experts"] is None for part in parts[:-1])
    assert chunks[-1]["usage"] == plain["usage"] and chunks[-1]["choices"] == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "empty"),
        ({"token_ids": [300]}, "vocabulary"),
        ({"token_ids": ["5"]}, "token_ids"),
        ({"token_ids": [1] * 160}, "context"),
        ({"token_ids": [1], "features": {"mm_hashes": {"image": ["x"]}}}, "features"),
        ({"token_ids": [1], "content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"token_ids": [1], "return_sample_support": True}, "return_sample_support"),
        ({"token_ids": [1], "request_id": ""}, "request_id"),
        ({"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"token_ids": [1], "sampling_params": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": -1}}, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 2000}}, "top_logprobs_num"),
        ({"token_ids": [1], "sampling_params": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"token_ids": [1], "sampling_params": {"structured_outputs": {"x": "a"}}}, "structured_outputs"),
        ({"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": 2}}, "routed_experts"),
        ({"token_ids": [1], "sampling_params": [{}]}, "sampling_params"),
        ({"token_ids": [1], "priority": 2**63}, "priority"),
    ],
)
def test_bad_requests_are_refused_before_they_are_sent(live: Live, body: dict[str, Any], message: str) -> None:
    live.scheduler.received.clear()
    status, said = live.refused(PATH, **body)
    assert status == 400 and message in said, said
    assert live.sent(TokenizedGenerateReqInput) == []


def test_an_id_in_flight_is_refused_and_the_first_one_can_be_aborted(live: Live) -> None:
    replies: list[dict[str, Any]] = []
    first = threading.Thread(
        target=lambda: replies.append(ask(live, token_ids=[5], request_id="held", cache_salt="hold"))
    )
    first.start()
    live.wait_until(lambda: any(message.rid == "held" for message in live.sent(TokenizedGenerateReqInput)))
    assert live.refused(PATH, token_ids=[5], request_id="held")[0] in (400, 409)
    live.client.post("/abort_request", json={"rid": "held"})
    first.join(10)
    assert replies[0]["choices"][0]["finish_reason"] == "abort"
    assert replies[0]["choices"][0]["routed_experts"]["shape"] == [0, 2, TOP_K]


def test_a_refusal_of_the_scheduler_is_an_error(live: Live) -> None:
    live.scheduler.refusal = FinishReason(type="abort", message="the queue is full", status_code=503)
    try:
        assert live.refused(PATH, token_ids=[5]) == (503, "the queue is full")
    finally:
        live.scheduler.refusal = None
