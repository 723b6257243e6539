"""`AsyncRolloutClient`: the client for one event loop.

Sends and waits; what is sent and how answers are read is in `calls`, `wire` and `generation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar, Unpack

import httpx

from rollout.client import generation, wire
from rollout.client.calls import Calls
from rollout.client.method import Awaiting, Steps
from rollout.client.types import GenerateOptions, GenerationOutput

T = TypeVar("T")


class AsyncRolloutClient(Calls, Awaiting):
    """A rollout server at `base_url`: the methods of `RolloutClient` as coroutines, `stream` as an async iterator."""

    _http_client = httpx.AsyncClient

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def stream(
        self, prompt: str | Sequence[str] | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationOutput, None]:
        """The outputs of a generation as they grow, each cumulative.  Closing the iterator aborts the request."""
        call = generation.stream(prompt, options)
        return self._events(call, self._connection.request(call))

    async def _do(self, steps: Steps[T]) -> T:
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(step, wire.Call):
                result = await self._exchange(step)
            else:
                await asyncio.sleep(step)

    async def _exchange(self, call: wire.Call[T]) -> T:
        arguments = self._connection.request(call)
        try:
            response = await self._http.request(**arguments)
        except httpx.HTTPError as error:
            return self._connection.no_answer(error, call)
        return call.parse(wire.Reply(response.status_code, response.content))

    async def _events(self, call: wire.Call[None], arguments: dict[str, Any]) -> AsyncGenerator[GenerationOutput, None]:
        events = generation.Events(call.json or {}, self._layout)
        try:
            async with self._http.stream(**arguments) as response:
                if not response.is_success:
                    call.parse(wire.Reply(response.status_code, await response.aread()))
                async for chunk in response.aiter_bytes():
                    for output in events.feed(chunk):
                        yield output
                    if events.done:
                        return
        except httpx.HTTPError as error:
            self._connection.no_answer(error, call)
        events.require_done()
