"""Anthropic's Messages endpoint: conversations of agents as prompts, blocks as answers, and the token record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import BadRequest
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.http.anthropic.blocks import MessageBlocks
from rollout.http.anthropic.protocol import MessagesRequest
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import logprob_of
from tests.tiny_tokenizer import write_model_folder

EOS = 264
TOOLS = [{"name": "f", "description": "d", "input_schema": {"properties": {"x": {"type": "integer"}}}}]
CALL = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(
        folder, enable_return_routed_experts=True, tool_call_parser="hermes", reasoning_parser="qwen3", api_key="key"
    ) as server:
        server.client.headers["x-api-key"] = "key"
        yield server


def ids_of(live: Live, text: str) -> list[int]:
    tokens: list[int] = live.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def said(live: Live, answer: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a request whose model answers `answer` and stops: the stand-in repeats its prompt."""
    return {"max_tokens": 80, "messages": [], "input_ids": [*ids_of(live, answer), EOS], "tools": TOOLS} | fields


def message(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    reply = live.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def events(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream; each has the name of its type, and no `[DONE]` follows."""
    with live.client.stream("POST", "/v1/messages", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        frames = [frame for frame in "".join(reply.iter_text()).split("\n\n") if frame]
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def folded(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of the events."""
    made: dict[str, Any] = {}
    texts: dict[int, str] = {}
    is_open = False
    for event in stream:
        kind = event["type"]
        if kind == "message_start":
            made = event["message"]
        elif kind == "content_block_start":
            assert not is_open and event["index"] == len(made["content"])
            made["content"].append(event["content_block"])
            is_open = True
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(made["content"]) - 1
            (piece,) = [value for name, value in event["delta"].items() if name != "type"]
            texts[event["index"]] = texts.get(event["index"], "") + piece
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
        elif kind == "message_delta":
            made |= event["delta"] | {name: value for name, value in event.items() if name not in ("type", "delta")}
    assert not is_open and stream[-1] == {"type": "message_stop"}
    for index, text in texts.items():
        block = made["content"][index]
        block[{"tool_use": "input"}.get(block["type"], block["type"])] = (
            json.loads(text) if block["type"] == "tool_use" else text
        )
    return made


def test_thoughts_text_and_calls_are_blocks(live: Live) -> None:
    answer = message(live, said(live, f"<think>\nhm</think>ok {CALL}", model="tiny"))
    thought, text, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "\nhm", "signature": ""} and text == {
        "type": "text",
        "text": "ok",
    }
    assert call.pop("id").startswith("call_") and call == {"type": "tool_use", "name": "f", "input": {"x": 1}}
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None) and answer["id"].startswith("msg_")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == usage["output_tokens"] == 75
    assert answer["version_info"]["weight_version"] == "v0" and "token_record" not in answer


def test_text_after_a_call_is_a_block_of_a_stream(live: Live) -> None:
    body = said(live, f"b{CALL}c")
    assert [block["type"] for block in folded(events(live, body))["content"]] == ["text", "tool_use", "text"]
    assert [block.get("text") for block in message(live, body)["content"]] == ["bc", None]


@pytest.mark.parametrize("answer", ["", "ok", f"<think>hm</think>{CALL}", f"<think>a</think>b{CALL}", CALL + CALL])
def test_a_stream_says_the_same(live: Live, answer: str) -> None:
    body = said(live, answer, return_token_record=True, rid="one")
    whole, made = message(live, body), folded(events(live, body))
    for each in (whole, made):
        for block in each["content"]:
            block.pop("id", None)
        each["usage"].pop("cache_read_input_tokens"), each["usage"].pop("input_tokens")
        assert each["token_record"].pop("finish_reason")
    assert made == whole


def test_the_record_has_the_tokens_that_the_engine_read_and_made(live: Live) -> None:
    body = said(live, "ok", return_token_record=True, return_routed_experts=True)
    record = message(live, body)["token_record"]
    assert record["prompt_token_ids"] == body["input_ids"] == record["output_token_ids"]
    assert record["output_token_logprobs"] == [logprob_of(token) for token in record["output_token_ids"]]
    assert record["weight_versions"] == [{"version": "v0", "start": 0, "end": 3, "weight_epoch": 0}]
    assert record["finish_reason"] == {"type": "stop", "matched": EOS} and "routed_experts" in record


