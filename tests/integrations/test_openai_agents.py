"""The Agents SDK of OpenAI over Responses, its default, and chat completions: tools, streams, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

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
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server

FRAMEWORK = Framework(
    name="openai-agents",
    packages=("openai-agents", "openai"),
    flags={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    shimmed=("a model that repeats the last message",),
    not_there=("output types (response_format)", "tool_choice: required"),
)
CALLS: list[str] = []
DOORS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
EITHER_DOOR = pytest.mark.parametrize("door", list(DOORS))


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    CALLS.append(city)
    return f"fine in {city}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("agents") / "model"
    with repeating_server(folder, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


async def run(live: Live, door: str, said: str, settings: ModelSettings, *, stream: bool) -> str:
    CALLS.clear()
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        model = DOORS[door](model="tiny", openai_client=client)
        agent = Agent(name="agent", model=model, tools=[weather], model_settings=settings)
        config = RunConfig(tracing_disabled=True)
        if not stream:
            return str((await Runner.run(agent, said, run_config=config)).final_output)
        running = Runner.run_streamed(agent, said, run_config=config)
        events = [event.type async for event in running.stream_events()]
        assert "raw_response_event" in events
        return str(running.final_output)


@EITHER_DOOR
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_is_called_and_its_result_said(live: Live, stream: bool, door: str) -> None:
    said = "<think>hm</think>" + call("weather", '{"city":"a</tool_call>b"}')
    assert asyncio.run(run(live, door, said, ModelSettings(), stream=stream)) == "fine in a</tool_call>b"
    assert CALLS == ["a</tool_call>b"]


@EITHER_DOOR
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_one_call_at_a_time(live: Live, stream: bool, door: str) -> None:
    both = call("weather", '{"city":"a"}') + call("weather", '{"city":"b"}')
    settings = ModelSettings(parallel_tool_calls=False)
    assert asyncio.run(run(live, door, both, settings, stream=stream)) == "fine in a" and CALLS == ["a"]
    assert asyncio.run(run(live, door, both, ModelSettings(), stream=stream)) == "fine in b" and CALLS == ["a", "b"]
