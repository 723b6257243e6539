"""Streams of OpenAI's and vLLM's doors that are cut and asked for again, event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple

import openai
import pytest

from rollout.core.errors import BadRequest, Conflict
from rollout.core.messages.io_struct import AbortReqInput
from rollout.http.io import DATA_EVENTS
from rollout.http.native import event_log, resumable
from rollout.http.native.event_log import EventLog
from tests.http_harness import Live

IDS = [40, 41, 42, 43, 44, 45]
USAGE = {"stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": IDS, "max_tokens": 24, "logprobs": 2, "return_token_ids": True, **USAGE},
    "/v1/chat/completions": {"input_ids": IDS, "max_tokens": 24, "n": 2, "return_token_ids": True, **USAGE},
    "/inference/v1/generate": {
        "token_ids": IDS, "sampling_params": {"max_tokens": 24, "logprobs": 1, "ignore_eos": True}, **USAGE,
    },
    "/v1/responses": {"input_ids": IDS, "max_output_tokens": 24, "return_token_record": True},
}  # fmt: skip
NAMES = {"/inference/v1/generate": "request_id"}


class Numbered(NamedTuple):
    """A server-sent event: its number, and its bytes."""

    number: int
    data: bytes


def body(path: str, rid: str, **fields: Any) -> dict[str, Any]:
    outlives = "background" if path == "/v1/responses" else "resumable"
    return BODIES[path] | {NAMES.get(path, "rid"): rid, "stream": True, outlives: True, "ignore_eos": True} | fields


def of_length(path: str, count: int) -> dict[str, Any]:
    """Return the fields by which a body asks for `count` tokens."""
    if path == "/inference/v1/generate":
        return {"sampling_params": {**BODIES[path]["sampling_params"], "max_tokens": count}}
    return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": count}


def numbered(live: Live, method: str, path: str, content: Any = None) -> Generator[Numbered, None, None]:
    """Yield the events of a stream; closing the iterator closes the connection."""
    with live.client.stream(method, path, json=content) as response:
        assert response.status_code == 200, response.read()
        event = b""
        for line in response.iter_lines():
            event += line.encode() + b"\n"
            if not line:
                yield Numbered(number_of(event), event)
                event = b""


def number_of(event: bytes) -> int:
    if event.startswith(b"id: "):
        return int(event[4 : event.index(b"\n")])
    found: int = json.loads(event.partition(b"data: ")[2])["sequence_number"]
    return found


def begun(live: Live, path: str, rid: str, **fields: Any) -> Generator[Numbered, None, None]:
    return numbered(live, "POST", path, body(path, rid, **fields))


def resumed(live: Live, path: str, rid: str, number: int) -> Generator[Numbered, None, None]:
    if path == "/v1/responses":
        return numbered(live, "GET", f"/v1/responses/{rid}?stream=true&starting_after={number - 1}")
    return numbered(live, "POST", "/generate/resume", {"rid": rid, "from_event": number})


def cut(live: Live, path: str, rid: str, count: int, **fields: Any) -> list[Numbered]:
    """Begin a stream, and close its connection after `count` events."""
    return taken(begun(live, path, rid, **fields), count)


def taken(stream: Generator[Numbered, None, None], count: int) -> list[Numbered]:
    """Return the first `count` events of a stream, and close its connection."""
    got = [next(stream) for _ in range(count)]
    stream.close()
    return got


@pytest.fixture(autouse=True)
def _waits_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "SWEEP_S", 0.02)


def content_of(path: str, got: list[Numbered]) -> Any:
    """Return what the events of a stream add up to: the tokens of each choice, or the last response."""
    chunks = [json.loads(each.data.partition(b"data: ")[2]) for each in got if b"[DONE]" not in each.data]
    if path == "/v1/responses":
        return chunks[-1]["response"]["token_record"]["output_token_ids"]
    tokens: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    assert chunks[-1]["usage"]["completion_tokens"] == sum(map(len, tokens.values()))
    return tokens


def require_whole(live: Live, path: str, rid: str, at: int) -> None:
    """Cut a stream at an event and go on twice.  Raises `AssertionError` unless all of it adds up to one stream."""
    first = cut(live, path, rid, at, **SLOW)
    middle = taken(resumed(live, path, rid, at), 3)
    rest = list(resumed(live, path, rid, at + 3))
    got = first + middle + rest
    assert [each.number for each in got] == list(range(len(got))), "events are lost, or come twice"
    assert list(resumed(live, path, rid, 0)) == got, "the same bytes again, also after the end"
    expected = [IDS[index % len(IDS)] for index in range(24)]
    choices = {0: expected, 1: expected} if path == "/v1/chat/completions" else {0: expected}
    assert content_of(path, got) == (expected if path == "/v1/responses" else choices)
    live.wait_until(lambda: live.manager.num_in_flight == 0)


SLOW = {"extra_key": "slow"}


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("path", BODIES)
def test_a_cut_stream_goes_on_with_the_next_event(live: Live, path: str, at: int) -> None:
    require_whole(live, path, f"cut-{at}", at)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_nobody_reads_runs_to_its_end(live: Live, path: str) -> None:
    got = cut(live, path, "alone", 2, **SLOW)
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    assert not any("alone" in message.rids for message in live.sent(AbortReqInput))
    if path == "/v1/responses":  # it is kept as any other
        live.wait_until(lambda: live.client.get("/v1/responses/alone").status_code == 200)
        kept = live.client.get("/v1/responses/alone").json()
        assert kept["background"] is True and len(kept["token_record"]["output_token_ids"]) == 24
    rest = list(resumed(live, path, "alone", 2))
    assert [each.number for each in got + rest] == list(range(2 + len(rest))) and len(rest) > 2


def test_openais_own_client_reads_numbered_events(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        chat = client.chat.completions.create(
            model="tiny", messages=[], stream=True, max_tokens=6,
            extra_body={"input_ids": IDS, "rid": "own", "resumable": True, "return_token_ids": True},
        )  # fmt: skip
        choices: list[Any] = [choice.to_dict() for chunk in chat for choice in chunk.choices]
        assert [token for choice in choices for token in choice.get("token_ids") or []] == IDS
        response = client.responses.create(
            model="tiny", input=[], stream=True, background=True, store=True,
            extra_body={"input_ids": IDS, "max_output_tokens": 6, "ignore_eos": True, **SLOW},
        )  # fmt: skip
        events: list[Any] = [next(response) for _ in range(2)]
        response.close()
        last = events[-1].sequence_number
        after = client.responses.retrieve(events[0].response.id, stream=True, starting_after=last)
        numbers = [event.sequence_number for event in after]
        assert numbers == list(range(2, 2 + len(numbers))) and len(numbers) > 2


def test_an_event_is_not_lost_with_the_reader_that_waited_for_it(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that makes its events in the tasks of its readers is noticed: a cut ends its stream."""

    async def more(self: EventLog) -> None:
        await self._make()

    monkeypatch.setattr(EventLog, "_more", more)
    monkeypatch.setattr(EventLog, "run_on", lambda self: None)
    with pytest.raises((AssertionError, StopIteration, RuntimeError)):
        require_whole(live, "/v1/completions", "wrong", 2)
    live.client.post("/abort_request", json={"abort_all": True})
    live.wait_until(lambda: live.manager.num_in_flight == 0)


