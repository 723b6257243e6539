"""Answers of /generate in msgpack: the values of the JSON answers, read by the client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client import RolloutClient
from rollout.client.binary import MEDIA_TYPE, parse_binary
from rollout.client.errors import ResponseFormatError
from rollout.client.generation import generate_body, parse_answer
from rollout.client.types import GenerationOutput
from rollout.http.native.generate import accepts_binary
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

GROWS = ("e2e_latency", "id")
ALL = {
    "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [5, 7],
    "return_routed_experts": True, "return_prompt_token_ids": True,
}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-probabilities": {"return_logprob": True},
    "everything": ALL,
    "from the middle": ALL | {"logprob_start_len": 2, "routed_experts_start_len": 1},
    "compact": ALL | {"extra_body": {"logprobs_format": "compact"}},
    "with text": ALL | {"return_text_in_logprobs": True},
    "samples": ALL | {"sampling_params": {"max_new_tokens": 4, "n": 3}},
    "a batch": ALL | {"input_ids": [[65, 66, 67], [70, 71, 72, 73]]},
    "scored": ALL | {"sampling_params": {"max_new_tokens": 0}},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, enable_return_routed_experts=True) as server:
        yield server


def outputs(answer: Any) -> list[dict[str, Any]]:
    """Return the values of outputs without the ones that differ between any two requests."""
    found = []
    for output in answer if isinstance(answer, list) else [answer]:
        assert isinstance(output, GenerationOutput)
        meta = {name: value for name, value in output.meta_info.items() if name not in GROWS}
        meta = {name: value for name, value in meta.items() if not name.endswith(("_logprobs", "routed_experts"))}
        meta.pop("routed_experts_format", None)
        values = {each.name: getattr(output, each.name) for each in dataclasses.fields(output)}
        arrays = {name: values.pop(name) for name in ("logprob_arrays", "prompt_logprob_arrays")}
        encoded = {name: value if value is None else value.encode() for name, value in arrays.items()}
        found.append(values | encoded | {"meta_info": meta, "rid": None})
    return found


def body_of(options: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {"input_ids": [65, 66, 67], "sampling_params": {"max_new_tokens": 5}}
    return generate_body(None, given | options)  # type: ignore[arg-type]


def ask(live: Live, body: dict[str, Any], accept: str) -> Any:
    response = live.client.post("/generate", json=body, headers={"accept": accept})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == (MEDIA_TYPE if MEDIA_TYPE in accept else "application/json")
    return response.content


@pytest.mark.parametrize("options", REQUESTS.values(), ids=REQUESTS.keys())
def test_both_answers_have_the_same_values(live: Live, options: dict[str, Any]) -> None:
    body = body_of(options)
    plain = parse_answer(json.loads(ask(live, body, "application/json")), body, None)
    binary = parse_answer(parse_binary(ask(live, body, f"application/json;q=0.5, {MEDIA_TYPE}")), body, None)
    assert outputs(binary) == outputs(plain)


@pytest.mark.parametrize(
    "accept, wanted",
    [
        ("", False), ("*/*", False), ("application/json", False), (MEDIA_TYPE, True), (MEDIA_TYPE.upper(), True),
        (f"{MEDIA_TYPE}, application/json", True), (f"application/json;q=0.5,{MEDIA_TYPE} ; q=0.5", True),
        (f"application/json, {MEDIA_TYPE};q=0.9", False), (f"{MEDIA_TYPE};q=0", False),
        (f"{MEDIA_TYPE};q=0.000, */*", False), (f"{MEDIA_TYPE};q=nan", False), (f"{MEDIA_TYPE}-other", False),
        (f"{MEDIA_TYPE};v=1;q=0.2, text/html", True),
    ],
)  # fmt: skip
def test_msgpack_is_for_requests_that_accept_it_no_less_than_json(accept: str, wanted: bool) -> None:
    assert accepts_binary(accept) is wanted


def test_the_values_are_exact(live: Live) -> None:
    content = msgspec.msgpack.decode(ask(live, body_of(ALL), MEDIA_TYPE))
    meta = content["meta_info"]
    assert content["output_ids"]["dtype"] == "int32" and content["output_ids"]["shape"] == [5]
    logprobs = meta["output_token_logprobs"]
    assert logprobs["dtype"] == "float32" and len(logprobs["data"]) == 20
    assert np.frombuffer(logprobs["data"], "<f4").tolist() == [-(token % 7 + 1) / 8 for token in (65, 66, 67, 65, 66)]
    assert meta["routed_experts"]["shape"] == [7, 1, 2] and len(meta["routed_experts"]["data"]) == 14


def test_the_client_asks_for_it_and_streams_json(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(
        "rollout.client.generation.parse_binary", lambda body: (read.append(body), parse_binary(body))[1]
    )
    with RolloutClient(live.url) as client:
        options: Any = {"input_ids": [65, 66, 67], "sampling_params": {"max_new_tokens": 5}, **ALL}
        whole = client.generate(None, **options)
        assert len(read) == 1
        *_, last = client.stream(None, **options)
        assert len(read) == 1
    assert outputs(whole) == outputs(last)


def test_errors_and_streams_are_json(live: Live) -> None:
    headers = {"accept": MEDIA_TYPE}
    refused = live.client.post("/generate", json={"input_ids": []}, headers=headers)
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "input_ids is empty"
    body = {"input_ids": [65], "stream": True, "sampling_params": {"max_new_tokens": 2}}
    streamed = live.client.post("/generate", json=body, headers=headers)
    assert streamed.headers["content-type"].startswith("text/event-stream") and b'"output_ids":[65' in streamed.content


Change = Callable[[dict[str, Any]], Any]
CHANGES: dict[str, Change] = {
    "a byte less": lambda content: content["output_ids"].update(data=content["output_ids"]["data"][:-1]),
    "another shape": lambda content: content["output_ids"].update(shape=[4]),
    "an unknown dtype": lambda content: content["output_ids"].update(dtype="object"),
    "no array": lambda content: content.update(output_ids=3),
    "fewer values": lambda content: content["meta_info"]["output_token_logprobs"].update(shape=[4], data=bytes(16)),
    "no ids": lambda content: content["meta_info"].pop("input_token_ids"),
    "an expert twice": lambda content: content["meta_info"]["routed_experts"].update(data=bytes(14)),
    "no meta_info": lambda content: content.pop("meta_info"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_answer_that_contradicts_itself_is_an_error(live: Live, change: Change) -> None:
    body = body_of(ALL)
    content = msgspec.msgpack.decode(ask(live, body, MEDIA_TYPE))
    change(content)
    with pytest.raises(ResponseFormatError):
        parse_answer(parse_binary(msgspec.msgpack.encode(content)), body, None)


def test_the_comparison_finds_another_value(live: Live) -> None:
    body = body_of(ALL)
    data = ask(live, body, MEDIA_TYPE)
    content = msgspec.msgpack.decode(data)
    values = np.frombuffer(content["meta_info"]["output_token_logprobs"]["data"], "<f4") + np.float32(2**-20)
    content["meta_info"]["output_token_logprobs"]["data"] = values.tobytes()
    changed = parse_answer(parse_binary(msgspec.msgpack.encode(content)), body, None)
    assert outputs(changed) != outputs(parse_answer(parse_binary(data), body, None))
