"""A real server as a gateway of agents uses it: token ids in turns, prefixes kept for sessions, messages parsed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

POOL = 1024
LAYERS, TOP_K = 3, 3
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3)
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "log_level": "debug"}
    log = tmp_path_factory.mktemp("log") / "stderr.txt"
    with (
        log.open("w") as stderr,
        ServerProcess(
            folder,
            enable_return_routed_experts=True,
            max_total_tokens=POOL,
            session_pin_fraction=0.5,
            stderr=stderr,
            **settings,
        ) as running,
    ):
        running.log = log  # type: ignore[attr-defined]
        yield running


def chat(server: ServerProcess, ids: list[int], session_id: str | None = None, **body: Any) -> dict[str, Any]:
    """Ask for a turn as a session server does, and return the choice of the answer."""
    asked = {"input_ids": ids, "max_tokens": 12, "return_token_ids": True, "return_meta_info": True} | GREEDY | body
    headers = {} if session_id is None else {"X-Session-ID": session_id}
    response = server.http.post("/v1/chat/completions", json=asked, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["metadata"].get("session_id") == session_id
    (choice,) = response.json()["choices"]
    return choice


def rows(meta: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, LAYERS, TOP_K)


def flood(server: ServerProcess) -> None:
    """Send prompts of other clients that have twice as many tokens as the pool holds."""
    prompts = [[10 + i] * 100 for i in range(2 * POOL // 100)]
    body = {"input_ids": prompts, "sampling_params": GREEDY | {"max_new_tokens": 1}}
    assert server.http.post("/generate", json=body).status_code == 200


def test_turns_of_a_session_make_one_sequence(server: ServerProcess) -> None:
    """Prefix, routes and log-probabilities over four turns match the sequence scored at once."""
    ids, parts, logprobs = list(range(5, 65)), [], []
    for turn in range(4):
        start = sum(map(len, parts))
        choice = chat(server, ids, "agent", return_routed_experts=True, routed_experts_start_len=start)
        meta = choice["meta_info"]
        assert choice["prompt_token_ids"] == ids and meta["prompt_tokens"] == len(ids)
        assert meta["cached_tokens"] == start, "all of the turn before but its last token, which has no KV"
        parts.append(rows(meta))
        assert len(parts[-1]) == len(ids) + 12 - 1 - start
        logprobs += [(len(ids) + i, entry[0]) for i, entry in enumerate(meta["output_token_logprobs"])]
        ids = [*ids, *choice["token_ids"], 70 + turn]
        flood(server)
    assert server.http.post("/flush_cache").status_code == 200
    body = {"input_ids": ids[:-1], "sampling_params": GREEDY | {"max_new_tokens": 0}, "return_logprob": True}
    scored = server.http.post("/generate", json=body | {"logprob_start_len": 0, "return_routed_experts": True}).json()
    assert (rows(scored["meta_info"]) == np.concatenate(parts)).all()
    values = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"]]
    assert [values[position] for position, _ in logprobs] == [value for _, value in logprobs]


def test_the_report_and_the_end_of_a_session(server: ServerProcess) -> None:
    first = list(range(100, 140))
    for session_id in ("one", "two"):
        chat(server, first, session_id)
    chat(server, [*first, 7, 8, 9], "two")
    report = server.http.get("/sessions/two").json()
    assert (report["num_finished"], report["prompt_tokens"], report["context_tokens"]) == (2, 83, 55)
    assert report["pinned_tokens"] == report["kv_tokens"] == 40 + 11 + 14 and 0 < report["expires_in_s"] <= 60
    everything = server.http.get("/sessions").json()
    assert everything["num_pinned_tokens"] < sum(one["pinned_tokens"] for one in everything["sessions"])
    state = server.http.get("/server_info").json()["internal_states"][0]
    assert state["num_pinned_tokens"] == everything["num_pinned_tokens"]
    released = server.http.post("/finish_session", params={"session_id": "two"}).json()["num_released_tokens"]
    assert released == 14, "the prompt and the first answer stay for the other one"
    assert server.http.get("/sessions/two").json()["kv_tokens"] == 0
    metrics = server.http.get("/metrics").text
    assert "lockstep:session_requests_total{model_name=" in metrics and 'session_id="two"} 2.0' in metrics
    log = server.log.read_text()  # type: ignore[attr-defined]
    assert "session 'two'" in log and "43 prompt tokens" in log


def test_a_commit_ends_what_is_kept(server: ServerProcess) -> None:
    chat(server, list(range(30, 90)), "agent")
    info = server.http.get("/server_info").json()
    body = {"model_path": info["model_path"], "weight_version": "next"}
    assert server.http.post("/update_weights_from_disk", json=body).status_code == 200
    assert server.http.get("/sessions").json()["num_pinned_tokens"] == 0
    assert chat(server, list(range(30, 90)), "agent")["meta_info"]["cached_tokens"] == 0
    assert chat(server, list(range(30, 90)), "agent")["meta_info"]["cached_tokens"] == 59


def test_pins_never_keep_a_request_from_running(server: ServerProcess) -> None:
    for first in range(4):
        chat(server, [first] * 110, f"s{first}")
    assert server.http.get("/sessions").json()["num_pinned_tokens"] > 400
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    prompts = [[50 + i] * (context - 8) for i in range(2 * POOL // context)]
    body = {"input_ids": prompts, "sampling_params": GREEDY | {"max_new_tokens": 8}}
    for reply in server.http.post("/generate", json=body).json():
        assert reply["meta_info"]["finish_reason"]["type"] == "length"


def test_parsing_changes_neither_tokens_nor_their_number(server: ServerProcess) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}]
    ids = list(range(60, 80))
    plain = chat(server, ids, logprobs=True)
    parsed = chat(server, ids, logprobs=True, tools=tools)
    assert parsed["token_ids"] == plain["token_ids"] and parsed["logprobs"] == plain["logprobs"]
    asked = {"input_ids": ids, "max_tokens": 12, "return_token_ids": True, "stream": True, "tools": tools} | GREEDY
    streamed: list[int] = []
    text = ""
    with server.http.stream("POST", "/v1/chat/completions", json=asked) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed += choice.get("token_ids", [])
                    text += choice["delta"].get("content", "") + choice["delta"].get("reasoning_content", "")
    assert streamed == plain["token_ids"] and text == parsed["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"input_ids": [5], "tools": [], "tool_choice": "required"}, 400),
        ("/v1/chat/completions", {"input_ids": [5], "tools": [1]}, 400),
        ("/v1/chat/completions", {"input_ids": [5], "tools": [{"function": 1}], "session_id": "x" * 600}, 400),
        ("/v1/chat/completions", {"input_ids": [5], "separate_reasoning": "perhaps"}, 400),
        ("/generate", {"input_ids": [5], "session_id": ["a"]}, 400),
        ("/finish_session", {}, 400),
    ],
)
def test_bad_input_is_one_clear_error(server: ServerProcess, path: str, body: dict[str, Any], status: int) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == status and reply.json()["error"]["message"]