def test_a_client_that_lost_its_stream_goes_on_behind_what_it_got(live: Live) -> None:
    """The error that ends it has no number of an event that it did not get."""
    lost = begun(live, "/v1/responses", "lost", **SLOW)
    first = [next(lost) for _ in range(3)]
    other = list(resumed(live, "/v1/responses", "lost", 3))
    seen = [*first, *lost]
    assert b'"code":"409"' in seen[-1].data
    cursor = seen[-1].number
    assert cursor == len(seen) - 2, "of the last event before the error"
    assert seen[:-1] + list(resumed(live, "/v1/responses", "lost", cursor + 1)) == first + other


def test_a_response_that_is_deleted_has_no_events(live: Live) -> None:
    cut(live, "/v1/responses", "deleted", 2, **SLOW)
    live.wait_until(lambda: live.client.get("/v1/responses/deleted").status_code == 200)
    again = begun(live, "/v1/responses", "deleted", **SLOW)
    first = [next(again) for _ in range(2)]
    assert live.client.delete("/v1/responses/deleted").status_code == 200, "of the first request of this name"
    rest = list(again)
    assert list(resumed(live, "/v1/responses", "deleted", 0)) == first + rest, "the second one runs on, and is kept"
    assert live.client.delete("/v1/responses/deleted").status_code == 200
    assert refusal(live, "/v1/responses", "deleted", 0)[0] == 404


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_aborted_and_forgotten_after_a_while(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "KEPT_S", 0.1)
    cut(live, path, "late", 2, **SLOW, **of_length(path, 120))  # else it may end by itself
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    live.wait_until(lambda: any("late" in name for message in live.sent(AbortReqInput) for name in message.rids))
    live.wait_until(lambda: refusal(live, path, "late", 0)[0] == 404)


def refusal(live: Live, path: str, rid: str, number: int) -> tuple[int, str]:
    if path == "/v1/responses":
        answer = live.client.get(f"/v1/responses/{rid}?stream=true&starting_after={number - 1}")
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]
    answer = live.client.post("/generate/resume", json={"rid": rid, "from_event": number})
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]