def test_a_conversation_becomes_the_messages_of_a_template() -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
            {"type": "tool_result", "tool_use_id": "2", "is_error": True},
            {"type": "text", "text": "c"}, {"type": "text", "text": "d"},
        ]},
        {"role": "assistant", "content": "begun"},
    ]  # fmt: skip
    body = MessagesRequest(max_tokens=1, messages=turns, system=[{"type": "text", "text": "S"}], tools=TOOLS)
    chat = body.chat()
    assert chat.template_messages() == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
        ]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "begun"},
    ]  # fmt: skip
    assert chat.continue_final_message and not chat.add_generation_prompt and chat.begun_answer() == "begun"
    function = {"name": "f", "description": "d", "parameters": TOOLS[0]["input_schema"]}
    assert chat.template_tools() == [{"type": "function", "function": function}]


def test_settings_reach_the_sampler_and_the_template(live: Live) -> None:
    live.scheduler.received.clear()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["END"], "seed": 3, "session_id": "s"}
    message(live, said(live, "ok", metadata={"user_id": "u"}, service_tier="auto", **fields))
    sent = live.sent(TokenizedGenerateReqInput)[0]
    params = sent.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.sampling_seed) == (0.5, 0.9, 7, 3)
    assert list(params.stop) == ["END"] and sent.session_id == "s"
    request = MessagesRequest(max_tokens=1, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 99})
    assert request.chat().template_variables() == {"enable_thinking": True, "thinking": True}
    request = MessagesRequest(max_tokens=1, messages=HELLO, output_config={"effort": "low"})
    assert request.chat().template_variables()["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("answer", "fields", "stop"),
    [
        ("ok", {}, ("end_turn", None)),
        ("okENDx", {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        ("ok", {"max_tokens": 1}, ("max_tokens", None)),
        ("ok", {"max_tokens": 32_000, "ignore_eos": True}, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_of_an_end(live: Live, answer: str, fields: dict[str, Any], stop: tuple[str, str | None]) -> None:
    made = message(live, said(live, answer, **fields))
    assert (made["stop_reason"], made["stop_sequence"]) == stop


def test_tokens_are_counted_as_the_prompt_has_them(live: Live) -> None:
    body = {"messages": HELLO, "system": "you", "tools": TOOLS}
    (counted,) = live.client.post("/v1/messages/count_tokens", json=body).json().values()
    usage = message(live, body | {"max_tokens": 1})["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role must be user"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content must be text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\] has the type image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be text"),
        ({"system": [3]}, "system must be text or a list of blocks"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\] has the type bash_20250124"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] must have a name and an input_schema"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type must be"),
        ({"thinking": {"type": "x"}}, "thinking.type must be"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "response_format.schema must be an object"),
        ({"output_config": {"effort": 3}}, "output_config.effort must be text"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"n": 2}, "n must be 1"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_anthropics_form(live: Live, fields: dict[str, Any], text: str) -> None:
    reply = live.client.post("/v1/messages", json={"max_tokens": 4, "messages": HELLO} | fields)
    content = reply.json()
    assert (reply.status_code, content["type"], content["error"]["type"]) == (400, "error", "invalid_request_error")
    with pytest.raises(BadRequest, match=text):
        raise BadRequest(content["error"]["message"])


def test_a_key_comes_in_either_header(live: Live) -> None:
    body = {"max_tokens": 1, "messages": HELLO}
    for headers, status in (({"x-api-key": "wrong"}, 401), ({"Authorization": "Bearer key", "x-api-key": ""}, 200)):
        assert live.client.post("/v1/messages", json=body, headers=headers).status_code == status
    headers = {"Authorization": "Bearer wrong"}  # which counts, where both come
    assert live.client.post("/v1/messages", json=body, headers=headers).status_code == 401


@pytest.mark.mutant
def test_blocks_that_stay_open_are_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageBlocks, "_close", lambda self: iter(()))
    with pytest.raises(AssertionError):
        folded(events(live, said(live, f"<think>hm</think>ok{CALL}")))
