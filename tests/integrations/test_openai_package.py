"""The `openai` package: completions and chats, streams, log-probabilities, structured output, and RL's fields."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest
from openai import OpenAI, pydantic_function_tool

from tests.integrations.forecast import ROOM, SEED, Forecast
from tests.integrations.framework import Framework
from tests.server_process import ServerProcess

FRAMEWORK = Framework(name="openai", packages=("openai",), flags={"enable_return_routed_experts": True})
PROMPT = [260, 315, 81, 377, 294]
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_completion_of_token_ids(client: OpenAI, model: str) -> None:
    reply = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=6, n=2, logprobs=1, seed=1, extra_body={"ignore_eos": True}
    )
    assert [len(choice.logprobs.token_logprobs) for choice in reply.choices] == [6, 6]
    assert reply.usage.prompt_tokens == len(PROMPT) and reply.usage.completion_tokens == 12


def test_chat_with_log_probabilities(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=4, logprobs=True, top_logprobs=2, seed=1
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens and {len(entry.top_logprobs) for entry in content} == {2}


def test_stream_is_the_answer_in_pieces(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0.0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage


def test_token_ids_and_version_of_a_chat(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_completion_tokens=4,
        extra_body={"return_meta_info": True, "return_token_ids": True},
    )
    extras = reply.choices[0].model_extra
    assert len(extras["token_ids"]) == reply.usage.completion_tokens
    assert extras["meta_info"]["weight_version"] == "default"


def test_routes_of_a_chat(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=4, extra_body={"return_routed_experts": True}
    )
    content = base64.b64decode(reply.model_extra["sglext"]["routed_experts"])
    routes = np.frombuffer(content, dtype=np.int32).reshape(-1, 4, 2)
    assert len(routes) == reply.usage.total_tokens - 1 and routes[:, 1:].any()


@pytest.fixture(scope="module")
def parsing(random_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{random_server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_a_parsed_answer_is_of_its_type(parsing: OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "response_format": Forecast, "seed": SEED}
    whole = parsing.chat.completions.parse(**asked, max_completion_tokens=ROOM).choices[0].message.parsed
    with parsing.chat.completions.stream(**asked, max_completion_tokens=ROOM) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(whole, Forecast) and streamed == whole


def test_a_parsed_response_is_of_its_type(parsing: OpenAI) -> None:
    asked = {"model": "tiny", "input": "hi", "text_format": Forecast, "extra_body": {"seed": SEED}}
    whole = parsing.responses.parse(**asked, max_output_tokens=ROOM).output_parsed
    with parsing.responses.stream(**asked, max_output_tokens=ROOM) as stream:
        streamed = stream.get_final_response().output_parsed
    assert isinstance(whole, Forecast) and streamed == whole


def test_a_forced_call_has_parsed_arguments(parsing: OpenAI) -> None:
    reply = parsing.chat.completions.parse(
        model="tiny",
        messages=MESSAGES,
        tools=[pydantic_function_tool(Forecast)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=ROOM,
        seed=SEED,
    )
    (call,) = reply.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Forecast)
