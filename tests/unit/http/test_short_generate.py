"""The short way of /generate answers what the long way answers, and refuses nothing by itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout.core.messages.io_struct import AbortReqInput, TokenizedGenerateReqInput
from rollout.core.messages.req_output import AdapterCard, AdapterLabel, FinishReason
from rollout.http.native import short_generate
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.served_names import ServedNames
from tests.http_harness import Live, live_server

PARAMS = {"max_new_tokens": 6, "temperature": 0.7}
PROMPT = [65, 66, 67, 68]
FORMS: list[dict[str, Any]] = [
    {},
    {"input_ids": None, "text": "hello there"},
    {"return_logprob": True, "return_routed_experts": True},
    {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2, "return_text_in_logprobs": True},
    {"return_logprob": True, "logprobs_format": "compact", "routed_experts_format": "compact"},
    {"return_prompt_token_ids": True, "session_id": "s", "priority": 3, "routed_experts_start_len": 2},
    {"sampling_params": PARAMS | {"stop": ["x"], "no_such_field": 1}},
    {"sampling_params": PARAMS | {"ignore_eos": True, "max_new_tokens": 0}},
]
OF_ONE = ("input_ids", "text", "rid", "session_id")
CHANGING = ("id", "e2e_latency")
REFUSED: list[dict[str, Any]] = [
    {"input_ids": []},
    {"input_ids": [65, 300] * 3},
    {"input_ids": [65, -1] * 3},
    {"input_ids": [65] * 158},
    {"input_ids": [65] * 4000},
    {"input_ids": [[65], [65] * 300]},
    {"input_ids": None, "text": ""},
    {"text": "both"},
    {"input_ids": None},
    {"rid": ""},
    {"rid": "r" * 513},
    {"session_id": ""},
    {"session_id": "s" * 513},
    {"sampling_params": []},
    {"sampling_params": PARAMS | {"n": 0}},
    {"routed_dp_rank": 1},
    {"logprob_start_len": 5},
]


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder) as server:
        yield server


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each request on the long way."""
    found: list[int] = []
    submit = TokenizerManager.submit

    def counted(self: TokenizerManager, request: Any) -> Any:
        found.append(1)
        return submit(self, request)

    monkeypatch.setattr(TokenizerManager, "submit", counted)
    return found


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    whole = {"input_ids": PROMPT, "sampling_params": PARAMS} | fields
    return {name: value for name, value in whole.items() if value is not None}


def answer_to(live: Live, fields: dict[str, Any], accept: str = "application/json") -> tuple[Any, dict[str, str]]:
    """Return the answer without what is another one each time, and its headers."""
    response = live.client.post("/generate", json=body_of(fields), headers={"accept": accept})
    assert response.status_code == 200, response.text
    headers = {name: value for name, value in response.headers.items() if name not in ("date", "content-length")}
    content = response.json() if accept == "application/json" else msgspec.msgpack.decode(response.content)
    for name in CHANGING:
        del content["meta_info"][name]
    return content, headers


@pytest.mark.parametrize("accept", ["application/json", "application/x-msgpack"])
@pytest.mark.parametrize("fields", FORMS)
def test_both_ways_give_the_same_answer(live: Live, fields: dict[str, Any], accept: str, long_ways: list[int]) -> None:
    first = answer_to(live, fields | {"priority": 7}, accept)
    assert long_ways == [1]
    assert answer_to(live, fields | {"priority": 7}, accept) == first
    assert long_ways == [1], "the second one takes the short way"


def test_streams_lists_and_keys_take_the_long_way(live: Live, long_ways: list[int]) -> None:
    others: list[dict[str, Any]] = [{"stream": True}, {"input_ids": [PROMPT]}, {"extra_key": "k"}, {"cache_salt": "k"}]
    others += [{"sampling_params": PARAMS | {"n": 2}}, {"routed_dp_rank": 0}]
    for fields in others * 2:
        assert live.client.post("/generate", json=body_of(fields)).status_code == 200
    for name in ("x-session-id", "x-data-parallel-rank"):
        for _ in range(2):
            assert live.client.post("/generate", json=body_of({}), headers={name: "0"}).status_code == 200
    assert len(long_ways) == 2 * len(others) + 4


def refusals(live: Live) -> list[tuple[int, str]]:
    """Return status and body of each refusal, for forms that are known."""
    found = []
    for fields in REFUSED:
        known = {
            name: value for name, value in fields.items() if name not in ("input_ids", "text", "rid", "session_id")
        }
        for passing in (body_of({}), body_of({"input_ids": PROMPT * 9})):
            live.client.post("/generate", json=passing | known)
        response = live.client.post("/generate", json=body_of(fields))
        found.append((response.status_code, response.text))
    return found


