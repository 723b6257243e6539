"""/generate over real HTTP and real sockets, with a stand-in for the scheduler."""

from __future__ import annotations

import base64
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from capture.codec import decode_compact
from rollout.core.messages.io_struct import AbortReqInput, TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishReason
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import logprob_of, route_rows
from tests.tiny_tokenizer import write_model_folder

META_ALWAYS = {
    "id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "num_retractions", "weight_version",
    "weight_versions", "weight_version_start", "weight_version_end", "prefill_weight_versions",
    "kv_weight_version_oldest", "kv_weight_epoch_oldest", "e2e_latency", "dp_rank",
}  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, enable_return_routed_experts=True) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(live: Live) -> Iterator[None]:
    live.scheduler.received.clear()
    yield
    live.scheduler.refusal = None
    live.scheduler.misreport = False
    live.wait_until(lambda: live.manager.num_in_flight == 0)


def events(live: Live, body: dict[str, Any], path: str = "/generate") -> list[Any]:
    with live.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_ids_in_ids_and_text_out(live: Live) -> None:
    reply = live.generate(input_ids=[65, 66, 67], rid="r1", sampling_params={"max_new_tokens": 4})
    meta = reply["meta_info"]
    assert reply["output_ids"] == [65, 66, 67, 65]
    assert reply["text"] == live.client.post("/detokenize", json={"tokens": [65, 66, 67, 65]}).json()["text"]
    assert set(meta) == META_ALWAYS
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 1)
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 4, "weight_epoch": 0}]
    assert meta["e2e_latency"] >= 0


def test_text_and_put_and_no_content_type(live: Live) -> None:
    body = b'{"text": "hello", "sampling_params": {"max_new_tokens": 2}}'
    for method in ("POST", "PUT"):
        response = live.client.request(method, "/generate", content=body)
        assert response.status_code == 200
        assert response.json()["text"] == "hellohello"


def test_unknown_fields_and_nulls_are_ignored(live: Live) -> None:
    reply = live.generate(
        input_ids=[1], no_such_field=[1], stream=None, rid=None, image_data=[], return_hidden_states=False,
        sampling_params={"max_new_tokens": 1, "no_such_param": {"x": 1}, "stop": None, "seed": 2**62},
    )  # fmt: skip
    assert reply["output_ids"] == [1]
    assert live.sent(TokenizedGenerateReqInput)[0].sampling_params.sampling_seed == 2**62


def test_logprobs_of_output_and_prompt(live: Live) -> None:
    reply = live.generate(
        input_ids=[5, 6, 7], return_logprob=True, logprob_start_len=1, top_logprobs_num=2, token_ids_logprob=[9],
        return_text_in_logprobs=True, sampling_params={"max_new_tokens": 2},
    )  # fmt: skip
    meta = reply["meta_info"]
    text = live.manager.tokenizer.decode
    assert meta["output_token_logprobs"] == [[logprob_of(5), 5, text([5])], [logprob_of(6), 6, text([6])]]
    assert meta["output_token_logprobs_length"] == 2
    assert meta["input_token_logprobs"] == [[None, 6, text([6])], [logprob_of(7), 7, text([7])]]
    assert [[entry[1] for entry in top] for top in meta["output_top_logprobs"]] == [[5, 6], [6, 7]]
    assert meta["input_top_logprobs"][0] is None
    assert [entry[1] for entry in meta["input_top_logprobs"][1]] == [7, 8]
    assert meta["output_token_ids_logprobs"] == [[[logprob_of(9), 9, text([9])]]] * 2
    assert meta["input_token_ids_logprobs"] == [None, [[logprob_of(9), 9, text([9])]]]


def test_scoring_makes_no_tokens(live: Live) -> None:
    reply = live.generate(
        input_ids=[5, 6, 7], return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}
    )
    assert reply["output_ids"] == [] and reply["text"] == ""
    assert reply["meta_info"]["output_token_logprobs"] == []
    assert [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]] == [5, 6, 7]


