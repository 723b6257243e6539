"""langchain's chat model of OpenAI: tools, streams, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.http_harness import Live
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server

FRAMEWORK = Framework(
    name="langchain-openai",
    packages=("langchain-openai", "openai"),
    flags={"tool_call_parser": "hermes"},
    shimmed=("a model that repeats the last message",),
    not_there=("with_structured_output (response_format, tool_choice)", "the Responses API"),
)
BOTH = call("weather", '{"city":"a"}') + call("weather", '{"city":"b"}')


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"fine in {city}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with repeating_server(tmp_path_factory.mktemp("langchain") / "model", tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def chat(live: Live) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{live.url}/v1", api_key="none", model="tiny", max_retries=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("parallel", "cities"), [(True, ["a", "b"]), (False, ["a"])], ids=["parallel", "one call"])
def test_bound_tools_are_called_once_or_in_parallel(
    chat: ChatOpenAI, stream: bool, parallel: bool, cities: list[str]
) -> None:
    bound = chat.bind_tools([weather], parallel_tool_calls=parallel)
    if stream:
        chunks = list(bound.stream(BOTH))
        message: Any = chunks[0]
        for chunk in chunks[1:]:
            message = message + chunk
    else:
        message = bound.invoke(BOTH)
    assert [(each["name"], each["args"]["city"]) for each in message.tool_calls] == [
        ("weather", city) for city in cities
    ]


def test_a_turn_with_its_result(chat: ChatOpenAI) -> None:
    first = chat.bind_tools([weather]).invoke(BOTH)
    assert isinstance(first, AIMessage)
    results = [ToolMessage(weather.invoke(each["args"]), tool_call_id=each["id"]) for each in first.tool_calls]
    assert chat.bind_tools([weather]).invoke([HumanMessage(BOTH), first, *results]).content == "fine in b"


def test_log_probabilities_and_usage(chat: ChatOpenAI) -> None:
    message = chat.bind(logprobs=True, top_logprobs=2).invoke("aé😀")
    entries = message.response_metadata["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode().startswith("aé😀")
    assert isinstance(message, AIMessage) and message.usage_metadata["output_tokens"] == len(entries)


def test_completions_come_whole_and_in_a_stream(live: Live) -> None:
    model = OpenAI(base_url=f"{live.url}/v1", api_key="none", model="tiny", max_tokens=3, max_retries=0)  # type: ignore[arg-type]
    assert model.invoke("ab") == "aba" and "".join(model.stream("ab")) == "aba"
