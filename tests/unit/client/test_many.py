"""Many generations: as they finish, bounded, each with its own error; progress; the end by Ctrl-C and by leaving."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from rollout.client import AsyncRolloutClient, GenerationOutput, RolloutClient, ServerError
from rollout.client import many as many_module
from rollout.client.loop_thread import LoopThread
from rollout.client.many import generate_many
from rollout.core.errors import BadRequest
from tests.canned_server import CannedServer, json_response, serving


def output(rid: str = "r", count: int = 2) -> GenerationOutput:
    return GenerationOutput(rid, "a", [1] * count, None, 1, count, 0, "v", [])


async def collect(generate: Any, requests: Any, concurrency: int = 8, **options: Any) -> list[Any]:
    return [item async for item in generate_many(generate, requests, concurrency, False, options)]


def test_results_come_as_they_finish() -> None:
    async def generate(prompt: str) -> GenerationOutput:
        await asyncio.sleep({"slow": 0.3, "middle": 0.15, "fast": 0.0}[prompt])
        return output(prompt)

    got = asyncio.run(collect(generate, ["slow", "middle", "fast"]))
    assert [(index, each.rid) for index, each in got] == [(2, "fast"), (1, "middle"), (0, "slow")]


def test_no_more_are_on_their_way_than_was_said_and_places_are_filled() -> None:
    running = most = 0

    async def generate(prompt: str) -> GenerationOutput:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (int(prompt) % 5))
        running -= 1
        return output(prompt)

    got = asyncio.run(collect(generate, (str(i) for i in range(300)), concurrency=13))
    assert sorted(index for index, _ in got) == list(range(300))
    assert all(each.rid == str(index) for index, each in got)
    assert most == 13


def test_endless_requests_are_read_as_there_is_room() -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for read in itertools.count(1):  # noqa: B007
            yield "a"

    async def generate(prompt: str) -> GenerationOutput:
        return output()

    async def use() -> None:
        items = generate_many(generate, endless(), 4, False, {})
        for _ in range(10):
            await anext(items)
            await asyncio.sleep(0.005)
        await items.aclose()

    asyncio.run(use())
    assert 10 <= read <= 10 + 3 * 4


def test_an_error_belongs_to_its_request() -> None:
    async def generate(prompt: str, **options: Any) -> GenerationOutput:
        if prompt == "bad":
            raise ServerError(400, "no")
        if prompt == "worse":
            raise TypeError("what is this")
        return output(prompt)

    got = dict(asyncio.run(collect(generate, ["a", "bad", "b", "worse", "c"], concurrency=2)))
    assert [type(got[i]) for i in range(5)] == [
        GenerationOutput,
        ServerError,
        GenerationOutput,
        TypeError,
        GenerationOutput,
    ]


def test_requests_that_raise_end_it_and_cancel_the_others() -> None:
    cancelled = []

    async def generate(prompt: str) -> GenerationOutput:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(prompt)
            raise
        return output()

    def broken() -> Iterator[str]:
        yield "a"
        yield "b"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(collect(generate, broken()), 10))
    assert sorted(cancelled) == ["a", "b"]
    with pytest.raises(BadRequest, match="concurrency"):
        asyncio.run(collect(generate, [], concurrency=0))


def test_a_request_has_its_own_arguments_over_those_of_all() -> None:
    asked = []

    async def generate(**arguments: Any) -> GenerationOutput:
        asked.append(arguments)
        return output()

    requests = ["text", [1, 2], {"prompt": "p", "sampling_params": {"n": 1}}, {"input_ids": [3], "rid": "r"}]
    asyncio.run(collect(generate, requests, 1, sampling_params={"top_k": 1}, priority=2))
    everyone = {"sampling_params": {"top_k": 1}, "priority": 2}
    assert asked == [
        {"prompt": "text", **everyone},
        {"input_ids": [1, 2], **everyone},
        {"prompt": "p", **everyone, "sampling_params": {"n": 1}},
        {"input_ids": [3], "rid": "r", **everyone},
    ]


def test_over_http_on_both_clients() -> None:
    def answer(body: Any) -> Any:
        if body["text"] == "7":
            return json_response({"error": {"message": "unlucky"}}, 400)
        meta = {"id": body["text"], "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 1}
        return {"text": "a", "output_ids": [1], "meta_info": meta}

    async def use(url: str) -> dict[int, Any]:
        async with AsyncRolloutClient(url) as client:
            return {i: each async for i, each in client.generate_many(map(str, range(50)), concurrency=9)}

    canned = CannedServer({"/generate": answer})
    with serving(canned) as url, RolloutClient(url) as client:
        for got in (dict(client.generate_many(map(str, range(50)), concurrency=9)), asyncio.run(use(url))):
            assert sorted(got) == list(range(50))
            assert isinstance(got.pop(7), ServerError)
            assert {i: each.rid for i, each in got.items()} == {i: str(i) for i in range(50) if i != 7}
    with pytest.raises(BadRequest):
        RolloutClient(transport=object()).generate_many([])  # type: ignore[arg-type]


def test_leaving_the_iterator_ends_its_thread_and_its_connections() -> None:
    canned = CannedServer()
    canned.answers["/generate"] = lambda body: (
        {"text": "a", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": None, "prompt_tokens": 1}}
    )
    before = threading.active_count()
    with serving(canned) as url, RolloutClient(url) as client:
        serving_threads = threading.active_count()
        for _ in client.generate_many(["a"] * 500, concurrency=3):
            break
        gc.collect()
        deadline = time.monotonic() + 10
        while threading.active_count() > serving_threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= serving_threads
    assert threading.active_count() <= before


def test_an_interrupt_cancels_what_the_loop_does() -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    loop = LoopThread()
    main = threading.get_ident()
    threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert ended.is_set()
    loop.close()
    loop.close()


def test_progress_is_drawn_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(prompt: str) -> GenerationOutput:
        if prompt == "3":
            raise ServerError(400, "no")
        return output(count=5)

    async def use() -> None:
        async for _ in generate_many(generate, [str(i) for i in range(20)], 4, True, {}):
            pass

    for is_terminal in (True, False):
        text = io.StringIO()
        console = Console(file=text, force_terminal=is_terminal, width=120)
        monkeypatch.setattr(many_module, "Console", lambda stderr, console=console: console)
        asyncio.run(use())
        if is_terminal:
            assert "95 tokens, 1 failed" in text.getvalue() and "20/20" in text.getvalue()
        else:
            assert text.getvalue() == ""
