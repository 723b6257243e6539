"""A server whose steps are launched before those before them are finished gives what one gives that takes turns.

On a CPU, where `--enable-overlap-schedule` switches it on; `test_server` and `test_parallel_server` run under both.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.server.engine import Engine
from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

PROMPTS = [[5, 6, 7], [300] * 40, [8, 9, 10, 11], list(range(100, 190)), [5, 6, 7, 1]]
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_total_tokens": 2048,
    "chunked_prefill_size": 32,
    "enable_return_routed_experts": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", seed=3)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, disable_overlap_schedule=False, **SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[Any, ...]]:
    """Return the facts of an engine in this process, which takes turns."""
    engine = Engine(model_path=str(folder), num_threads=1, **SETTINGS)
    try:
        return [facts(answer) for answer in engine.generate(**wanted())]
    finally:
        engine.close()


def wanted() -> dict[str, Any]:
    """Return a request of greedy and seeded prompts together, some with stop strings and stop tokens, with routes."""
    params = [
        {"max_new_tokens": 24, "sampling_seed": seed, "temperature": seed % 2, "stop_token_ids": list(range(seed))}
        for seed in range(len(PROMPTS))
    ]
    params[1]["stop"] = ["e", "a"]
    return {
        "input_ids": PROMPTS,
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": True,
    }


def facts(answer: Any) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    logprobs = [list(entry) for entry in meta["output_token_logprobs"]]
    return answer["output_ids"], logprobs, meta["routed_experts"], meta["finish_reason"]


def everything(server: ServerProcess) -> list[tuple[Any, ...]]:
    response = server.http.post("/generate", json=wanted())
    assert response.status_code == 200, response.text
    return [facts(answer) for answer in response.json()]


def test_the_same_as_in_turns(server: ServerProcess, expected: list[tuple[Any, ...]]) -> None:
    assert server.http.get("/server_info").json()["internal_states"][0]["overlap_schedule"] is True
    for _ in range(2):  # prefixes are found the second time
        assert everything(server) == expected


@pytest.mark.full
def test_pauses_and_aborts_in_the_midst(server: ServerProcess, expected: list[tuple[Any, ...]]) -> None:
    lines: list[dict[str, Any]] = []

    def read() -> None:
        params = {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3], "rid": "long", "stream": True, "sampling_params": params}
        with server.http.stream("POST", "/generate", json=body) as response:
            data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            lines.extend(json.loads(line) for line in data if line != "[DONE]")

    thread = threading.Thread(target=read)
    thread.start()
    for mode in ("in_place", "retract"):
        time.sleep(0.05)
        assert server.http.post("/pause_generation", json={"mode": mode}).json()["paused"]
        assert server.http.post("/continue_generation", json={}).status_code == 200
        assert everything(server) == expected
    server.http.post("/abort_request", json={"rid": "long"})
    thread.join(30)
    meta = lines[-1]["meta_info"]
    assert meta["finish_reason"]["type"] in ("abort", "length")
    assert meta["completion_tokens"] == len(lines[-1]["output_ids"])
