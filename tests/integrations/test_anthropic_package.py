"""The `anthropic` package over /v1/messages: tools, whole and streamed messages, output formats, the token record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError, beta_tool

from tests.http_harness import Live
from tests.integrations.forecast import ROOM, SEED, Forecast
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server
from tests.server_process import ServerProcess

FRAMEWORK = Framework(
    name="anthropic",
    packages=("anthropic",),
    flags={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    shimmed=("a model that repeats the last message",),
    not_there=("tools that Anthropic runs",),
)
HELLO = [{"role": "user", "content": "hello"}]
CALLS: list[str] = []


@beta_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    CALLS.append(city)
    return f"fine in {city}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("anthropic") / "model"
    with repeating_server(folder, tool_call_parser="hermes", reasoning_parser="qwen3", api_key="key") as server:
        server.client.headers["x-api-key"] = "key"
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[Anthropic]:
    CALLS.clear()
    with Anthropic(base_url=live.url, api_key="key", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_tool_runner_calls_tools_until_the_answer(client: Anthropic, stream: bool) -> None:
    said = "<think>hm</think>" + call("weather", '{"city":"a</tool_call>b"}')
    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=200, tools=[weather], messages=[{"role": "user", "content": said}], stream=stream
    )
    answers = [each.get_final_message() for each in runner] if stream else list(runner)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"] and CALLS == ["a</tool_call>b"]
    assert [block.type for block in answers[0].content] == ["thinking", "tool_use"]
    assert answers[1].content[0].text == "fine in a</tool_call>b"


def test_a_stream_is_the_message_in_pieces(client: Anthropic) -> None:
    asked = {"model": "tiny", "max_tokens": 20, "messages": HELLO}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        made = stream.get_final_message()
    assert text == made.content[0].text == whole.content[0].text == "hello"
    assert (made.stop_reason, made.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_tokens_of_a_prompt_are_counted(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    usage = client.messages.create(model="tiny", max_tokens=20, messages=HELLO).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_the_token_record_of_a_message(client: Anthropic, live: Live) -> None:
    extra = {"return_token_record": True}
    record = client.messages.create(model="tiny", max_tokens=20, messages=HELLO, extra_body=extra).token_record
    asked = {"tokens": record["output_token_ids"], "skip_special_tokens": True}
    assert live.client.post("/detokenize", json=asked).json()["text"] == "hello"
    assert len(record["output_token_logprobs"]) == len(record["output_token_ids"])
    assert record["weight_version"] == "v0" and record["prompt_token_ids"]


def test_a_refusal_is_the_error_of_its_kind(client: Anthropic) -> None:
    with pytest.raises(BadRequestError, match="messages is empty") as caught:
        client.messages.create(model="tiny", max_tokens=20, messages=[])
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def parsing(random_server: ServerProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=random_server.url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("beta", [False, True], ids=["output_config", "beta"])
def test_a_parsed_message_is_of_its_type(parsing: Anthropic, beta: bool) -> None:
    messages: Any = parsing.beta.messages if beta else parsing.messages
    asked = {"model": "tiny", "max_tokens": ROOM, "messages": HELLO, "extra_body": {"seed": SEED}}
    whole = messages.parse(output_format=Forecast, **asked).parsed_output
    with messages.stream(output_format=Forecast, **asked) as stream:
        streamed = stream.get_final_message().parsed_output
    assert isinstance(whole, Forecast) and streamed == whole


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Forecast"}], ids=["any", "tool"])
def test_a_call_is_forced(parsing: Anthropic, choice: dict[str, Any]) -> None:
    message: Any = parsing.messages.create(
        model="tiny",
        max_tokens=ROOM,
        messages=HELLO,
        tools=[{"name": "Forecast", "input_schema": Forecast.model_json_schema()}],
        tool_choice=choice | {"disable_parallel_tool_use": True},  # type: ignore[arg-type]
        extra_body={"seed": SEED},
    )
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.name == "Forecast" and Forecast(**block.input)