def test_what_is_wrong_is_refused_as_on_the_long_way(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    found = refusals(live)
    assert all(400 <= status < 500 for status, _ in found), found
    monkeypatch.setattr(short_generate.ShortGenerate, "_take", lambda *_: False)
    assert refusals(live) == found


def test_a_pattern_that_fits_any_token_would_be_seen(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    right = refusals(live)
    monkeypatch.setattr(short_generate._Pattern, "fits", lambda self, ids: self.shortest <= len(ids) <= self.longest)
    assert refusals(live) != right


def test_a_known_form_keeps_its_adapter(live: Live, long_ways: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [AdapterCard(AdapterLabel(name, 0, "0" * 64)) for name in ("poet", "clerk")]
    names = ServedNames(cards=cards)
    monkeypatch.setattr(live.manager, "_limits", replace(live.manager.limits, names=names))
    live.scheduler.received.clear()
    for name in ("poet", "clerk", None) * 2:
        live.generate(**body_of({"lora_path": name}))
    assert [each.lora_name for each in live.sent(TokenizedGenerateReqInput)] == ["poet", "clerk", None] * 2
    assert len(long_ways) == 3, "one for each adapter"
    assert live.refused(**body_of({"lora_path": "other"}))[0] == 404


def test_lengths_between_those_that_passed_need_no_check(live: Live, long_ways: list[int]) -> None:
    for count in (5, 40, 20, 6, 39, 41, 4, 4, 41):
        live.generate(**body_of({"input_ids": [65] * count, "priority": 11}))
    assert len(long_ways) == 4  # 5, 40, 41, 4


def test_a_name_in_use_is_refused(live: Live) -> None:
    live.generate(**body_of({"rid": "first"}))
    live.scheduler.paused = True
    try:
        with held(live, {"rid": "taken"}):
            status, message = live.refused(**body_of({"rid": "taken"}))
            assert status == 400 and "in flight" in message
    finally:
        live.scheduler.paused = False
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    live.generate(**body_of({"rid": "taken"}))


class held:
    """A request on a connection of its own, which is closed at the end of the block."""

    def __init__(self, live: Live, fields: dict[str, Any]) -> None:
        self._live = live
        self._data = raw(body_of(fields))
        self.socket = socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2])))

    def __enter__(self) -> socket.socket:
        before = self._live.manager.num_in_flight
        self.socket.sendall(self._data)
        self._live.wait_until(lambda: self._live.manager.num_in_flight == before + 1)
        return self.socket

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def raw(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def test_a_client_that_goes_away_aborts_its_request(live: Live, long_ways: list[int]) -> None:
    live.generate(**body_of({}))
    long_ways.clear()
    live.scheduler.paused = True
    try:
        with held(live, {"rid": "gone"}):
            pass
        live.wait_until(lambda: ["gone"] in [abort.rids for abort in live.sent(AbortReqInput)])
    finally:
        live.scheduler.paused = False
    assert not long_ways
    live.wait_until(lambda: live.manager.num_in_flight == 0)


def test_a_client_that_goes_away_behind_another_request_aborts_the_first(live: Live, long_ways: list[int]) -> None:
    live.generate(**body_of({}))
    long_ways.clear()
    live.scheduler.paused = True
    try:
        with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
            connection.sendall(raw(body_of({"rid": "before"})) + raw(body_of({"rid": "behind"})))
            live.wait_until(lambda: live.manager.num_in_flight == 1)
        live.wait_until(lambda: ["before"] in [abort.rids for abort in live.sent(AbortReqInput)])
    finally:
        live.scheduler.paused = False
    assert not long_ways
    live.wait_until(lambda: live.manager.num_in_flight == 0)


def test_an_error_on_the_short_way_is_answered_and_ends_with_its_request(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.generate(**body_of({}))
    with monkeypatch.context() as patch:
        patch.setattr(live.manager, "submit_checked", None)
        live.generate(**body_of({}))
    live.generate(**body_of({}))


def test_requests_in_pieces_and_one_after_the_other_are_answered_in_order(live: Live, long_ways: list[int]) -> None:
    live.generate(**body_of({}))
    long_ways.clear()
    live.scheduler.received.clear()
    data = b"".join(raw(body_of({"rid": f"p{number}"})) for number in range(3))
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
        connection.settimeout(10.0)
        for first in range(0, len(data), 61):
            connection.sendall(data[first : first + 61])
        answers = b""
        while answers.count(b'"id":"p') < 3:
            answers += connection.recv(65536)
    assert [answers.index(b'"id":"p%d"' % number) for number in range(3)] == sorted(
        answers.index(b'"id":"p%d"' % number) for number in range(3)
    )
    assert [each.rid for each in live.sent(TokenizedGenerateReqInput)] == ["p0", "p1", "p2"]


def test_a_refusal_of_the_scheduler_reaches_the_client(live: Live, long_ways: list[int]) -> None:
    live.generate(**body_of({}))
    long_ways.clear()
    live.scheduler.refusal = FinishReason(type="abort", message="the queue is full", status_code=503)
    try:
        assert live.refused(**body_of({})) == (503, "the queue is full")
    finally:
        live.scheduler.refusal = None
    assert not long_ways
    assert any(each["reason"] == "the queue is full" for each in live.history.refusals.entries())


def test_large_answers_are_made_off_the_event_loop(
    live: Live, long_ways: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"return_logprob": True, "priority": 21}
    first = answer_to(live, fields)
    monkeypatch.setattr("rollout.tokenizer_manager.handle.HEAVY", 0)
    assert answer_to(live, fields) == first and long_ways == [1]


def test_a_key_and_other_sites_are_checked(folder: Path) -> None:
    with live_server(folder, api_key="key") as server:
        for key, status in (("key", 200), ("key", 200), ("other", 401), ("", 401), ("key", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert server.client.post("/generate", json=body_of({}), headers=headers).status_code == status
    with live_server(folder) as server:
        for origin, status in ((None, 200), (None, 200), ("http://evil.example", 403), (None, 200)):
            headers = {} if origin is None else {"origin": origin}
            assert server.client.post("/generate", json=body_of({}), headers=headers).status_code == status


def test_requests_in_flight_fail_with_the_scheduler(folder: Path) -> None:
    with live_server(folder) as server:
        server.generate(**body_of({}))
        server.scheduler.paused = True
        with held(server, {}) as connection:
            server.call_in_loop(lambda: server.manager.fail("the scheduler process ended"))
            connection.settimeout(10.0)
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"the scheduler process ended" in answer
