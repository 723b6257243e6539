"""inspect-ai: evaluations with tools over chats, Responses and messages, log-probabilities, schemas, forced calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ModelOutput, ResponseSchema, get_model
from inspect_ai.scorer import exact
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool
from inspect_ai.util import json_schema

from tests.http_harness import Live
from tests.integrations.forecast import ROOM, SEED, Forecast
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server
from tests.server_process import ServerProcess

FRAMEWORK = Framework(
    name="inspect-ai",
    packages=("inspect_ai", "openai", "anthropic"),
    flags={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    shimmed=("a model that repeats the last message",),
    not_there=("top_logprobs of Responses", "its evals: no data"),
)
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("openai-api/lockstep/tiny", {}),
    "stream": ("openai-api/lockstep/tiny", {"stream": True}),
    "responses": ("openai-api/lockstep/tiny", {"responses_api": True}),
    "responses in a stream": ("openai-api/lockstep/tiny", {"responses_api": True, "stream": True}),
    "vllm": ("vllm/tiny", {}),
    "sglang": ("sglang/tiny", {}),
    "anthropic": ("anthropic/tiny", {}),
}
EVERY_DOOR = pytest.mark.parametrize("door", list(DOORS))


@tool
def weather() -> Tool:
    async def execute(city: str) -> str:
        """Tell the weather of a city.

        Args:
            city: Its name.
        """
        return f"fine in {city}"

    return execute


@tool
def forecast() -> Tool:
    async def execute(city: Literal["Oslo", "Lima"]) -> str:
        """Tell the weather of one of two cities.

        Args:
            city: Its name.
        """
        return city

    return execute


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("inspect") / "model"
    with repeating_server(folder, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


def model(url: str, door: str) -> Model:
    name, args = DOORS[door]
    base = url if door == "anthropic" else f"{url}/v1"
    return get_model(name, base_url=base, api_key="none", memoize=False, **args)


def answer(model: Model, said: str, **asked: Any) -> ModelOutput:
    """Return what a model generates outside of an evaluation."""
    tools = {name: asked.pop(name) for name in ("tools", "tool_choice") if name in asked}

    async def generated() -> ModelOutput:
        async with model:
            return await model.generate(said, config=GenerateConfig(**asked), **tools)

    return asyncio.run(generated())


@EVERY_DOOR
def test_an_evaluation_with_a_tool_scores_its_samples(live: Live, tmp_path: Path, door: str) -> None:
    """One sample has its target, and the other another one."""
    said = ["<think>hm</think>" + call("weather", f'{{"city":"{city}"}}') for city in ("a</tool_call>b", "c")]
    samples = [Sample(said[0], target="fine in a</tool_call>b", id="right"), Sample(said[1], target="rain", id="wrong")]
    task = Task(samples, solver=[system_message("s"), use_tools(weather()), generate()], scorer=exact())
    (log,) = evaluate(task, model=model(live.url, door), max_tokens=200, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert {each.id: each.score.value for each in log.samples} == {"right": "C", "wrong": "I"}
    for each in log.samples:
        roles = [message.role for message in each.messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        thought, (made,) = each.messages[2].content[0], each.messages[2].tool_calls
        assert "hm" in (thought.reasoning, thought.summary) and made.function == "weather"


@pytest.mark.parametrize("door", ["chat", "stream", "vllm", "sglang"])
def test_log_probabilities_of_a_chat(live: Live, door: str) -> None:
    output = answer(model(live.url, door), "aé", logprobs=True, top_logprobs=2)
    entries = output.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode().startswith("aé")
    assert {len(entry.top_logprobs) for entry in entries} == {2} and output.usage.output_tokens == len(entries)


def test_prompt_log_probabilities_are_those_of_generate(random_server: ServerProcess) -> None:
    name = "openai-api-completions/lockstep/tiny"
    asked = get_model(name, base_url=f"{random_server.url}/v1", api_key="none", memoize=False)
    output = answer(asked, "What is 2", max_tokens=3, logprobs=True, prompt_logprobs=1)
    body = {"text": "What is 2", "return_logprob": True, "logprob_start_len": 0}
    body |= {"sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    meta = random_server.http.post("/generate", json=body).json()["meta_info"]
    for entries, found in (
        (meta["input_token_logprobs"][1:], output.choices[0].prompt_logprobs.content),
        (meta["output_token_logprobs"], output.choices[0].logprobs.content),
    ):
        assert [entry.logprob for entry in found] == [entry[0] for entry in entries]


@EVERY_DOOR
def test_an_answer_is_of_its_schema(random_server: ServerProcess, door: str) -> None:
    schema = ResponseSchema(name="forecast", json_schema=json_schema(Forecast))
    asked = {"max_tokens": ROOM, "response_schema": schema, "extra_body": {"seed": SEED}}
    assert Forecast.model_validate_json(answer(model(random_server.url, door), "hi", **asked).completion)


@EVERY_DOOR
@pytest.mark.parametrize("choice", ["any", ToolFunction("forecast")], ids=["any", "named"])
def test_a_call_is_forced(random_server: ServerProcess, choice: Any, door: str) -> None:
    asked = {"max_tokens": ROOM, "parallel_tool_calls": False, "extra_body": {"seed": SEED}}
    output = answer(model(random_server.url, door), "hi", tools=[forecast()], tool_choice=choice, **asked)
    (made,) = output.message.tool_calls
    assert made.function == "forecast" and made.arguments["city"] in ("Oslo", "Lima") and not made.parse_error
