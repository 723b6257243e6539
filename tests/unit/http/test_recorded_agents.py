"""Requests as command-line agents send them, by their public formats: all fields are taken, over several turns.

The answers are the stand-in's, which repeats its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    settings: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with live_server(folder, context_length=4000, **settings) as server:
        yield server


def events(live: Live, path: str, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
    """Return the data of a stream's events; each names its type."""
    with live.client.stream("POST", path, json=body, headers=headers) as reply:
        text = "".join(reply.iter_text())
    assert reply.status_code == 200 and "ignored_fields" not in text, text
    assert not [name for name in reply.headers if "ignored" in name], reply.headers
    found = []
    for frame in filter(None, text.split("\n\n")):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_the_turns_of_a_claude_like_agent(live: Live) -> None:
    """System blocks and tools with `cache_control`, thinking, a beta in the URL; then a call with its result."""
    cached = {"cache_control": {"type": "ephemeral"}}
    tools = [{"name": "Bash", "description": "run", "input_schema": SCHEMA} | cached]
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be short."} | cached]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "system": system, "tools": tools, "stream": True}
    body |= {"metadata": {"user_id": "user_1_session_2"}, "temperature": 1, "tool_choice": {"type": "auto"}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "list files"} | cached]}]
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.py"}]}
    more = [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result | {"is_error": False} | cached]},
    ]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "fine-grained-tool-streaming-2025-05-14"}
    for messages in (asked, asked + more):
        found = events(live, "/v1/messages?beta=true", body | {"messages": messages}, headers)
        types = [event["type"] for event in found]
        assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"]
        assert found[0]["message"]["usage"]["input_tokens"] > 0 and found[-2]["usage"]["output_tokens"] > 0
        counted = {"model": "tiny", "messages": messages, "system": system, "tools": tools}
        answer = live.client.post("/v1/messages/count_tokens?beta=true", json=counted, headers=headers).json()
        assert answer["input_tokens"] == found[0]["message"]["usage"]["input_tokens"]


def test_the_turns_of_a_codex_like_agent(live: Live) -> None:
    """Instructions, strict functions, nothing kept: the whole input comes again, with the items of the turn before."""
    tool = {"type": "function", "name": "shell", "description": "run", "strict": False, "parameters": SCHEMA}
    body: dict[str, Any] = {"model": "tiny", "instructions": "You are an agent.", "tools": [tool], "stream": True}
    body |= {"tool_choice": "auto", "parallel_tool_calls": False, "store": False, "max_output_tokens": 8}
    body |= {"reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    body |= {"prompt_cache_key": "conversation-1"}
    asked: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: off"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
    ]
    headers = {"session_id": "conversation-1", "originator": "codex_cli_rs"}
    first = events(live, "/v1/responses", body | {"input": asked}, headers)
    assert first[0]["type"] == "response.created"
    assert first[-1]["type"] in ("response.completed", "response.incomplete")
    call = {"type": "function_call", "name": "shell", "arguments": '{"command":"ls"}', "call_id": "call_1"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py","exit_code":0}'}
    thought = [item for item in first[-1]["response"]["output"] if item["type"] == "reasoning"]
    second = events(live, "/v1/responses", body | {"input": [*asked, *thought, call, result]}, headers)
    used = [each[-1]["response"]["usage"]["input_tokens"] for each in (first, second)]
    assert second[-1]["response"]["status"] in ("completed", "incomplete") and 0 < used[0] < used[1]


def test_a_codex_like_agent_goes_on_from_a_kept_response(live: Live) -> None:
    body: dict[str, Any] = {"model": "tiny", "instructions": "Be short.", "max_output_tokens": 8, "store": True}
    first = live.client.post("/v1/responses", json=body | {"input": "list files"}).json()
    after = {"input": [{"role": "user", "content": "more"}], "previous_response_id": first["id"]}
    second = live.client.post("/v1/responses", json=body | after)
    assert second.status_code == 200 and second.json()["previous_response_id"] == first["id"]
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
