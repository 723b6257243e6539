"""KV events of a running server: who rebuilds the prefix tree from them knows what each request will find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from tests.kv_listener import Listener, PrefixTree, ask_replay
from tests.model_zoo import tiny_checkpoint
from tests.ports import free_ports_in_a_row
from tests.promql import Scrapes
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port

pytestmark = pytest.mark.full

SLOTS = 700
REQUESTS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe", context_length=256)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    config = {"publisher": "zmq", "endpoint": events, "bind": True, "replay_endpoint": replay, "topic": "kv"}
    config["weight_versions"] = True
    settings = {"kv_events_config": json.dumps(config), "max_total_tokens": SLOTS, "dtype": "float32"}
    settings |= {"session_pin_fraction": 0.3}
    with ServerProcess(folder, **settings) as process:
        yield process


class Seat:
    """A listener that always knows all that the server has published."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        facts = self.facts()
        assert facts["publisher"] == "zmq" and facts["block_size"] == 1 and facts["dp_size"] == 1
        host = facts["endpoint_host"]
        self.replay = f"tcp://{host}:{facts['replay_endpoint_port_base']}"
        self._listener = Listener(f"tcp://{host}:{facts['endpoint_port_base']}", facts["topic"], self.replay)

    def facts(self) -> dict[str, Any]:
        return self._server.http.get("/server_info").json()["kv_events"]

    def tree(self) -> PrefixTree:
        (num_batches,) = self.facts()["num_batches"]
        self._listener.catch_up(num_batches)
        return self._listener.tree

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def seat(server: ServerProcess) -> Iterator[Seat]:
    seat = Seat(server)
    yield seat
    seat.close()


def body(prompt: list[int], fields: dict[str, Any], tokens: int = 4) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params} | fields


