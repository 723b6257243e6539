"""The Agents SDK of OpenAI over Responses, its default, and chat completions: tools, streams, output types."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from tests.http_harness import Live
from tests.integrations.forecast import ROOM, SEED, Forecast
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server
from tests.server_process import ServerProcess

FRAMEWORK = Framework(
    name="openai-agents",
    packages=("openai-agents", "openai"),
    flags={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    shimmed=("a model that repeats the last message",),
)
CALLS: list[str] = []
DOORS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
EITHER_DOOR = pytest.mark.parametrize("door", list(DOORS))
EITHER_WAY = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    CALLS.append(city)
    return f"fine in {city}"


@function_tool
def forecast(city: Literal["Oslo", "Lima"]) -> str:
    """Tell the weather of one of two cities."""
    CALLS.append(city)
    return city


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("agents") / "model"
    with repeating_server(folder, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


async def run(url: str, door: str, said: str, *, stream: bool, **agent: Any) -> Any:
    """Run an agent until its final output."""
    CALLS.clear()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        runs: Any = Agent(name="agent", model=DOORS[door](model="tiny", openai_client=client), **agent)
        config = RunConfig(tracing_disabled=True)
        if not stream:
            return (await Runner.run(runs, said, run_config=config)).final_output
        running = Runner.run_streamed(runs, said, run_config=config)
        events = [event.type async for event in running.stream_events()]
        assert "raw_response_event" in events
        return running.final_output


@EITHER_DOOR
@EITHER_WAY
def test_a_tool_is_called_and_its_result_said(live: Live, stream: bool, door: str) -> None:
    said = "<think>hm</think>" + call("weather", '{"city":"a</tool_call>b"}')
    assert asyncio.run(run(live.url, door, said, stream=stream, tools=[weather])) == "fine in a</tool_call>b"
    assert CALLS == ["a</tool_call>b"]


@EITHER_DOOR
@EITHER_WAY
def test_one_call_at_a_time(live: Live, stream: bool, door: str) -> None:
    both = call("weather", '{"city":"a"}') + call("weather", '{"city":"b"}')
    agent = {"tools": [weather], "model_settings": ModelSettings(parallel_tool_calls=False)}
    assert asyncio.run(run(live.url, door, both, stream=stream, **agent)) == "fine in a" and CALLS == ["a"]
    assert asyncio.run(run(live.url, door, both, stream=stream, tools=[weather])) == "fine in b"
    assert CALLS == ["a", "b"]


@EITHER_DOOR
@EITHER_WAY
def test_the_output_is_of_its_type(random_server: ServerProcess, stream: bool, door: str) -> None:
    agent = {"output_type": Forecast, "model_settings": ModelSettings(max_tokens=ROOM, extra_body={"seed": SEED})}
    assert isinstance(asyncio.run(run(random_server.url, door, "hi", stream=stream, **agent)), Forecast)


@EITHER_DOOR
@EITHER_WAY
@pytest.mark.parametrize("choice", ["required", "forecast"])
def test_a_call_is_forced(random_server: ServerProcess, choice: str, stream: bool, door: str) -> None:
    """The agent ends with the result of its first call: the model would say nothing of it."""
    settings = ModelSettings(max_tokens=ROOM, tool_choice=choice, parallel_tool_calls=False, extra_body={"seed": SEED})
    agent = {"tools": [forecast], "tool_use_behavior": "stop_on_first_tool", "model_settings": settings}
    city = asyncio.run(run(random_server.url, door, "hi", stream=stream, **agent))
    assert city in ("Oslo", "Lima") and [city] == CALLS