def test_routes_in_both_forms(live: Live) -> None:
    body = {
        "input_ids": [1, 2, 3], "return_routed_experts": True, "routed_experts_start_len": 1,
        "sampling_params": {"max_new_tokens": 3},
    }  # fmt: skip
    meta = live.generate(**body)["meta_info"]
    wide = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(4, 2, 2)  # 3 + 3 - 1 - 1 rows
    assert not wide[:, 0].any()
    assert wide[:, 1].astype(np.uint8).tobytes() == route_rows(1, 5)
    assert meta["routed_experts_start_len"] == 1
    assert "routed_experts_format" not in meta
    meta = live.generate(**body, routed_experts_format="compact")["meta_info"]
    routed = decode_compact(base64.b64decode(meta["routed_experts"]))
    assert routed.logical_ids_TLK.tobytes() == route_rows(1, 5)
    assert (routed.start, routed.moe_layer_ids, routed.weight_versions) == (1, (1,), (("v0", 0, 4),))
    assert meta["routed_experts_format"] == "compact"


def test_batch_replies_with_a_list_even_of_one(live: Live) -> None:
    assert isinstance(live.generate(input_ids=[[1]], sampling_params={"max_new_tokens": 1}), list)
    replies = live.generate(
        text=["a", "b", "hello"], rid="batch", sampling_params=[{"max_new_tokens": n} for n in (1, 2, 3)],
        return_logprob=[True, False, True],
    )  # fmt: skip
    assert [reply["text"] for reply in replies] == ["a", "bb", "hellohellohello"]
    assert [reply["meta_info"]["id"] for reply in replies] == ["batch_0", "batch_1", "batch_2"]
    assert ["output_token_logprobs" in reply["meta_info"] for reply in replies] == [True, False, True]


def test_n_samples_have_names_and_seeds_of_their_own(live: Live) -> None:
    replies = live.generate(
        input_ids=[[1], [2]], rid=["a", "b"], sampling_params={"n": 2, "max_new_tokens": 1, "sampling_seed": 7}
    )
    assert [reply["output_ids"] for reply in replies] == [[1], [1], [2], [2]]
    assert [reply["meta_info"]["id"] for reply in replies] == ["a_0", "a_1", "b_0", "b_1"]
    assert [m.sampling_params.sampling_seed for m in live.sent(TokenizedGenerateReqInput)] == [7, 8, 7, 8]


def test_stream_is_cumulative_and_ends_like_the_plain_reply(live: Live) -> None:
    body = {"text": "é!", "return_logprob": True, "sampling_params": {"max_new_tokens": 5}}
    plain = live.generate(**body)
    chunks = events(live, body | {"stream": True})
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    for earlier, later in itertools.pairwise(chunks):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert len(later["meta_info"]["output_token_logprobs"]) == len(later["output_ids"])
    last = chunks[-1]
    same = ("text", "output_ids")
    assert [last[key] for key in same] == [plain[key] for key in same]
    volatile = {"id", "e2e_latency"}
    assert {k: v for k, v in last["meta_info"].items() if k not in volatile} == {
        k: v for k, v in plain["meta_info"].items() if k not in volatile
    }
    assert not any("\ufffd" in chunk["text"] for chunk in chunks[:-1])


def test_batch_stream_says_which_sample_it_is(live: Live) -> None:
    chunks = events(live, {"text": ["a", "b"], "stream": True, "sampling_params": {"n": 2, "max_new_tokens": 3}})
    finals = {c["index"]: c["text"] for c in chunks if c["meta_info"]["finish_reason"]}
    assert finals == {0: "aaa", 1: "aaa", 2: "bbb", 3: "bbb"}
    assert sum(bool(c["meta_info"]["finish_reason"]) for c in chunks) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "abc"), (True, "abcEND")])
def test_a_stop_string_ends_the_text(live: Live, stream: bool, no_stop_trim: bool, text: str) -> None:
    params = {"stop": "END", "no_stop_trim": no_stop_trim, "max_new_tokens": 20}
    body = {"text": "abcENDx", "sampling_params": params}
    if stream:
        chunks = events(live, body | {"stream": True})
        assert all(text.startswith(chunk["text"]) for chunk in chunks)
        reply = chunks[-1]
    else:
        reply = live.generate(**body)
    assert reply["text"] == text
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
    ids = live.client.post("/tokenize", json={"prompt": "abcEND"}).json()["tokens"]
    assert reply["output_ids"] == ids


