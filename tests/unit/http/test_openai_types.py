"""Every kind of answer of the OpenAI endpoints fits the types of the openai package, without a conversion.

Clients validate answers with these types.  An aborted sample is the exception: `abort` is no reason that OpenAI knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject

from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

EOS = 264
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ANSWER = '<think>é😀</think>ok <tool_call>{"name":"f"}</tool_call>'
EVERYTHING = {
    "return_token_ids": True,
    "return_meta_info": True,
    "return_routed_experts": True,
    "session_id": "s",
    "n": 2,
}
LOGPROBS: list[dict[str, Any]] = [{}, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "prompt_logprobs": 1}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(
        folder, enable_return_routed_experts=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    ) as server:
        yield server


def fits(kind: type[openai.BaseModel], text: str) -> Any:
    return kind.model_validate_json(text, strict=True)


def post(live: Live, path: str, body: dict[str, Any]) -> str:
    response = live.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.text


def events(live: Live, path: str, body: dict[str, Any]) -> list[str]:
    lines = post(live, path, body | {"stream": True, "stream_options": {"include_usage": True}}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [line.removeprefix("data: ") for line in lines[:-2]]


@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("logprobs", LOGPROBS, ids=["none", "top", "prompt"])
def test_chats_fit_the_openai_types(live: Live, extra: dict[str, Any], logprobs: dict[str, Any]) -> None:
    """3.1: whole chats and chunks hold reasoning, content, calls, log-probabilities, usage, versions and routes."""
    ids = live.client.post("/tokenize", json={"prompt": ANSWER}).json()["tokens"]
    body = {"input_ids": [*ids, EOS], "tools": TOOLS, "max_tokens": len(ids) + 1} | extra | logprobs
    reply = fits(ChatCompletion, post(live, "/v1/chat/completions", body))
    choice = reply.choices[-1]
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning) == ("tool_calls", "ok", "é😀")
    assert choice.message.tool_calls[0].function.name == "f" and reply.usage.completion_tokens > 0
    if "prompt_logprobs" in body:
        return  # not in a stream
    chunks = [fits(ChatCompletionChunk, event) for event in events(live, "/v1/chat/completions", body)]
    calls = [call for chunk in chunks for part in chunk.choices for call in part.delta.tool_calls or ()]
    assert len(calls) == body.get("n", 1) and chunks[-1].usage is not None


@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 0}, {"logprobs": 2}], ids=["none", "own", "top"])
def test_completions_fit_the_openai_types(live: Live, extra: dict[str, Any], logprobs: dict[str, Any]) -> None:
    body = {"prompt": ["é!", "b"], "max_tokens": 4} | extra | logprobs
    reply = fits(Completion, post(live, "/v1/completions", body))
    assert reply.usage.completion_tokens == 8 * body.get("n", 1)
    # OpenAI sends a null for a reason in chunks before the last, too.
    texts = [
        event.replace('"finish_reason":null', '"finish_reason":"stop"')
        for event in events(live, "/v1/completions", body)
    ]
    chunks = [fits(Completion, text) for text in texts]
    assert chunks[-1].usage == fits(CompletionUsage, reply.usage.model_dump_json())


def test_models_fit_the_openai_types(live: Live) -> None:
    listed = live.client.get("/v1/models").json()
    assert listed["object"] == "list" and fits(Model, json.dumps(listed["data"][0])).id == "tiny"
    assert fits(Model, live.client.get("/v1/models/tiny").text).owned_by == "lockstep"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": 5}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, 400),
        ("/v1/completions", {}, 400),
        ("/v1/nothing", {}, 404),
    ],
)
def test_errors_fit_the_openai_types(live: Live, path: str, body: dict[str, Any], status: int) -> None:
    response = live.client.post(path, json=body)
    assert response.status_code == status
    assert fits(ErrorObject, json.dumps(response.json()["error"])).message


def test_a_type_that_does_not_fit_is_noticed() -> None:
    usage = '{"prompt_tokens": 1, "completion_tokens": "2", "total_tokens": 3}'
    with pytest.raises(ValueError, match="completion_tokens"):
        fits(CompletionUsage, usage)
