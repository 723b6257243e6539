"""Fields of bodies that hold any JSON: how deep and how large they may be, before templates and parsers see them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.http.openai import messages as openai_messages
from rollout.http.protocol import MAX_DEPTH, MAX_MESSAGES, MAX_VALUES
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

MESSAGES = [{"role": "user", "content": "a"}]
CHAT = "/v1/chat/completions"
FEW_S = 5.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    with live_server(folder, max_request_mb=64, tool_call_parser="gpt-oss", reasoning_parser="gpt-oss") as server:
        yield server


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def places(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return a path and a body with `value` for each field that holds any JSON."""
    chat = {"messages": MESSAGES, "max_tokens": 1}
    return [
        (CHAT, chat | {"tools": [{"type": "function", "function": {"name": "f", "parameters": value}}]}),
        (CHAT, chat | {"chat_template_kwargs": {"a": value}}),
        (CHAT, chat | {"response_format": {"type": "text", "a": value}}),
        (CHAT, chat | {"tool_choice": {"a": value}}),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"a": value}]}),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"a": value}}),
        ("/inference/v1/generate", {"token_ids": [1], "kv_transfer_params": {"a": value}}),
    ]


@pytest.mark.parametrize("index", range(7))
def test_depth_is_bounded_in_every_field_c3(live: Live, index: int) -> None:
    """A template that indents a value adds four spaces a level to each line."""
    path, body = places(nested(MAX_DEPTH + 5))[index]
    status, message = live.refused(path, **body)
    assert status == 400 and "nested more than" in message
    path, body = places(nested(20))[index]
    assert live.client.post(path, json=body).status_code in (200, 400)
    assert "nested" not in live.client.post(path, json=body).text


@pytest.mark.parametrize("index", range(7))
def test_the_number_of_values_is_bounded_in_every_field_c3(live: Live, index: int) -> None:
    path, body = places([0] * MAX_VALUES)[index]
    status, message = live.refused(path, **body)
    assert status == 413 and "values" in message


def test_messages_are_bounded_c3(live: Live) -> None:
    deep = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested(MAX_DEPTH + 5)}}]}]
    many = [{"role": "user"}] * (MAX_MESSAGES + 1)
    for path in (CHAT, "/tokenize"):
        assert live.refused(path, messages=deep)[0] == 400
        assert live.refused(path, messages=many)[0] == 413


def test_what_a_chat_declares_is_looked_up_once_for_all_its_samples_c3(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 sets of the names of 10,000 tools are half a gigabyte."""
    asked: list[int] = []
    names_of = openai_messages.names_of
    monkeypatch.setattr(openai_messages, "names_of", lambda tools: asked.append(len(tools)) or names_of(tools))
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]
    body = {"messages": MESSAGES, "input_ids": [5, 6], "tools": tools, "n": 20, "max_tokens": 1}
    reply = live.client.post(CHAT, json=body)
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 20 and asked == [10_000]


def test_echoed_prompts_are_bounded_and_decoded_once_c3(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = live.manager.tokenizer
    decoded: list[int] = []
    decode_each = tokenizer.decode_each

    async def counting(batch: Any, **options: Any) -> list[str]:
        decoded.append(len(batch))
        return await decode_each(batch, **options)

    monkeypatch.setattr(tokenizer, "decode_each", counting)
    body = {"prompt": [[5, 6], [7, 8]], "n": 3, "max_tokens": 1, "echo": True}
    choices = live.client.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 6 and len({choice["text"][:2] for choice in choices}) == 2 and decoded == [2]
    monkeypatch.setattr(tokenizer, "decode_each", lambda batch, **_: _long(batch))
    started = time.monotonic()
    status, message = live.refused("/v1/completions", **body | {"n": 100})
    assert status == 413 and "echoed prompts" in message and "--max-request-mb" in message
    assert time.monotonic() - started < FEW_S
    live.wait_until(lambda: live.manager.num_in_flight == 0)


async def _long(batch: Any) -> list[str]:
    return ["x" * 100_000 for _ in batch]
