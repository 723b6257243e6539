"""`RolloutClient`: the synchronous client.  Safe to share between threads.

Sends and waits; what is sent and how answers are read is in `calls`, `wire` and `generation`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, TypeVar, Unpack

import httpx

from rollout.client import generation, wire
from rollout.client.calls import Calls
from rollout.client.method import Blocking, Steps
from rollout.client.types import GenerateOptions, GenerationOutput

T = TypeVar("T")


class RolloutClient(Calls, Blocking):
    """A rollout server at `base_url`.  `AsyncRolloutClient` has the same methods as coroutines.

    Every method may raise `ServerError` (the server refused), `ServerUnreachable`, `ServerTimeout`,
    `ResponseFormatError`, and `BadRequest` for arguments that cannot be sent.  The methods of weight refresh return the
    server's answer and are what a `weight_sync` sender asks of its control side.
    """

    _http_client = httpx.Client

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stream(
        self, prompt: str | Sequence[str] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerationOutput, None, None]:
        """The outputs of a generation as they grow, each cumulative.  Closing the iterator aborts the request."""
        call = generation.stream(prompt, options)
        return self._events(call, self._connection.request(call))

    def _do(self, steps: Steps[T]) -> T:
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(step, wire.Call):
                result = self._exchange(step)
            else:
                time.sleep(step)

    def _exchange(self, call: wire.Call[T]) -> T:
        arguments = self._connection.request(call)
        try:
            response = self._http.request(**arguments)
        except httpx.HTTPError as error:
            return self._connection.no_answer(error, call)
        return call.parse(wire.Reply(response.status_code, response.content))

    def _events(self, call: wire.Call[None], arguments: dict[str, Any]) -> Generator[GenerationOutput, None, None]:
        events = generation.Events(call.json or {}, self._layout)
        try:
            with self._http.stream(**arguments) as response:
                if not response.is_success:
                    call.parse(wire.Reply(response.status_code, response.read()))
                for chunk in response.iter_bytes():
                    yield from events.feed(chunk)
                    if events.done:
                        return
        except httpx.HTTPError as error:
            self._connection.no_answer(error, call)
        events.require_done()