def test_the_bytes_of_events_count(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    list(begun(live, "/v1/completions", "big"))
    monkeypatch.setattr(resumable, "MAX_KEPT_BYTES", 9000)
    live.wait_until(lambda: refusal(live, "/v1/completions", "big", 0)[0] == 404)


@pytest.mark.parametrize("path", BODIES)
def test_an_event_that_is_not_there_is_refused(live: Live, path: str) -> None:
    got = list(begun(live, path, "whole"))
    status, message = refusal(live, path, "whole", 1000)
    assert status == 400 and f"{len(got)} events so far" in message
    assert list(resumed(live, path, "whole", len(got))) == []
    assert refusal(live, path, "nobody", 0)[0] == 404
    wrong = live.refused("/generate/resume", rid="whole", from_token=0)
    assert wrong[0] == 400 and "from_event" in wrong[1]
    assert live.refused("/generate/resume", rid="whole", from_token=0, from_event=0)[0] == 400


def test_a_stream_of_tokens_has_no_events(live: Live) -> None:
    fields = {"input_ids": IDS, "rid": "tokens", "resumable": True, "stream": True}
    live.client.post("/generate", json=fields)
    status, message = live.refused("/generate/resume", rid="tokens", from_event=0)
    assert status == 400 and "from_token" in message


NAMELESS: dict[str, Any] = {"rid": None, "request_id": None}
CANNOT: list[tuple[str, dict[str, Any]]] = [
    *((path, {"stream": False}) for path in BODIES),
    *((path, NAMELESS) for path in BODIES if path != "/v1/responses"),  # which names its responses itself
    ("/v1/responses", {"store": False}),
]


@pytest.mark.parametrize(("path", "fields"), CANNOT)
def test_a_stream_that_cannot_be_resumed_is_refused(live: Live, path: str, fields: dict[str, Any]) -> None:
    live.scheduler.received.clear()
    status, message = live.refused(path, **body(path, "x") | fields)
    assert status == 400 and ("stream" in message or "rid" in message)
    assert live.manager.num_in_flight == 0


# --- the log -----------------------------------------------------------------------------------------------------


async def counted(number: int, fails: bool = False) -> AsyncGenerator[bytes, None]:
    for index in range(number):
        await asyncio.sleep(0)
        yield b"%d" % index
    if fails:
        raise BadRequest("over")


async def rest(log: EventLog, number: int = 0) -> list[bytes]:
    return [event async for event in log.read(number)]


def test_an_error_is_an_event_of_the_log() -> None:
    async def scene() -> None:
        log = EventLog(counted(2, fails=True), DATA_EVENTS, shows_numbers=True)
        first = await rest(log)
        assert len(first) == 4 and b"over" in first[2] and first[3] == b"id: 3\ndata: [DONE]\n\n"
        assert await rest(log) == first and log.is_over and log.num_bytes == sum(map(len, first))

    asyncio.run(scene())


def test_a_log_keeps_the_newest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_LOG_BYTES", 60)

    async def scene() -> None:
        log = EventLog(counted(9), DATA_EVENTS, shows_numbers=False)
        everything = await rest(log)
        assert len(everything) == 10, "a reader at the end loses nothing"
        assert log.end == 10 and log.num_bytes <= 60
        oldest = next(number for number in range(10) if is_kept(log, number))
        assert 0 < oldest < 8 and await rest(log, oldest) == everything[oldest:]

    asyncio.run(scene())


def is_kept(log: EventLog, number: int) -> bool:
    try:
        log.require(number)
    except BadRequest as error:
        assert "not kept any more" in str(error)
        return False
    return True


def test_the_last_reader_takes_a_log_over() -> None:
    async def scene() -> None:
        log = EventLog(counted(5), DATA_EVENTS, shows_numbers=False)
        first = log.read(0)
        await anext(first)
        assert len(await rest(log, 1)) == 5
        with pytest.raises(Conflict):
            await anext(first)
        log.run_on()
        await asyncio.sleep(0.01)
        assert len(await rest(log)) == 6

    asyncio.run(scene())


def test_a_reader_of_known_events_lets_others_have_their_turn() -> None:
    """Thousands of events without a pause would hold up the process, and be written to a connection that is gone."""

    async def scene() -> None:
        log = EventLog(counted(200), DATA_EVENTS, shows_numbers=False)
        await rest(log)
        reading = asyncio.create_task(rest(log))
        turns = 0
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 100

    asyncio.run(scene())


def test_a_log_makes_no_more_events_than_are_read_until_it_runs_on() -> None:
    async def scene() -> None:
        log = EventLog(counted(50), DATA_EVENTS, shows_numbers=False)
        reader = log.read(0)
        await anext(reader)
        await asyncio.sleep(0.02)
        assert log.end == 1
        await reader.aclose()
        log.run_on()
        while not log.is_over:
            await asyncio.sleep(0)
        assert log.end == 51

    asyncio.run(scene())
