"""langchain's chat model of OpenAI: tools, streams, log-probabilities, structured output, Responses."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import ValidationError

from tests.http_harness import Live
from tests.integrations.forecast import ROOM, SEED, Forecast
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server
from tests.server_process import ServerProcess

FRAMEWORK = Framework(
    name="langchain-openai",
    packages=("langchain-openai", "openai"),
    flags={"tool_call_parser": "hermes"},
    shimmed=("a model that repeats the last message",),
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


def client(url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_retries=0, **more)  # type: ignore[arg-type]


def added(chunks: Iterator[Any]) -> Any:
    """Return the message that the chunks of a stream add up to."""
    return functools.reduce(operator.add, chunks)


@pytest.fixture(scope="module")
def chat(live: Live) -> ChatOpenAI:
    return client(live.url)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("parallel", "cities"), [(True, ["a", "b"]), (False, ["a"])], ids=["parallel", "one call"])
def test_bound_tools_are_called_once_or_in_parallel(
    chat: ChatOpenAI, stream: bool, parallel: bool, cities: list[str]
) -> None:
    bound = chat.bind_tools([weather], parallel_tool_calls=parallel)
    message: Any = added(bound.stream(BOTH)) if stream else bound.invoke(BOTH)
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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools_are_called_over_responses(live: Live, stream: bool) -> None:
    bound = client(live.url, use_responses_api=True).bind_tools([weather])
    message: Any = added(bound.stream(BOTH)) if stream else bound.invoke(BOTH)
    assert [each["args"] for each in message.tool_calls] == [{"city": "a"}, {"city": "b"}]
    assert message.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_is_of_its_schema(random_server: ServerProcess, method: Any, responses: bool) -> None:
    """`json_mode` promises an object of any kind, and the others the schema."""
    model = client(random_server.url, max_tokens=ROOM, use_responses_api=responses, extra_body={"seed": SEED})
    found: Any = model.with_structured_output(Forecast, method=method, include_raw=True).invoke("hi")
    if method == "json_mode":
        assert isinstance(json.loads(found["raw"].text), dict)
    else:
        assert found["parsing_error"] is None and isinstance(found["parsed"], Forecast)


def test_free_text_is_not_of_the_schema(random_server: ServerProcess) -> None:
    """Without a schema the same model writes no JSON: the steps above would see a server that leaves it out."""
    free = client(random_server.url, max_tokens=8, extra_body={"seed": SEED}).invoke("hi")
    with pytest.raises(ValidationError):
        Forecast.model_validate_json(free.text)


@pytest.mark.parametrize("choice", ["any", "Forecast"])
def test_a_call_is_forced(random_server: ServerProcess, choice: str) -> None:
    model = client(random_server.url, max_tokens=ROOM, extra_body={"seed": SEED})
    message: Any = model.bind_tools([Forecast], tool_choice=choice, parallel_tool_calls=False).invoke("hi")
    (made,) = message.tool_calls
    assert made["name"] == "Forecast" and Forecast(**made["args"])
