"""`AsyncRolloutClient`: the client for one event loop.

Sends and waits; what is sent and how answers are read is in `calls`, `wire` and `generation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, Unpack

import httpx

from rollout.client import streams
from rollout.client.adapter_update import AdapterUpdate, AsyncAdapterUpdate
from rollout.client.brackets import AsyncWeightTransaction, WeightTransaction, in_loop, transaction
from rollout.client.calls import Calls
from rollout.client.errors import ClientError, ServerTimeout, ServerUnreachable
from rollout.client.many import Request, Result, generate_many
from rollout.client.method import Awaiting, do_awaiting
from rollout.client.pool import OneByOne
from rollout.client.retries import FIRST_WAIT_S, repeated
from rollout.client.transport import KEEPALIVE_S, read_reply, require_before
from rollout.client.types import GenerateOptions, GenerationOutput
from rollout.client.wire import Call, Steps

T = TypeVar("T")
ABORT_S = 5.0
"""Seconds that the abort of a stream may take as its reader leaves."""


class AsyncRolloutClient(Calls, Awaiting):
    """A rollout server at `base_url`: the methods of `RolloutClient` as coroutines, `stream` as an async iterator."""

    _http_client = httpx.AsyncClient
    _semaphore = asyncio.Semaphore

    def _new_transport(self) -> OneByOne:
        return OneByOne(KEEPALIVE_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def stream(
        self, prompt: str | Sequence[str] | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Do as `RolloutClient.stream` does, as an async iterator."""
        call = streams.stream(prompt, options)
        self._connection.request(call)  # refuse unsendable arguments here, not at the first output
        return self._events(self._stream_events(call, call.json or {}))

    def resume_stream(
        self, rid: str, /, from_token: int = 0, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Do as `RolloutClient.resume_stream` does, as an async iterator."""
        call = streams.rest_of_stream(rid, from_token, options.get("timeout"))
        return self._events(self._stream_events(call, dict(options) | {"rid": rid, "resumable": True}))

    def generate_many(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int = 64,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Yield (index, result) of each request as it finishes; at most `concurrency` are on their way.

        A request is a prompt, a list of token ids, or a mapping of arguments of `generate`; `options` are for all.  A
        request that fails gives its exception as its result, and the others go on.  `requests` may be endless: it is
        read as there is room.  `progress`: a bar on stderr, where that is a terminal.  Closing the iterator aborts the
        requests on their way.  Raises `BadRequest`, and any error that `requests` raises.
        """
        return generate_many(self.generate, requests, concurrency, progress, options)

    def weight_transaction(
        self, weight_version: str | None = None, coverage: str = "full", **begin_options: Any
    ) -> AbstractAsyncContextManager[AsyncWeightTransaction]:
        """Do as `RolloutClient.weight_transaction` does, for `async with`."""
        timeout_s, loop = self._connection.timeouts.weights, asyncio.get_running_loop()
        return in_loop(
            transaction({self.base_url: self}, loop, timeout_s, weight_version, coverage, "abort_all", begin_options)
        )

    def adapter_update(self, name: str) -> AsyncAdapterUpdate:
        """Do as `RolloutClient.adapter_update` does, for `async with`, with `send` to be awaited."""
        timeout_s, loop = self._connection.timeouts.weights, asyncio.get_running_loop()

        def begin(**options: Any) -> WeightTransaction:
            return transaction({self.base_url: self}, loop, timeout_s, None, "full", "abort_all", options)

        return AsyncAdapterUpdate(AdapterUpdate(name, begin))

    async def _do(self, steps: Steps[T]) -> T:
        return await do_awaiting(steps, self._exchange)

    async def _exchange(self, call: Call[T]) -> T:
        body = bytearray()
        try:
            async with self._opened(call) as response:
                deadline = time.monotonic() + self._connection.deadline(call)
                async for chunk in response.aiter_bytes():
                    body += chunk
                    require_before(deadline)
        except httpx.HTTPError as error:
            return self._connection.no_answer(error, call)
        return call.parse(read_reply(response, body))

    @contextlib.asynccontextmanager
    async def _opened(self, call: Call[Any]) -> AsyncIterator[httpx.Response]:
        """Send the call and yield the server's answer, its body unread.  A generation waits for its place first."""
        arguments = self._connection.request(call)
        async with contextlib.AsyncExitStack() as stack:
            if call.timeout == "generate":
                try:
                    async with asyncio.timeout(self._connection.deadline(call)):
                        await self._places.acquire()
                except TimeoutError:
                    raise ServerTimeout(self._connection.no_place(call)) from None
                stack.callback(self._places.release)
            yield await stack.enter_async_context(self._http.stream(**arguments))

    async def _open(self, stack: contextlib.AsyncExitStack, call: Call[Any]) -> Any:
        """Return the answer to a stream, which `stack` closes; read an error and raise it."""
        try:
            response = await stack.enter_async_context(self._opened(call))
            if not response.is_success:
                call.parse(read_reply(response, await response.aread()))
        except httpx.HTTPError as error:
            await stack.aclose()
            return self._connection.no_answer(error, call)
        except ClientError:
            await stack.aclose()
            raise
        return response

    async def _events(self, events: streams.Events) -> AsyncGenerator[GenerationOutput, None]:
        """Yield the outputs of a stream, over one connection or several."""
        try:
            while not events.done:
                try:
                    async with contextlib.aclosing(self._read(events)) as outputs:
                        async for output in outputs:
                            yield output
                except ServerUnreachable as error:
                    events.go_on_after(error)
                    await asyncio.sleep(FIRST_WAIT_S)
        except (GeneratorExit, asyncio.CancelledError):
            if events.rid is not None:
                with contextlib.suppress(ClientError, TimeoutError):
                    async with asyncio.timeout(ABORT_S):
                        await self.abort(events.rid)  # the server keeps a stream whose connection is closed
            raise

    async def _read(self, events: streams.Events) -> AsyncGenerator[GenerationOutput, None]:
        """Yield the outputs of one connection."""
        steps: Steps[Any] = repeated(events.call, self._retry_s)
        try:
            async with contextlib.AsyncExitStack() as stack:
                response = await do_awaiting(steps, functools.partial(self._open, stack))
                async for chunk in response.aiter_bytes():
                    for output in events.feed(chunk):
                        yield output
                    if events.done:
                        return
        except httpx.HTTPError as error:
            self._connection.no_answer(error, events.call)
        events.require_done()
