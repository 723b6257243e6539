"""A router in front of real servers, and the steps that every router must take with them.

Requests go the way that a router passes untouched: `/generate` of SGLang, or `/inference/v1/generate` of vLLM.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.server_process import ServerProcess
from weight_sync.process_group import free_port

START_S = 60.0
LAYERS, TOP_K = 4, 2
ENGINES = 3
RETRIES = 20
RETRY_S = 0.25


@dataclass(frozen=True)
class Answer:
    """An answer as a client keeps it.  `routes`: [rows, layers, k] or None; `cached`: prompt tokens from the cache."""

    token_ids: list[int]
    routes: np.ndarray[Any, Any] | None
    cached: int


Generate = Callable[..., Answer]


@dataclass
class Fleet:
    """`router`: a client of the router; `engines`: the servers behind it."""

    router: httpx.Client
    engines: list[ServerProcess]


@contextmanager
def fleet(
    checkpoint: Path, flags: dict[str, Any], module: str, words: Sequence[str], generate: Generate
) -> Iterator[Fleet]:
    """Start three servers and the router `python -m module` before them; wait until `generate` gets an answer."""
    with ExitStack() as stack:
        settings = {"max_total_tokens": 16384, "num_threads": 1, **flags}
        engines = [stack.enter_context(ServerProcess(checkpoint, **settings)) for _ in range(ENGINES)]
        port = free_port()
        command = [
            *(sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(free_port()), "--log-level", "error"),
            *("--worker-urls", *[engine.url for engine in engines], *words),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False))
        wait_until(lambda: process.poll() is None and _answers(generate, client))
        yield Fleet(client, engines)


def sglang_generate(
    client: httpx.Client, input_ids: list[int], tokens: int, session: str | None = None, routes: bool = True
) -> Answer:
    """Generate by `/generate`; the session is in the header that SGLang's routers read."""
    body = {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
        "return_routed_experts": routes,
    }
    reply = client.post("/generate", json=body, headers={"X-SMG-Routing-Key": session} if session else {})
    reply.raise_for_status()
    content = reply.json()
    encoded = content["meta_info"].get("routed_experts")
    flat = None if encoded is None else np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    decoded = None if flat is None else flat.reshape(-1, LAYERS, TOP_K)
    return Answer(content["output_ids"], decoded, content["meta_info"]["cached_tokens"])


def vllm_generate(
    client: httpx.Client, input_ids: list[int], tokens: int, session: str | None = None, routes: bool = True
) -> Answer:
    """Generate by `/inference/v1/generate`; the session is in the header that vLLM's router reads."""
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": input_ids, "sampling_params": sampling}
    headers = {"X-Session-ID": session} if session else {}
    reply = client.post("/inference/v1/generate", json=body, headers=headers)
    reply.raise_for_status()
    content = reply.json()
    choice = content["choices"][0]
    encoded = choice.get("routed_experts")
    decoded = None if encoded is None else np.load(io.BytesIO(base64.b64decode(encoded)))
    return Answer(choice["token_ids"], decoded, content["usage"]["prompt_tokens_details"]["cached_tokens"])


def check_routes(generate: Generate, router: httpx.Client) -> None:
    """Check that every row of the routes arrives, with experts in each layer that has some."""
    prompt = list(range(260, 270))
    answer = generate(router, prompt, 6)
    assert len(answer.token_ids) == 6 and answer.routes is not None
    assert answer.routes.shape == (len(prompt) + 6 - 1, LAYERS, TOP_K)
    assert answer.routes[:, 1:].any(axis=(0, 2)).all()


def check_sessions(generate: Generate, router: httpx.Client) -> None:
    """Check that the second turn of each session finds the first one cached: it went to the same server."""
    for session in range(6):
        prompt = [300 + session, *range(260, 290)]
        first = generate(router, prompt, 4, session=f"session-{session}")
        second = generate(router, [*prompt, *first.token_ids, 7], 4, session=f"session-{session}")
        assert second.cached >= len(prompt)


def check_drain_and_death(generate: Generate, fleet: Fleet) -> None:
    """Drain one server and kill one while requests run; check that each repeatable request gets one answer."""
    prompts = [[400 + number % 50, 260 + number // 50, *range(280, 300)] for number in range(60)]
    expected = {tuple(prompt): generate(fleet.engines[2].http, prompt, 24).token_ids for prompt in prompts[::6]}
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(_with_retries, generate, fleet.router, prompt) for prompt in prompts]
        wait_until(lambda: sum(future.done() for future in running) >= 10)
        fleet.engines[0].process.terminate()
        wait_until(lambda: sum(future.done() for future in running) >= 20)
        fleet.engines[1].process.kill()
        answers = [future.result() for future in running]
    assert [len(answer.token_ids) for answer in answers] == [24] * len(prompts)
    assert {tuple(p): a.token_ids for p, a in zip(prompts, answers) if tuple(p) in expected} == expected
    assert fleet.engines[0].wait_exit() == 0, "what ran on the server that drained was answered"


def _with_retries(generate: Generate, router: httpx.Client, prompt: list[int]) -> Answer:
    for _ in range(RETRIES):
        try:
            return generate(router, prompt, 24)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            last = error
            time.sleep(RETRY_S)
    raise last


def _answers(generate: Generate, client: httpx.Client) -> bool:
    try:
        return len(generate(client, [5], 1).token_ids) == 1
    except (httpx.TransportError, httpx.HTTPStatusError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)
