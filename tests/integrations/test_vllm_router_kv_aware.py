"""vllm-router's policy kv_aware follows the server's KV events: requests go where their prefix is, until a commit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.integrations.framework import Framework
from tests.integrations.routers import Fleet, vllm_generate
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port

FRAMEWORK = Framework(
    name="vllm-router, kv_aware",
    packages=("vllm-router",),
    flags={"kv_events_config": '{"endpoint": "tcp://HOST:PORT", "bind": true}'},
)
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def behind(checkpoint: Path) -> Iterator[Fleet]:
    """Two servers, and the router as a subscriber of both."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--log-level", "error", "--policy", "kv_aware"]
    command += ["--kv-event-block-size", "1", "--kv-event-model", "model"]
    with ExitStack() as stack:
        engines = []
        for _ in range(2):
            events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            config = json.dumps({"endpoint": events, "bind": True, "replay_endpoint": replay})
            settings = {"kv_events_config": config, "served_model_name": "model", "max_total_tokens": 8192}
            engines.append(stack.enter_context(ServerProcess(checkpoint, num_threads=1, **settings)))
            command += ["--kv-event-source", f"{engines[-1].url}={events}"]
            command += ["--kv-event-replay-source", f"{engines[-1].url}={replay}"]
        process = subprocess.Popen([*command, "--worker-urls", *[engine.url for engine in engines]])
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        router = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False))
        wait_until(lambda: process.poll() is None and num_healthy(router) == 2)
        yield Fleet(router, engines)


def num_healthy(router: httpx.Client) -> int:
    try:
        return sum(worker["is_healthy"] for worker in router.get("/workers").json()["workers"])
    except httpx.TransportError:
        return 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)


def prompt(number: int) -> list[int]:
    return [400 + number, *range(260, 300), 400 + number]


def follows(fleet: Fleet, number: int) -> bool:
    """Return whether the next turn of the prompt goes to the server that has it."""
    return vllm_generate(fleet.router, [*prompt(number), 7], 2, routes=False).cached >= len(prompt(number))


def test_requests_go_where_their_prefix_is(behind: Fleet) -> None:
    for number in range(NUM_PROMPTS):
        vllm_generate(behind.engines[number % 2].http, prompt(number), 2, routes=False)
        time.sleep(0.3)  # an event travels
        assert follows(behind, number), f"prompt {number}"


def test_after_a_commit_nothing_is_looked_for_where_it_was(behind: Fleet, checkpoint: Path) -> None:
    """The server that commits has nothing any more, so the router takes the other, which still has the prompt."""
    for engine in behind.engines:
        vllm_generate(engine.http, prompt(50), 2, routes=False)
    for engine in behind.engines:
        body = {"model_path": str(checkpoint), "weight_version": engine.url}
        assert engine.http.post("/update_weights_from_disk", json=body).status_code == 200
        time.sleep(0.3)
        assert all(follows(behind, 50) for _ in range(3))
        vllm_generate(engine.http, prompt(50), 2, routes=False)
        time.sleep(0.3)
