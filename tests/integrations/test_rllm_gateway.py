"""rllm's gateway between an agent and the server: a session's calls become traces of token ids.

Its newer mode, which sends each turn as the ids of all turns before, is not on PyPI: the last step plays what it sends
and reads.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from openai import OpenAI
from rllm_model_gateway.client import GatewayClient
from rllm_model_gateway.models import GatewayConfig, WorkerConfig
from rllm_model_gateway.server import create_app

from tests.integrations.framework import Framework
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port

FRAMEWORK = Framework(name="rllm's model gateway", packages=("rllm-model-gateway",))
MESSAGES: Any = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def gateway(server: ServerProcess) -> Iterator[str]:
    port = free_port()
    config = GatewayConfig(
        port=port,
        workers=[WorkerConfig(worker_id="w", url=f"{server.url}/v1")],
        store_worker="memory",
        sync_traces=True,
    )
    runner = uvicorn.Server(uvicorn.Config(create_app(config), port=port, log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(runner.serve()))
    thread.start()
    deadline = time.monotonic() + 30
    while not runner.started:
        assert time.monotonic() < deadline and thread.is_alive()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    runner.should_exit = True
    thread.join(30)


@pytest.fixture
def session(gateway: str) -> Iterator[tuple[GatewayClient, str, OpenAI]]:
    with GatewayClient(gateway) as client:
        session_id = client.create_session()
        url = client.get_session_url(session_id)
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as agent:
            yield client, session_id, agent


def check(client: GatewayClient, session_id: str, server: ServerProcess, tokens: int) -> None:
    (trace,) = client.get_session_traces(session_id)
    prompt = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert trace.prompt_token_ids == prompt
    assert len(trace.completion_token_ids) == len(trace.logprobs or ()) == tokens


def test_a_call_becomes_a_trace(session: tuple[GatewayClient, str, OpenAI], server: ServerProcess) -> None:
    client, session_id, agent = session
    name = server.client.model_info()["served_model_name"]
    reply = agent.chat.completions.create(model=name, messages=MESSAGES, max_tokens=5, extra_body={"ignore_eos": True})
    assert reply.usage is not None and reply.usage.completion_tokens == 5
    check(client, session_id, server, 5)


def test_a_stream_becomes_a_trace(session: tuple[GatewayClient, str, OpenAI], server: ServerProcess) -> None:
    client, session_id, agent = session
    name = server.client.model_info()["served_model_name"]
    stream = agent.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=5, stream=True, extra_body={"ignore_eos": True}
    )
    assert [chunk for chunk in stream if chunk.choices]
    check(client, session_id, server, 5)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_turns_as_token_ids(server: ServerProcess, stream: bool) -> None:
    """Each prompt is all turns before, with `add_special_tokens` false; a trace's prompt is read from chunk 0."""
    ids = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    for _ in range(3):
        body = {
            "prompt": ids, "max_tokens": 4, "stream": stream, "add_special_tokens": False, "return_token_ids": True,
            "logprobs": 1, "ignore_eos": True,
        }  # fmt: skip
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")] if stream else []
        replies = [json.loads(event) for event in events] or [response.json()]
        version = replies[-1].get("weight_version")
        assert version is None or int(version) >= 0
        assert replies[0]["choices"][0]["prompt_token_ids"] == ids
        new = [token for reply in replies for choice in reply["choices"] for token in choice["token_ids"]]
        assert len(new) == 4
        ids = [*ids, *new, 5, 6]
