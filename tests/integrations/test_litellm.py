"""litellm over five doors: chats and messages with tools, completions, embeddings, scores and Responses.

`LITELLM_LOCAL_MODEL_COST_MAP` is its setting that leaves out the download of prices.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from tests.http_harness import Live
from tests.integrations import forecast
from tests.integrations.forecast import ROOM, SEED, Forecast
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server
from tests.server_process import ServerProcess

FRAMEWORK = Framework(
    name="litellm",
    packages=("litellm", "openai"),
    flags={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    shimmed=("a model that repeats the last message",),
    not_there=("its proxy",),
)
EITHER_DOOR = pytest.mark.parametrize("door", ["openai", "anthropic"])
EITHER_WAY = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
HELLO = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
BOTH = call("weather", '{"city":"a"}') + call("weather", '{"city":"b"}')
NAMED = {"type": "function", "function": {"name": "Forecast"}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("litellm") / "model"
    with repeating_server(folder, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


def at(url: str, door: str = "openai") -> dict[str, Any]:
    """Return what a user sets to point litellm at a server."""
    base = url if door == "anthropic" else f"{url}/v1"
    return {"model": f"{door}/tiny", "api_base": base, "api_key": "none", "max_retries": 0}


def message(stream: bool, **asked: Any) -> Any:
    """Return the message of a chat, of a stream as litellm puts it together."""
    reply: Any = litellm.completion(stream=stream, **asked)
    return (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0].message


@EITHER_DOOR
@EITHER_WAY
def test_a_tool_is_called_and_its_result_said(live: Live, stream: bool, door: str) -> None:
    asked = at(live.url, door) | {"max_tokens": 200, "tools": WEATHER}
    said = "<think>hm</think>" + call("weather", '{"city":"a</tool_call>b"}')
    turns: list[Any] = [{"role": "user", "content": said}]
    first = message(stream, messages=turns, **asked)
    (made,) = first.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("weather", {"city": "a</tool_call>b"})
    assert first.reasoning_content == "hm"
    turns += [first, {"role": "tool", "tool_call_id": made.id, "content": "fine in a"}]
    assert message(stream, messages=turns, **asked).content == "fine in a"


@EITHER_DOOR
@EITHER_WAY
def test_one_call_at_a_time(live: Live, stream: bool, door: str) -> None:
    asked = at(live.url, door) | {"max_tokens": 200, "tools": WEATHER, "messages": [{"role": "user", "content": BOTH}]}
    for parallel, cities in ((False, ["a"]), (True, ["a", "b"])):
        made = message(stream, parallel_tool_calls=parallel, tool_choice="auto", **asked).tool_calls
        assert [json.loads(each.function.arguments)["city"] for each in made] == cities


@EITHER_DOOR
def test_an_asynchronous_answer_is_the_same(live: Live, door: str) -> None:
    asked = at(live.url, door) | {"max_tokens": 20, "messages": HELLO}

    async def answers() -> tuple[Any, list[Any]]:
        reply: Any = await litellm.acompletion(stream=True, stream_options={"include_usage": True}, **asked)
        return await litellm.acompletion(**asked), [chunk async for chunk in reply]

    whole, chunks = asyncio.run(answers())
    made: Any = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == made.choices[0].message.content == "hello"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_log_probabilities_and_the_token_record(live: Live) -> None:
    extra = {"return_token_record": True}
    reply: Any = litellm.completion(messages=HELLO, logprobs=True, top_logprobs=2, extra_body=extra, **at(live.url))
    (choice,) = reply.choices
    record, entries = choice.provider_specific_fields["token_record"], choice.logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode().startswith("hello")
    assert [entry.logprob for entry in entries] == record["output_token_logprobs"]
    assert {len(entry.top_logprobs) for entry in entries} == {2}


def test_text_completions_come_whole_and_in_a_stream(live: Live) -> None:
    asked = at(live.url, "text-completion-openai") | {"prompt": "ab", "max_tokens": 3}
    whole: Any = litellm.text_completion(logprobs=1, **asked)
    assert whole.choices[0].text == "aba" and len(whole.choices[0].logprobs.token_logprobs) == 3
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **asked)) == "aba"


@EITHER_DOOR
@EITHER_WAY
def test_an_answer_is_of_its_schema(random_server: ServerProcess, stream: bool, door: str) -> None:
    asked = at(random_server.url, door) | {"messages": HELLO, "max_tokens": ROOM, "extra_body": {"seed": SEED}}
    assert Forecast.model_validate_json(message(stream, response_format=Forecast, **asked).content)


@EITHER_DOOR
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_is_forced(random_server: ServerProcess, choice: Any, door: str) -> None:
    asked = at(random_server.url, door) | {"messages": HELLO, "max_tokens": ROOM, "extra_body": {"seed": SEED}}
    made = message(False, tools=[forecast.tool()], tool_choice=choice, parallel_tool_calls=False, **asked)
    (each,) = made.tool_calls
    assert each.function.name == "Forecast" and Forecast.model_validate_json(each.function.arguments)


def test_embeddings_and_scores_are_those_of_the_server(random_server: ServerProcess) -> None:
    texts = ["What is 2", "It is five"]
    found: Any = litellm.embedding(input=texts, **at(random_server.url))
    raw = random_server.http.post("/v1/embeddings", json={"model": "tiny", "input": texts}).json()
    assert [each["embedding"] for each in found.data] == [each["embedding"] for each in raw["data"]]
    ranked: Any = litellm.rerank(
        model="hosted_vllm/tiny", query="a", documents=texts, api_base=random_server.url, api_key="none"
    )
    raw = random_server.http.post("/v1/rerank", json={"model": "tiny", "query": "a", "documents": texts}).json()
    assert [each["relevance_score"] for each in ranked.results] == [each["relevance_score"] for each in raw["results"]]


def test_responses_go_on_from_the_one_before(live: Live) -> None:
    asked = at(live.url) | {"max_output_tokens": 20}
    first: Any = litellm.responses(input="hello", **asked)
    assert first.output[0].content[0].text == "hello"
    events: Any = list(litellm.responses(input="again", previous_response_id=first.id, stream=True, **asked))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "again"
    assert events[-1].response.usage.input_tokens > first.usage.input_tokens


def test_a_response_is_of_its_schema(random_server: ServerProcess) -> None:
    asked = at(random_server.url) | {"max_output_tokens": ROOM, "extra_body": {"seed": SEED}}
    found: Any = litellm.responses(input="hi", text_format=Forecast, **asked)
    assert Forecast.model_validate_json(found.output[0].content[0].text)


@EITHER_DOOR
def test_anthropics_messages_reach_either_door(live: Live, door: str) -> None:
    """`openai/` is litellm's bridge from messages to Responses."""
    asked = at(live.url, door) | {"max_tokens": 20, "messages": HELLO}
    found: Any = asyncio.run(litellm.anthropic.messages.acreate(**asked))
    assert found["content"][0]["text"] == "hello" and found["stop_reason"] == "end_turn"


@EITHER_DOOR
def test_a_refusal_is_the_error_of_its_kind(live: Live, door: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HELLO, max_tokens=20, temperature=-1.0, **at(live.url, door))
