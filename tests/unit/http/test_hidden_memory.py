"""Hidden states of all requests together: within one limit, and given back however a request ends."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout.core.errors import Unavailable
from rollout.http.io import Parts
from rollout.http.native import resumable
from rollout.tokenizer_manager.hidden_memory import HiddenMemory
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.streams import cut, events, resumed

LIMIT_MB = 24
STATES: dict[str, Any] = {"return_hidden_states": True, "hidden_state_layers": [0, 1, 2, 3]}
PARAMS: dict[str, Any] = {"max_new_tokens": 2, "n": 8, "temperature": 0.0, "ignore_eos": True}
LARGE: dict[str, Any] = STATES | {"input_ids": [3] * 400, "sampling_params": PARAMS}
"""A request that takes more than half of the limit; its answer has 12 MB."""

COMPACT: dict[str, Any] = LARGE | {"hidden_states_format": "compact", "sampling_params": PARAMS | {"n": 20}}
"""The same for a stream, which counts for all samples while it is made."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5, dtype="bfloat16")
    settings = {"with_tokenizer": False, "max_total_tokens": 8192, "max_request_mb": LIMIT_MB}
    with live_server(folder, engine=EngineThread, **settings) as server:
        yield server
        assert server.scheduler.error is None


def gauge(live: Live, name: str) -> float:
    lines = live.client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"lockstep:{name}{{")]
    return float(line.split()[-1])


def held(live: Live) -> float:
    return gauge(live, "hidden_state_bytes")


@pytest.fixture
def paused(live: Live) -> Iterator[None]:
    live.client.post("/pause_generation", json={"mode": "in_place"})
    yield
    live.client.post("/continue_generation", json={})


# --- the count ---------------------------------------------------------------------------------------------------


def test_a_hold_counts_until_nothing_refers_to_it() -> None:
    memory = HiddenMemory(100)
    first, second = memory.hold(60), memory.hold(40)
    with pytest.raises(Unavailable, match="--max-request-mb"):
        memory.hold(1)
    assert memory.num_bytes == 100, "a refusal changes nothing"
    del second
    assert memory.num_bytes == 60
    third = memory.hold(40)
    del first, third
    assert memory.num_bytes == 0


def test_holds_end_on_any_thread_and_in_a_collection() -> None:
    memory = HiddenMemory(10**9)
    holds = [memory.hold(3) for _ in range(4000)]
    threads = [threading.Thread(target=lambda part=holds[begin::8]: part.clear()) for begin in range(8)]
    loops: list[Any] = [[memory.hold(5)] for _ in range(100)]
    for loop in loops:
        loop.append(loop)
    del holds, loop
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threads.clear()
    loops.clear()
    gc.collect()
    assert memory.num_bytes == 0


# --- requests ----------------------------------------------------------------------------------------------------