def test_end_token_is_in_the_ids_but_not_in_the_text(live: Live) -> None:
    reply = live.generate(input_ids=[65, 264, 66], sampling_params={"max_new_tokens": 9})
    assert reply["output_ids"] == [65, 264]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 264}
    shown = live.generate(
        input_ids=[65, 264, 66],
        sampling_params={"max_new_tokens": 9, "no_stop_trim": True, "skip_special_tokens": False},
    )
    assert shown["text"] == reply["text"] + "<|im_end|>"


def post_in_background(live: Live, body: dict[str, Any]) -> Any:
    box: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: box.append(live.client.post("/generate", json=body)))
    thread.start()
    return thread, box


@pytest.mark.parametrize(
    ("abort", "aborted"),
    [
        ({"rid": "g"}, {"g_0_0", "g_0_1", "g_1_0", "g_1_1"}),
        ({"rid": "g_1"}, {"g_1_0", "g_1_1"}),
        ({"rid": "g_0_1"}, {"g_0_1"}),
        ({"rid": ["g_0_0", "g_1_1"]}, {"g_0_0", "g_1_1"}),
        ({"abort_all": True}, {"g_0_0", "g_0_1", "g_1_0", "g_1_1"}),
    ],
)
def test_abort_by_exact_name(live: Live, abort: dict[str, Any], aborted: set[str]) -> None:
    body = {"text": ["a", "b"], "rid": "g", "extra_key": "hold", "sampling_params": {"n": 2}}
    thread, box = post_in_background(live, body)
    live.wait_until(lambda: len(live.sent(TokenizedGenerateReqInput)) == 4)
    for nothing in ("", "g_", "g_0_", "unknown"):
        response = live.client.post("/abort_request", json={"rid": nothing})
        assert (response.status_code, response.content) == (200, b"")
    assert live.manager.num_in_flight == 4
    assert live.client.post("/abort_request", json=abort).status_code == 200
    live.wait_until(lambda: live.manager.num_in_flight == 4 - len(aborted))
    live.client.post("/abort_request", json={"rid": "g"})
    thread.join()
    replies = box[0].json()
    assert box[0].status_code == 200
    for reply in replies:
        meta = reply["meta_info"]
        assert set(meta) >= META_ALWAYS
        assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None}
    reached = {rid for message in live.sent(AbortReqInput)[:1] for rid in message.rids}
    assert reached == (set() if "abort_all" in abort else aborted)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_aborts_its_request(live: Live, stream: bool) -> None:
    body = {"input_ids": [1], "rid": "gone", "extra_key": "slow" if stream else "hold", "stream": stream}
    body["sampling_params"] = {"max_new_tokens": 60}
    with httpx.Client(base_url=live.url) as client:
        if stream:
            with client.stream("POST", "/generate", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/generate", json=body, timeout=0.3)
    live.wait_until(lambda: bool(live.sent(AbortReqInput)))
    assert live.sent(AbortReqInput)[0].rids == ["gone"]
    live.wait_until(lambda: live.manager.num_in_flight == 0)


def test_a_refusal_of_the_scheduler_is_a_status_or_a_last_chunk(live: Live) -> None:
    live.scheduler.refusal = FinishReason(type="abort", message="queue is full", status_code=503)
    assert live.refused(input_ids=[1]) == (503, "queue is full")
    [chunk] = events(live, {"input_ids": [1], "stream": True})
    assert chunk["meta_info"]["finish_reason"]["status_code"] == 503


def test_a_lost_message_is_an_error_and_not_a_short_answer(live: Live) -> None:
    live.scheduler.misreport = True
    status, message = live.refused(input_ids=[1], sampling_params={"max_new_tokens": 2})
    assert status == 500 and "arrived" in message
    [error] = events(live, {"input_ids": [1], "stream": True})
    assert error["error"]["code"] == 500 and error["error"]["retryable"] is False


def test_duplicate_rid_is_refused_and_free_again_afterwards(live: Live) -> None:
    thread, box = post_in_background(live, {"input_ids": [1], "rid": "dup", "extra_key": "hold"})
    live.wait_until(lambda: len(live.sent(TokenizedGenerateReqInput)) == 1)
    assert live.refused(input_ids=[1], rid="dup") == (400, "rid 'dup' is already in flight")
    assert live.refused(input_ids=[[1], [2]], rid=["x", "dup"])[0] == 400
    assert live.generate(input_ids=[1], rid="x", sampling_params={"max_new_tokens": 1})["output_ids"] == [1]
    live.client.post("/abort_request", json={"rid": "dup"})
    thread.join()
    assert box[0].status_code == 200
    live.generate(input_ids=[1], rid="dup", sampling_params={"max_new_tokens": 1})


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "Either text, input_ids or input_embeds should be provided."),
    ({"text": ""}, "empty"),
    ({"text": []}, "empty list"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[1], []]}, "empty"),
    ({"text": "a", "input_ids": [1]}, "not both"),
    ({"text": 5}, "text"),
    ({"text": ["a", 5]}, "text"),
    ({"text": "\ud800"}, "JSON"),
    ({"input_ids": "abc"}, "input_ids"),
    ({"input_ids": [1, "2"]}, "input_ids"),
    ({"input_ids": [1, 2.0]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [[1], 2]}, "input_ids"),
    ({"input_ids": [300]}, "outside the vocabulary"),
    ({"input_ids": [-1]}, "outside the vocabulary"),
    ({"input_ids": [10**30]}, ""),
    ({"input_ids": [1] * 160}, "longer than the model's context length"),
    ({"input_ids": [1] * 40}, "Requested token count exceeds the model's maximum context length"),
    ({"rid": 5, "input_ids": [1]}, "rid"),
    ({"rid": "", "input_ids": [1]}, "rid"),
    ({"rid": ["a", "a"], "input_ids": [[1], [2]]}, "twice"),
    ({"rid": ["a"], "input_ids": [[1], [2]]}, "1 entries for 2 prompts"),
    ({"rid": ["a", "a_0"], "input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {}]}, "two samples"),
    ({"rid": ["a", "a_0"], "input_ids": [[1], [2]], "sampling_params": {"n": 2}}, "group"),
    ({"input_ids": [1], "sampling_params": []}, "sampling_params is a list"),
    ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
    ({"input_ids": [1], "return_logprob": [True]}, "return_logprob is a list"),
    ({"input_ids": [[1], [2]], "return_logprob": [True]}, "1 entries for 2 prompts"),
    ({"input_ids": [1], "return_logprob": "perhaps"}, "return_logprob"),
    ({"input_ids": [1], "logprob_start_len": 2}, "logprob_start_len"),
    ({"input_ids": [1], "logprob_start_len": -2}, "logprob_start_len"),
    ({"input_ids": [1], "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"input_ids": [1], "top_logprobs_num": 5000}, "top_logprobs_num"),
    ({"input_ids": [1], "token_ids_logprob": [999]}, "token_ids_logprob"),
    ({"input_ids": [1], "token_ids_logprob": "x"}, "token_ids_logprob"),
    ({"input_ids": [1], "return_routed_experts": True, "routed_experts_start_len": 2}, "routed_experts_start_len"),
    ({"input_ids": [1], "return_routed_experts": True, "routed_experts_start_len": -1}, "routed_experts_start_len"),
    ({"input_ids": [1], "routed_experts_format": "zip"}, "routed_experts_format"),
    ({"input_ids": [1], "image_data": ["x"]}, "image_data is not supported"),
    ({"input_ids": [1], "lora_path": "x"}, "lora_path is not supported"),
    ({"input_ids": [1], "sampling_params": {"regex": 3}}, "regex must be a text"),
    (
        {"input_ids": [1], "sampling_params": {"custom_params": {"return_top_p_token_ids": True, "x": 1}}},
        "custom_params is not supported",
    ),
    ({"input_ids": [1], "sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "there is no mask"),
    ({"input_ids": [1], "return_sampling_mask": True}, "there is no mask"),
    ({"input_ids": [1], "return_sampling_mask": [True]}, "return_sampling_mask is a list"),
    ({"input_ids": [1], "return_sampling_mask": "some"}, "return_sampling_mask"),
    ({"input_ids": [1], "sampling_logprobs_mode": "support"}, "sampling_logprobs_mode needs return_sampling_mask"),
    ({"input_ids": [1], "return_sampling_mask": True, "sampling_logprobs_mode": "all"}, "sampling_logprobs_mode"),
    (
        {"input_ids": [1], "return_sampling_mask": True, "sampling_mask_format": "slime"},
        "sampling_mask_format",
    ),
    ({"input_ids": [1], "sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs is vLLM's"),
    ({"input_ids": [1], "return_sample_support": True}, "return_sample_support is not supported"),
    ({"input_ids": [1], "bootstrap_room": 7}, "bootstrap_room is not supported"),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 10**9}, "maximum context length"),
    ({"max_new_tokens": 10**40}, ""),
    ({"max_new_tokens": "many"}, "max_new_tokens"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 10**15}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n must be"),
    ({"n": -1}, "n must be"),
    ({"n": 10_000}, "n must be"),
    ({"stop": [""]}, "stop string"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["x"] * 33}, "stop strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"sampling_seed": 2**63}, "sampling_seed"),
]


@pytest.mark.parametrize(
    ("body", "message"),
    BAD_REQUESTS + [({"input_ids": [1, 2], "sampling_params": params}, text) for params, text in BAD_SAMPLING],
    ids=lambda value: repr(value)[:60],
)
def test_bad_input_is_refused_and_changes_nothing(live: Live, body: dict[str, Any], message: str) -> None:
    content = json.dumps(body)
    for stream in (False, True):
        sent = content if not stream else json.dumps(body | {"stream": True})
        response = live.client.post("/generate", content=sent, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
    assert live.sent(TokenizedGenerateReqInput) == []
    assert live.manager.num_in_flight == 0 and live.manager._rids.leaves() == []


@pytest.mark.parametrize("content", [b"{", b"[]", b'"x"', b"\xff", b"{" * 100_000, b'{"input_ids": [NaN]}'])
def test_a_body_that_is_no_json_object_is_400(live: Live, content: bytes) -> None:
    response = live.client.post("/generate", content=content)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"type", "message"}


def test_bodies_beyond_the_caps_are_413(live: Live) -> None:
    assert live.refused(input_ids=[[1]] * 5000)[0] == 413
    assert live.refused(input_ids=[[1]] * 100, sampling_params={"n": 100})[0] == 413
    assert live.refused("/tokenize", prompt=[""] * 5000)[0] == 413
    assert live.refused("/detokenize", tokens=[[]] * 5000)[0] == 413
    assert live.refused("/detokenize", tokens=[1] * ((1 << 20) + 1))[0] == 413
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(live.url).port), timeout=5) as connection:
        connection.sendall(head)
        assert b" 413 " in connection.recv(4096)


def test_long_text_is_tokenised_off_the_loop_with_the_same_result(live: Live) -> None:
    long = "hello " * 2000
    tokens = live.client.post("/tokenize", json={"prompt": long}).json()["tokens"]
    assert tokens == live.client.post("/tokenize", json={"prompt": "hello "}).json()["tokens"] * 2000
    status, message = live.refused(text=long)
    assert status == 400 and "context length" in message


def test_detokenize_returns_the_text_that_was_tokenized(live: Live) -> None:
    reply = live.client.post("/v1/tokenize", json={"prompt": ["hello", "a é"]}).json()
    assert reply["count"] == [1, 4] and reply["max_model_len"] == 160
    texts = live.client.post("/v1/detokenize", json={"tokens": reply["tokens"]}).json()["text"]
    assert texts == ["hello", "a é"]
    chat = live.client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()["tokens"]
    shown = live.client.post("/detokenize", json={"tokens": chat, "skip_special_tokens": False}).json()["text"]
    assert shown == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert live.refused("/tokenize")[0] == 400
    assert live.refused("/detokenize", tokens=[300])[0] == 400


def test_vllms_names_of_sampling_parameters_are_understood(live: Live) -> None:
    live.scheduler.received.clear()
    names = {"max_tokens": 3, "min_tokens": 2, "seed": 5, "include_stop_str_in_output": True}
    assert len(live.generate(input_ids=[1, 2], sampling_params=names)["output_ids"]) == 3
    got = live.sent(TokenizedGenerateReqInput)[0].sampling_params
    assert (got.max_new_tokens, got.min_new_tokens, got.sampling_seed, got.no_stop_trim) == (3, 2, 5, True)


def test_a_higher_priority_is_a_lower_number_inside(live: Live) -> None:
    """In SGLang a higher priority goes first; in the scheduler, as in vLLM, a lower one."""
    live.scheduler.received.clear()
    live.generate(input_ids=[1], priority=7, sampling_params={"max_new_tokens": 1})
    assert live.sent(TokenizedGenerateReqInput)[0].priority == -7
