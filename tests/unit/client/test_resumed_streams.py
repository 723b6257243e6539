"""The client's streams over connections that break: through a proxy that cuts each one after some bytes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollout.client.async_client import AsyncRolloutClient
from rollout.client.client import RolloutClient
from rollout.client.errors import ResponseFormatError, ServerError, ServerUnreachable
from rollout.client.types import GenerationOutput, Timeouts
from rollout.core.errors import BadRequest
from rollout.core.messages.io_struct import AbortReqInput
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

NUM_NEW = 40
BODY: dict[str, Any] = {
    "input_ids": [5, 6, 7, 8],
    "sampling_params": {"max_new_tokens": NUM_NEW, "ignore_eos": True},
    "return_logprob": True,
    "return_routed_experts": True,
    "extra_key": "slow",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(write_model_folder(Path(tmp_path_factory.mktemp("model")))) as server:
        yield server


class CuttingProxy:
    """Passes connections on to a server, and closes connection i once `limits[i]` bytes of its answers went by.

    Further connections are passed on whole.
    """

    def __init__(self, target: str, limits: list[int]) -> None:
        self.num_cut = 0
        self._target = (urlsplit(target).hostname, urlsplit(target).port)
        self._limits = iter(limits)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                limit = next(self._limits, None)
                threading.Thread(target=self._pass_on, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, limit), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        left = limit
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data if left is None else data[:left])
                if left is not None and (left := left - len(data)) <= 0:
                    self.num_cut += 1
                    break
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def proxy(live: Live, limits: list[int]) -> Iterator[CuttingProxy]:
    one = CuttingProxy(live.url, limits)
    try:
        yield one
    finally:
        one.close()


def check(outputs: list[GenerationOutput], n: int = 1) -> None:
    """Hold outputs to one stream: tokens grow, nothing comes twice, and the last one of each sample is whole."""
    for index in range(n):
        own = [each for each in outputs if n == 1 or each.index == index]
        counts = [len(each.output_ids) for each in own]
        assert counts == sorted(counts) and len(own) == len({(len(o.output_ids), o.finish_reason) for o in own})
        last = own[-1]
        assert [each.finish_reason is None for each in own] == [True] * (len(own) - 1) + [False]
        assert last.output_ids == list(itertools.islice(itertools.cycle(BODY["input_ids"]), NUM_NEW))
        assert last.logprobs is not None and len(last.logprobs) == NUM_NEW and last.routed_experts is not None


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("limits", [[1500], [0], [900, 2500, 10], [10, 10, 4000]])
def test_a_stream_goes_on_over_broken_connections(live: Live, limits: list[int], n: int) -> None:
    body = BODY | {"sampling_params": BODY["sampling_params"] | {"n": n}}
    with proxy(live, limits) as between, RolloutClient(between.url) as client:
        if limits[0] < 100:  # so that the request is there before its connection breaks
            limits = limits[1:]
        outputs = list(client.stream(resumable=True, **body))
        assert between.num_cut >= len(limits)
    check(outputs, n)


def test_an_async_stream_goes_on_over_broken_connections(live: Live) -> None:
    async def read(url: str) -> list[GenerationOutput]:
        async with AsyncRolloutClient(url) as client:
            return [output async for output in client.stream(resumable=True, **BODY)]

    with proxy(live, [1500, 3000]) as between:
        check(asyncio.run(read(between.url)))
        assert between.num_cut == 2


def test_without_the_option_a_broken_connection_ends_a_stream(live: Live) -> None:
    with proxy(live, [1500]) as between, RolloutClient(between.url) as client, pytest.raises(ServerUnreachable):
        list(client.stream(**BODY))


def test_a_stream_that_cannot_go_on_is_given_up(live: Live) -> None:
    with (
        proxy(live, [1500, *[10] * 1000]) as between,
        RolloutClient(between.url, timeouts=Timeouts(retry=0.5)) as client,
        pytest.raises(ServerUnreachable),
    ):
        list(client.stream(resumable=True, rid="lost", **BODY))
    live.client.post("/abort_request", json={"rid": "lost"})


def test_another_client_takes_a_stream_over(live: Live) -> None:
    with RolloutClient(live.url) as first, RolloutClient(live.url) as second:
        stream = first.stream(resumable=True, rid="mine", **BODY)
        assert len(next(stream).output_ids) < NUM_NEW
        outputs = list(second.resume_stream("mine", 1, **BODY))
        assert min(len(each.output_ids) for each in outputs) > 1
        check(outputs)
        with pytest.raises(ServerError, match="one reader"):
            list(stream)


def test_leaving_a_resumable_stream_aborts_it(live: Live) -> None:
    async def leave() -> None:
        async with (
            AsyncRolloutClient(live.url) as client,
            contextlib.aclosing(client.stream(resumable=True, rid="async", **BODY)) as stream,
        ):
            async for _ in stream:
                break

    with RolloutClient(live.url) as client:
        stream = client.stream(resumable=True, rid="sync", **BODY)
        next(stream)
        stream.close()
    asyncio.run(leave())
    live.wait_until(lambda: {"sync", "async"} <= {rid for message in live.sent(AbortReqInput) for rid in message.rids})
    live.wait_until(lambda: live.manager.num_in_flight == 0)


def test_what_the_client_cannot_read_is_refused(live: Live) -> None:
    body = BODY | {"extra_body": {"stream_format": "incremental"}}
    with RolloutClient(live.url) as client:
        with pytest.raises(BadRequest, match="leave out stream_format"):
            client.stream(**body)
        live.client.post(
            "/generate",
            json={"input_ids": [5], "rid": "parts", "stream": True, "stream_format": "incremental", "resumable": True},
        )
        with pytest.raises(ResponseFormatError, match="is incremental"):
            list(client.resume_stream("parts"))
        with pytest.raises(ServerError, match="Send the request again"):
            list(client.resume_stream("nobody"))