def test_a_request_without_room_is_refused_and_the_next_one_is_not(live: Live) -> None:
    live.client.post("/pause_generation", json={"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.generate, **LARGE)
        live.wait_until(lambda: held(live) > 0)
        status, message = live.refused(**LARGE)
        assert status == 503 and "hidden states of the request" in message and "--max-request-mb" in message
        begun = live.manager.num_in_flight
        live.client.post("/continue_generation", json={})
        plain = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        assert begun == 8 and live.generate(**plain)["output_ids"], "requests without hidden states have room"
        assert len(first.result()) == 8
    live.wait_until(lambda: held(live) == 0)
    assert len(live.generate(**LARGE)) == 8


def test_the_count_is_of_rows_layers_samples_and_the_form(live: Live, paused: None) -> None:
    def counted(**fields: Any) -> float:
        body = {"input_ids": [3] * 100, "sampling_params": {"max_new_tokens": 0}, "rid": "one"}
        body |= STATES | {"hidden_states_format": "compact"} | fields
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(live.client.post, "/generate", json=body)
            live.wait_until(lambda: held(live) > 0)
            found = held(live)
            live.client.post("/abort_request", json={"rid": "one"})
            assert answer.result().status_code == 200
        live.wait_until(lambda: held(live) == 0)
        return found

    one = counted()
    assert one == 100 * 4 * 48 * 2 * 5, "rows, layers, numbers, bytes, and copies in the scheduler"
    assert counted(hidden_states_start_len=50) == one / 2
    assert counted(hidden_state_layers=[0]) == one / 4
    assert counted(sampling_params={"max_new_tokens": 100, "n": 3}) == 6 * one
    assert counted(hidden_states_format="nested") == 100 * 4 * 48 * (2 * 1.5 + 24)


@pytest.mark.parametrize("end", ["abort", "abort all", "gone", "refused", "stream", "cut stream"])
def test_what_a_request_held_is_free_when_it_has_ended(live: Live, end: str) -> None:
    if end == "refused":
        assert live.refused(**LARGE | {"sampling_params": PARAMS | {"n": 20}})[0] == 413
    elif end == "stream":
        assert sum("finish_reason" in event["meta_info"] for event in events(live, **COMPACT, stream=True)) >= 20
    elif end == "cut stream":
        cut(live, 1, **LARGE | {"sampling_params": PARAMS | {"n": 1, "max_new_tokens": 100}})
    else:
        live.client.post("/pause_generation", json={"mode": "in_place"})
        one = ask(live, LARGE | {"rid": "ends"})
        live.wait_until(lambda: held(live) > 0)
        if end == "gone":
            one.close()
        else:
            live.client.post("/abort_request", json={"rid": "ends"} if end == "abort" else {"abort_all": True})
        live.wait_until(lambda: live.manager.num_in_flight == 0)
        live.client.post("/continue_generation", json={})
        one.close()
    live.wait_until(lambda: held(live) == 0)


def test_a_stream_that_is_kept_counts_until_it_is_forgotten(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "SWEEP_S", 0.02)
    cut(live, 1, **COMPACT, rid="kept", resumable=True)
    live.wait_until(lambda: gauge(live, "kept_streams") == 1)
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    live.wait_until(lambda: gauge(live, "kept_stream_bytes") > 20 * 400 * 4 * 48 * 2)
    assert live.refused(**LARGE)[0] == 503
    last = resumed(live, "kept", 0)[-1]
    assert last["meta_info"]["hidden_states"]["shape"] == [401, 4, 48]
    live.wait_until(lambda: gauge(live, "kept_streams") == 1)
    monkeypatch.setattr(resumable, "KEPT_S", 0.05)
    live.wait_until(lambda: held(live) == 0)
    assert (gauge(live, "kept_streams"), gauge(live, "kept_stream_bytes")) == (0, 0)


# --- unread answers ----------------------------------------------------------------------------------------------


def ask(live: Live, body: dict[str, Any]) -> socket.socket:
    """Send a request over a connection whose client takes in little."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(10.0)
    one.connect(("127.0.0.1", int(live.url.rpartition(":")[2])))
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    one.sendall(head.encode() + content)
    return one


def unread_answer_counts(live: Live) -> bool:
    """Return whether an answer of megabytes counts that has begun, and that its client does not read."""
    one = ask(live, LARGE)
    assert one.recv(12) == b"HTTP/1.1 200"
    counts = held(live) > 0
    one.close()
    live.wait_until(lambda: held(live) == 0)
    return counts


def test_an_answer_counts_until_it_is_read(live: Live) -> None:
    assert unread_answer_counts(live)
    one = ask(live, LARGE)
    head = b""
    while b"\r\n\r\n" not in head:
        head += one.recv(1)
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while size:
        size -= len(one.recv(min(size, 1 << 16)))
    live.wait_until(lambda: held(live) == 0)
    one.close()


def test_an_answer_that_gives_its_memory_up_too_early_is_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Parts.__init__

    def without(self: Parts, parts: list[bytes], *, held: object = None, **settings: Any) -> None:
        begin(self, parts, **settings)

    monkeypatch.setattr(Parts, "__init__", without)
    assert not unread_answer_counts(live)


def test_the_end_of_an_answer_that_holds_waits_for_its_parts() -> None:
    sent: list[tuple[int, bool, bool]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((len(message["body"]), message["more_body"], memory.num_bytes > 0))

    async def scene(held: Any) -> None:
        await Parts([b"123", b"45"], is_list=False, held=held)({"type": "http"}, send, send)  # type: ignore[arg-type]

    memory = HiddenMemory(10)
    asyncio.run(scene(memory.hold(7)))
    assert sent == [(3, True, True), (1, True, True), (2, True, True), (0, False, True)] and memory.num_bytes == 0
    sent.clear()
    asyncio.run(scene(None))
    assert sent == [(3, True, False), (1, True, False), (2, False, False)]
