"""Requests that the client makes again and requests that it never does, against servers that misbehave on the wire."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import pytest

from rollout.client import (
    AsyncRolloutClient,
    ResponseFormatError,
    RolloutClient,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
    Timeouts,
)
from rollout.client import retries as retries_module
from tests.canned_server import CannedServer, RawServer, json_response, raw_reply, serving

SAMPLE = {
    "text": "a",
    "output_ids": [1, 2],
    "meta_info": {"id": "r", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 1},
}
WHOLE = raw_reply(json.dumps(SAMPLE).encode())
BUSY = raw_reply(b'{"error": {"type": "Unavailable", "message": "the server is starting"}}', "503 Service Unavailable")
INFO = raw_reply(b'{"model_path": "m"}')
PATIENT = Timeouts(retry=5.0)


def on_both(url: str, call: Any, timeouts: Timeouts) -> list[Any]:
    """Return what `call(client)` returns or raises on the synchronous client and on the asynchronous one."""

    async def use() -> Any:
        async with AsyncRolloutClient(url, timeouts=timeouts) as client:
            return await call(client)

    results = []
    for one in (lambda: _blocking(url, call, timeouts), lambda: asyncio.run(use())):
        try:
            results.append(one())
        except Exception as error:
            results.append(error)
    return results


def _blocking(url: str, call: Any, timeouts: Timeouts) -> Any:
    with RolloutClient(url, timeouts=timeouts) as client:
        return call(client)


@pytest.mark.parametrize("breaks", [b"", WHOLE[:-5], WHOLE[:30], b"HTTP/9 what\r\n\r\n"])
def test_a_generation_whose_connection_broke_is_not_made_again(breaks: bytes) -> None:
    server = RawServer([breaks, WHOLE])
    with server.serving() as url:
        with RolloutClient(url, timeouts=PATIENT) as client, pytest.raises(ServerUnreachable) as caught:
            client.generate("hi")
        assert caught.value.was_sent
        time.sleep(0.3)
        assert len(server.heard) == 1


@pytest.mark.parametrize("breaks", [b"", INFO[:-5], BUSY])
def test_what_only_reads_is_made_again(breaks: bytes) -> None:
    for call in (lambda c: c.model_info(), lambda c: c.server_info()):
        server = RawServer([breaks, INFO])
        with server.serving() as url:
            assert on_both(url, call, PATIENT) == [{"model_path": "m"}] * 2
        assert len(server.heard) == 3


def test_a_generation_that_the_server_did_not_take_is_made_again() -> None:
    for call in (lambda c: c.generate("hi"), lambda c: c.pause()):
        server = RawServer([BUSY, BUSY, WHOLE])
        with server.serving() as url, RolloutClient(url, timeouts=PATIENT) as client:
            call(client)
        assert len(server.heard) == 3


def test_a_stream_that_the_server_did_not_take_is_made_again_but_none_that_has_begun() -> None:
    event = b"data: " + json.dumps(SAMPLE | {"meta_info": {"id": "r", "finish_reason": None}}).encode() + b"\n\n"
    begun = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + event
    server = RawServer([BUSY, BUSY, begun + event])

    async def collect(url: str) -> int:
        count = 0
        async with AsyncRolloutClient(url, timeouts=PATIENT) as client:
            with pytest.raises(ResponseFormatError, match="ended before the request was finished"):
                async for _ in client.stream("hi"):
                    count += 1
        return count

    with server.serving() as url:
        with RolloutClient(url, timeouts=PATIENT) as client:
            stream = client.stream("hi")
            assert [next(stream).output_ids, next(stream).output_ids] == [[1, 2]] * 2
            with pytest.raises(ResponseFormatError, match="ended before the request was finished"):
                next(stream)
        assert len(server.heard) == 3
        assert asyncio.run(collect(url)) == 2
    assert len(server.heard) == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.end_weight_update(),
        lambda c: c.begin_weight_update(),
        lambda c: c.update_weights_from_disk("/m"),
        lambda c: c.abort_all(),
        lambda c: c.release_memory_occupation(),
    ],
)
@pytest.mark.parametrize("answer", [b"", BUSY])
def test_verbs_that_change_weights_or_abort_are_sent_once(call: Any, answer: bytes) -> None:
    server = RawServer([answer, raw_reply(b'{"success": true}')])
    with server.serving() as url, RolloutClient(url, timeouts=PATIENT) as client:
        with pytest.raises((ServerUnreachable, ServerError)):
            call(client)
        time.sleep(0.3)
    assert len(server.heard) == 1


def test_a_refusal_that_is_not_about_serving_is_not_asked_again() -> None:
    server = RawServer([raw_reply(b'{"error": "no"}', "400 Bad Request"), WHOLE])
    with server.serving() as url:
        results = on_both(url, lambda c: c.generate("hi"), PATIENT)
    assert str(results[0]) == "no (HTTP 400)" and isinstance(results[0], ServerError)
    assert len(server.heard) == 2  # once by each


def test_a_server_that_starts_late_gets_the_request() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    canned = CannedServer({"/generate": SAMPLE})

    def start_late() -> None:
        time.sleep(0.4)
        raw = RawServer([WHOLE])
        with socket.create_server(("127.0.0.1", port)) as listener:
            for _ in range(2):
                raw.answer(listener.accept()[0])

    thread = threading.Thread(target=start_late)
    thread.start()
    results = on_both(f"http://127.0.0.1:{port}", lambda c: c.generate("hi"), PATIENT)
    thread.join(10)
    assert [output.output_ids for output in results] == [[1, 2]] * 2
    assert canned.asked == []


def test_the_server_says_when_to_ask_again() -> None:
    wait = raw_reply(b"{}", "503 Service Unavailable", "Retry-After: 1")
    server = RawServer([wait, WHOLE])
    with server.serving() as url, RolloutClient(url, timeouts=PATIENT) as client:
        start = time.monotonic()
        client.generate("hi")
        assert time.monotonic() - start >= 1.0
    server = RawServer([raw_reply(b"{}", "503 Service Unavailable", "Retry-After: 60")])
    with server.serving() as url, RolloutClient(url, timeouts=PATIENT) as client:
        start = time.monotonic()
        with pytest.raises(ServerError) as caught:
            client.generate("hi")
        assert caught.value.retry_after_s == 60.0
        assert time.monotonic() - start < 3, "it is asked within the deadline or not at all"


def test_repeating_ends_at_its_deadline() -> None:
    server = RawServer([BUSY])
    with server.serving() as url:
        start = time.monotonic()
        results = on_both(url, lambda c: c.generate("hi"), Timeouts(retry=0.5))
        assert time.monotonic() - start < 4
    assert [type(result) for result in results] == [ServerError] * 2
    assert "the server is starting" in str(results[0])
    assert 4 <= len(server.heard) <= 12


def test_an_answer_in_drops_has_a_deadline() -> None:
    """Each byte comes in time, and the whole answer does not."""
    for call in (lambda c: c.generate("hi"), lambda c: c.model_info()):
        server = RawServer([raw_reply(b" " * 500 + json.dumps(SAMPLE).encode())], pause_s=0.005)
        with server.serving() as url:
            start = time.monotonic()
            results = on_both(url, call, Timeouts(control=0.3, generate=0.3, retry=0))
            assert time.monotonic() - start < 10
        assert all(isinstance(result, ServerTimeout) for result in results), results


def test_answers_that_are_no_json_are_said() -> None:
    for body in (b"<html>", b"[1, 2", b"\xff\xfe", b"[" * 100_000, b"null", b"{}"):
        with RawServer([raw_reply(body)]).serving() as url:
            results = on_both(url, lambda c: c.generate("hi"), PATIENT)
        assert [type(result) for result in results] == [ResponseFormatError] * 2


@pytest.mark.mutant
def test_a_policy_that_repeats_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries_module, "is_safe", lambda call, error: True)
    with pytest.raises(pytest.fail.Exception):
        test_a_generation_whose_connection_broke_is_not_made_again(b"")
    with pytest.raises(pytest.fail.Exception):
        test_verbs_that_change_weights_or_abort_are_sent_once(lambda c: c.end_weight_update(), BUSY)


def test_control_does_not_wait_behind_generations() -> None:
    """A generation that never ends holds the only place; a second generation waits, and a pause does not."""
    release = threading.Event()

    def hold(body: Any) -> Any:
        return json_response(SAMPLE)

    canned = CannedServer({"/pause_generation": {"paused": True}, "/abort_request": json_response({})})

    async def use(url: str) -> None:
        async with AsyncRolloutClient(url, max_connections=1, timeouts=Timeouts(generate=20)) as client:
            stream = client.stream("a")
            await anext(stream)
            waiting = asyncio.create_task(client.generate("b"))
            await asyncio.sleep(0.2)
            assert sum(asked.path == "/generate" for asked in canned.asked) == 1
            await asyncio.wait_for(client.pause(), 5)
            await asyncio.wait_for(client.abort("b"), 5)
            with pytest.raises(ServerTimeout, match="made room"):
                await client.generate("c", timeout=0.2)
            canned.answers["/generate"] = hold
            await stream.aclose()
            assert (await waiting).output_ids == [1, 2]

    event = b'data: {"text": "a", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": null}}\n\n'
    canned.answers["/generate"] = canned.stream_forever(event)
    with serving(canned) as url:
        asyncio.run(asyncio.wait_for(use(url), 30))
        canned.answers["/generate"] = canned.stream_forever(event)
        with RolloutClient(url, max_connections=1) as client:
            blocking = client.stream("a")
            next(blocking)
            with pytest.raises(ServerTimeout, match="made room"):
                client.generate("c", timeout=0.2)
            client.pause()
            blocking.close()
    release.set()
