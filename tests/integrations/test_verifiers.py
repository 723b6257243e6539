"""verifiers' client for evaluations: it validates replies with OpenAI's types, and reads streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http_harness import Live
from tests.integrations import stubs
from tests.integrations.framework import Framework
from tests.integrations.repeating_server import call, repeating_server

stubs.install("prime_sandboxes", "prime_tunnel", "prime_runs", "gepa", "math_verify", "connectrpc", "loguru")

from verifiers.v1.clients.eval import EvalClient  # noqa: E402
from verifiers.v1.configs.client import EvalClientConfig  # noqa: E402
from verifiers.v1.dialects.chat import ChatDialect  # noqa: E402
from verifiers.v1.types import SamplingConfig  # noqa: E402

FRAMEWORK = Framework(
    name="verifiers",
    packages=("verifiers", "openai"),
    flags={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    shimmed=("openai 3 for its openai below 3", "stubs for Prime's sandboxes", "a model that repeats the last message"),
    not_there=("its environments",),
)
SAID = "<think>hm</think>" + call("f", '{"x":1}')
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("verifiers") / "model"
    with repeating_server(folder, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def config(live: Live, monkeypatch: pytest.MonkeyPatch) -> EvalClientConfig:
    monkeypatch.setenv("KEY", "none")
    return EvalClientConfig(base_url=f"{live.url}/v1", api_key_var="KEY")


def check(response: Any) -> None:
    (tool_call,) = response.message.tool_calls
    assert (tool_call.name, tool_call.arguments) == ("f", '{"x":1}')
    assert response.message.reasoning_content == "hm"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": SAID}], "tools": TOOLS} | more


def test_a_reply_is_valid(config: EvalClientConfig) -> None:
    async def answer() -> Any:
        client = EvalClient(config)
        try:
            return await client.get_response(ChatDialect(), body(), SamplingConfig(), session_id="s")
        finally:
            await client.close()

    response = asyncio.run(answer())
    check(response)
    assert response.raw["metadata"]["session_id"] == "s"


def test_a_stream_is_read(config: EvalClientConfig) -> None:
    async def answer() -> Any:
        client, dialect = EvalClient(config), ChatDialect()
        parser = dialect.stream_parser()
        try:
            asked = body(stream=True, stream_options={"include_usage": True})
            reply = await client.relay(dialect, asked, session_id="s")
            async for chunk in reply.chunks:
                parser.feed(chunk)
            await reply.close()
        finally:
            await client.close()
        return parser.finish()

    check(asyncio.run(answer()))