class Traffic:
    """Prompts that branch off earlier conversations, under three salts."""

    def __init__(self, http: httpx.Client, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.http = http
        self.conversations: list[list[int]] = [[1]]

    def prompt(self) -> list[int]:
        before = self.conversations[self.rng.integers(len(self.conversations))]
        shared = len(before) if self.rng.random() < 0.5 else int(self.rng.integers(len(before) + 1))
        return (before[:shared] + self.rng.integers(3, 300, size=self.rng.integers(1, 30)).tolist())[:200]

    def salt(self) -> tuple[dict[str, str], str | None]:
        return [({}, None), ({"cache_salt": "s"}, "s"), ({"extra_key": "e"}, "e")][
            self.rng.choice(3, p=[0.8, 0.1, 0.1])
        ]

    def generate(self, prompt: list[int], fields: dict[str, Any]) -> int:
        """Send a request, and return the number of its tokens that came from the cache."""
        asked = body(prompt, fields, int(self.rng.integers(1, 12)))
        reply = self.http.post("/generate", json=asked | {"session_id": f"agent-{self.rng.integers(8)}"})
        assert reply.status_code == 200, reply.text
        self.conversations = [*self.conversations[-30:], prompt + reply.json()["output_ids"]]
        return reply.json()["meta_info"]["cached_tokens"]

    def noise(self) -> None:
        """Make noise that is not predicted: samples side by side, requests aborted or retracted."""
        kind = self.rng.integers(4)
        if kind == 0:
            prompts = [self.prompt() for _ in range(6)]
            reply = self.http.post("/generate", json=body(prompts, {}, 50))  # type: ignore[arg-type]
            assert reply.status_code == 200
        elif kind == 1:
            reply = self.http.post("/generate", json=body(self.prompt(), {}, 30) | {"rid": "n"} | {})
            assert reply.status_code == 200
            self.http.post("/abort_request", json={"abort_all": True})
        elif kind == 2:
            self.http.post("/pause_generation", json={"mode": "retract"})
            self.http.post("/continue_generation", json={})
        else:
            params = {"max_new_tokens": 20, "n": 4, "temperature": 1.0}
            reply = self.http.post("/generate", json={"input_ids": self.prompt(), "sampling_params": params})
            assert reply.status_code == 200


def test_500_requests_find_in_the_cache_what_a_listener_predicts(
    server: ServerProcess, seat: Seat, folder: Path
) -> None:
    traffic, hits, evicted, largest = Traffic(server.http, seed=3), 0, 0, 0
    for number in range(REQUESTS):
        if number % 60 == 30:
            commit = {"model_path": str(folder), "weight_version": f"step-{number}"}
            assert server.http.post("/update_weights_from_disk", json=commit).status_code == 200
            assert seat.tree().blocks == {} and seat.tree().versions[-1][0] == f"step-{number}"
        if number % 150 == 149:
            assert server.http.get("/flush_cache").status_code == 200
            assert seat.tree().blocks == {}
        if number % 10 == 9:
            traffic.noise()
        prompt, (fields, salt) = traffic.prompt(), traffic.salt()
        tree = seat.tree()
        evicted += len(tree.blocks) < largest
        largest = len(tree.blocks)
        predicted = min(tree.match(prompt, salt), len(prompt) - 1)  # the last token is always computed
        assert traffic.generate(prompt, fields) == predicted, f"request {number}"
        hits += predicted > 0
    assert hits > REQUESTS // 2 and evicted > 50, "the traffic reuses prefixes and the cache evicts"
    state = server.http.get("/server_info").json()["internal_states"][0]
    assert len(seat.tree().blocks) == state["num_cached_tokens"]


def test_whoever_comes_late_asks_for_what_was_published(server: ServerProcess, seat: Seat) -> None:
    with zmq.Context() as context:
        late, batches = PrefixTree(), ask_replay(context, seat.replay, 0)
    assert [number for number, _ in batches] == list(range(len(batches)))

    for number, payload in batches:
        late.take(number, payload)
    tree = seat.tree()
    assert late.blocks == tree.blocks and late.versions == tree.versions


def test_a_renamed_version_keeps_its_blocks(server: ServerProcess, seat: Seat) -> None:
    prompt = list(range(20, 60))
    Traffic(server.http, 1).generate(prompt, {})
    renamed = server.http.post("/update_weight_version", json={"new_version": "renamed", "abort_all_requests": False})
    assert renamed.status_code == 200
    versions = list(seat.tree().versions)
    assert seat.tree().match(prompt) == len(prompt)
    assert Traffic(server.http, 1).generate(prompt, {}) == len(prompt) - 1
    for other, known in (([*prompt, 7, 8], len(prompt)), ([9, *prompt], 0)):  # below old blocks, and next to them
        assert seat.tree().match(other) == Traffic(server.http, 1).generate(other, {}) == known
        assert seat.tree().match(other) == len(other)
    assert seat.tree().versions == versions


def test_each_data_parallel_rank_has_a_publisher_and_numbers_of_its_own(folder: Path) -> None:
    base = free_ports_in_a_row(2)
    config = {"endpoint": f"tcp://127.0.0.1:{base}", "bind": True}
    prompt = list(range(20, 50))
    settings = {"kv_events_config": json.dumps(config), "max_total_tokens": SLOTS, "dp_size": 2, "num_threads": 1}
    with ServerProcess(folder, **settings) as server, zmq.Context() as context:
        subscribers = [context.socket(zmq.SUB) for _ in range(2)]
        for rank, subscriber in enumerate(subscribers):
            subscriber.setsockopt(zmq.LINGER, 0)
            subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
            subscriber.connect(f"tcp://127.0.0.1:{base + rank}")
        for attempt in range(50):  # until the subscription is there
            reply = server.http.post("/generate", json=body([attempt, *prompt], {"routed_dp_rank": 1}))
            assert reply.status_code == 200
            if subscribers[1].poll(100):
                break
        assert server.http.post("/generate", json=body([77, *prompt], {"routed_dp_rank": 1})).status_code == 200
        stored: list[int] = []
        while stored[-len(prompt) :] != prompt:
            assert subscribers[1].poll(5000)
            _, events, dp_rank = msgspec.msgpack.decode(subscribers[1].recv_multipart()[2])
            assert dp_rank == 1 and "weight_version" not in events[0]
            stored = events[0].get("token_ids", [])
        assert not subscribers[0].poll(0)
        facts = server.http.get("/server_info").json()["kv_events"]
        assert facts["dp_size"] == 2 and facts["num_batches"][0] == 1 < facts["num_batches"][1]
        text = server.http.get("/metrics").text
        for subscriber in subscribers:
            subscriber.close()
    scrapes = Scrapes(text, text, 1.0, {})
    for name in ("vllm:request_success_total", "sglang:num_requests_total", "vllm:prompt_tokens_total"):
        by_rank = scrapes.evaluate(f"sum by (engine, dp_rank) ({name})")
        labels = [frozenset({("engine", rank), ("dp_rank", rank)}) for rank in "01"]
        assert by_rank[labels[0]] == 0 < by_rank[labels[1]]
    assert len(scrapes.evaluate("vllm:kv_cache_usage_perc")) == 2


def test_a_taken_port_ends_the_start_with_one_line(server: ServerProcess, seat: Seat, folder: Path) -> None:
    facts = seat.facts()
    config = {"endpoint": f"tcp://127.0.0.1:{facts['endpoint_port_base']}", "bind": True}
    second = ServerProcess(folder, kv_events_config=json.dumps(config), max_total_tokens=SLOTS)
    try:
        assert second.wait_exit() == 1
        assert "--kv-events-config" in second.stderr().splitlines()[-1]
    finally:
        second.close()
