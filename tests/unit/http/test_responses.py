"""OpenAI's Responses endpoint, called by the `openai` package: items, streams, kept responses and the token record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from rollout.core.errors import NotFound
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.http.responses import store
from rollout.http.responses.items import item_messages, sealed
from rollout.http.responses.store import ResponseStore, StoredResponse
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import logprob_of
from tests.tiny_tokenizer import write_model_folder

EOS = 264
TOOLS: Any = [
    {"type": "function", "name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}, "strict": True}
]
CALL = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
FULL = f"<think>\nhm</think>ok {CALL}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(
        folder, enable_return_routed_experts=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    ) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    live.scheduler.received.clear()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=10) as made:
        yield made


def ids_of(live: Live, text: str) -> list[int]:
    tokens: list[int] = live.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def said(live: Live, answer: str, **extra: Any) -> dict[str, Any]:
    """Return the arguments of a call whose model answers `answer` and stops: the stand-in repeats its prompt."""
    return {
        "model": "tiny",
        "input": [],
        "tools": TOOLS,
        "extra_body": {"input_ids": [*ids_of(live, answer), EOS]} | extra,
    }


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_thoughts_text_and_calls_are_items(live: Live, client: openai.OpenAI) -> None:
    reply = client.responses.create(**said(live, FULL))
    thought, text, call = reply.output
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "\nhm"
    assert text.type == "message" and reply.output_text == "ok" and text.status == "completed"
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("f", {"x": 1})
    assert (reply.status, reply.object, reply.model, reply.incomplete_details) == (
        "completed",
        "response",
        "tiny",
        None,
    )
    assert reply.usage is not None and reply.usage.output_tokens == reply.usage.input_tokens == 75
    assert reply.usage.output_tokens_details.reasoning_tokens == 3
    assert reply.model_extra is not None and reply.model_extra["version_info"]["weight_version"] == "v0"
    Response.model_validate(reply.to_dict())


@pytest.mark.parametrize("answer", ["", "ok", FULL, f"<think>hm</think>{CALL}{CALL}", "<think>hm"])
def test_a_stream_says_the_same(live: Live, client: openai.OpenAI, answer: str) -> None:
    """Each piece belongs to the item that is open; the text of pieces is what the item has at its end."""
    whole = client.responses.create(**said(live, answer, return_token_record=True))
    events = [
        event.to_dict()
        for event in client.responses.create(**said(live, answer, return_token_record=True), stream=True)
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[Any] = []
    texts: dict[str, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "response.output_item.done":
            items[-1] = event["item"]
            shown = event["item"].get("arguments") or event["item"].get("content", [{}])[0].get("text")
            assert shown == texts[event["item"]["id"]]
        elif "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
            if kind.endswith(".delta"):
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    last = events[-1]["response"]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", f"response.{whole.status}")
    assert last["output"] == items and without_ids(items) == without_ids(whole.to_dict()["output"])
    assert last["usage"]["output_tokens"] == whole.to_dict()["usage"]["output_tokens"]
    assert last["token_record"]["output_token_ids"] == whole.to_dict()["token_record"]["output_token_ids"]


def test_the_record_has_the_tokens_that_the_engine_read_and_made(live: Live, client: openai.OpenAI) -> None:
    call = said(live, "ok", return_token_record=True, return_routed_experts=True)
    record = client.responses.create(**call).to_dict()["token_record"]
    assert isinstance(record, dict) and record["prompt_token_ids"] == call["extra_body"]["input_ids"]
    assert record["output_token_ids"] == record["prompt_token_ids"] and "routed_experts" in record
    assert record["output_token_logprobs"] == [logprob_of(token) for token in record["output_token_ids"]]


def test_items_become_the_messages_of_a_template() -> None:
    made = item_messages(
        [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "r"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": None},
            {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed("é")},
            {"type": "message", "role": "assistant", "content": "x"},
            {"type": "message", "role": "assistant", "content": "y"},
        ],
        [{"role": "user", "content": "before"}],
    )

    def called(*names: str) -> list[Any]:
        functions = [{"name": name[1], "arguments": "{}"} for name in names]
        return [{"id": n[0], "type": "function", "function": each} for n, each in zip(names, functions, strict=True)]

    assert made == [
        {"role": "user", "content": "before"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": called("1f", "2g")},
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "r"},
        {"role": "assistant", "content": "", "reasoning_content": "s", "tool_calls": called("3f")},
        {"role": "assistant", "content": "x", "reasoning_content": "é"},
        {"role": "assistant", "content": "y"},
    ]


def prompt_of(live: Live) -> str:
    """Return the prompt of the last request that reached the scheduler."""
    ids = list(live.sent(TokenizedGenerateReqInput)[-1].input_ids)
    text: str = live.client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": False}).json()["text"]
    return text


def test_a_response_goes_on_from_a_kept_one(live: Live, client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="a", instructions="S", max_output_tokens=3)
    second = client.responses.create(model="tiny", input="b", previous_response_id=first.id, max_output_tokens=3)
    turns = f"user\na<|im_end|>\n<|im_start|>assistant\n{first.output_text}<|im_end|>\n<|im_start|>user\nb"
    assert prompt_of(live) == f"<|im_start|>{turns}<|im_end|>\n<|im_start|>assistant\n"  # instructions are not kept
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    client.responses.delete(first.id)
    for gone in (first.id, "resp_x"):
        with pytest.raises(openai.NotFoundError, match="is kept"):
            client.responses.create(model="tiny", input="b", previous_response_id=gone)
    unkept = client.responses.create(model="tiny", input="a", store=False, max_output_tokens=3)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_thought_is_sealed_where_a_client_asks_for_that(live: Live, client: openai.OpenAI) -> None:
    reply = client.responses.create(**said(live, FULL), include=["reasoning.encrypted_content"])
    assert reply.output[0].to_dict()["encrypted_content"] == sealed("\nhm")


def test_an_answer_that_is_cut_is_incomplete(live: Live, client: openai.OpenAI) -> None:
    reply = client.responses.create(**said(live, "ok"), max_output_tokens=1)
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert (
        reply.incomplete_details.reason == "max_output_tokens" and reply.output[0].to_dict()["status"] == "incomplete"
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"input": []}, "messages is empty"),
        ({"input": [{"type": "x"}]}, "input[0] has the type x; this server takes message"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role must be user, assistant, system or developer"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content must be text or a list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is not text"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name must be text"),
        ({"input": [{"type": "reasoning", "encrypted_content": "é"}]}, "encrypted_content is not of this server"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has the type web_search; this server knows functions only"),
        ({"tools": [{"type": "function"}]}, "tools[0] must have a name"),
        ({"tool_choice": "required"}, "tool_choice forces a call, and there are no tools"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type must be"),
        ({"text": {"format": "text"}}, "text.format must be an object"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort must be text"),
        ({"truncation": "auto"}, "truncation other than disabled"),
        ({"include": ["message.output_text.logprobs"]}, "include may not name message.output_text.logprobs"),
        ({"background": True}, "background needs stream: true and store: true"),
        ({"n": 2}, "n must be 1"),
    ],
)
def test_what_cannot_be_answered_is_refused(live: Live, fields: dict[str, Any], text: str) -> None:
    status, message = live.refused("/v1/responses", **({"input": "a"} | fields))
    assert status == 400 and text in message


def test_the_store_keeps_what_was_used_last_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_RESPONSES", 3)
    monkeypatch.setattr(store, "MAX_BYTES", 100)
    kept = ResponseStore()
    for name in "abc":
        kept.put(name, StoredResponse([], name.encode(), 10))
    kept.get("a")
    kept.put("d", StoredResponse([], b"d", 10))  # one too many
    with pytest.raises(NotFound):
        kept.get("b")
    kept.put("e", StoredResponse([], b"e", 85))  # too many bytes: c and a go
    assert kept.get("e").content == b"e" and kept.get("d").content == b"d"
    kept.put("f", StoredResponse([], b"f", 101))  # more than all
    for name in "acdef":
        with pytest.raises(NotFound):
            kept.get(name)
