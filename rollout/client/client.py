"""`RolloutClient`: the synchronous client.  Safe to share between threads.

Sends and waits; what is sent and how answers are read is in `calls`, `wire` and `generation`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar, Unpack

import httpx

from rollout.client import streams
from rollout.client.adapter_update import AdapterUpdate
from rollout.client.async_client import AsyncRolloutClient
from rollout.client.brackets import WeightTransaction, transaction
from rollout.client.calls import Calls
from rollout.client.errors import ClientError, ServerTimeout, ServerUnreachable
from rollout.client.loop_thread import LoopThread
from rollout.client.many import Request, Result, generate_many
from rollout.client.method import Blocking, do_blocking
from rollout.client.retries import FIRST_WAIT_S, repeated
from rollout.client.transport import read_reply, require_before
from rollout.client.types import GenerateOptions, GenerationOutput
from rollout.client.wire import Call, Steps
from rollout.core.errors import BadRequest

T = TypeVar("T")


class RolloutClient(Calls, Blocking):
    """A rollout server at `base_url`.  `AsyncRolloutClient` has the same methods as coroutines.

    Every method may raise `ServerError` (the server refused), `ServerUnreachable`, `ServerTimeout`,
    `ResponseFormatError`, and `BadRequest` for arguments that cannot be sent.  The methods of weight refresh return the
    server's answer and are what a `weight_sync` sender asks of its control side.
    """

    _http_client = httpx.Client
    _semaphore = threading.Semaphore

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stream(
        self, prompt: str | Sequence[str] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerationOutput, None, None]:
        """Yield the outputs of a generation as they grow, each cumulative.  Closing the iterator aborts the request.

        With `resumable` a broken connection is made again for `Timeouts.retry` seconds, and the stream goes on.
        """
        call = streams.stream(prompt, options)
        self._connection.request(call)  # refuse unsendable arguments here, not at the first output
        return self._events(self._stream_events(call, call.json or {}))

    def resume_stream(
        self, rid: str, /, from_token: int = 0, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerationOutput, None, None]:
        """Yield the outputs of a resumable stream that have more than `from_token` tokens, and its last one.

        `options`: the ones that it was asked with.  A reader that the stream still has loses it.
        """
        call = streams.rest_of_stream(rid, from_token, options.get("timeout"))
        return self._events(self._stream_events(call, dict(options) | {"rid": rid, "resumable": True}))

    def generate_many(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int = 64,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Generator[tuple[int, Result], None, None]:
        """Run `AsyncRolloutClient.generate_many` on a thread of its own, which also reads `requests`.

        Ctrl-C, and closing the iterator, abort the requests on their way.
        """
        if self._has_transport:
            raise BadRequest("generate_many uses its own asynchronous client, which cannot take this transport")
        return self._many(requests, concurrency, progress, options)

    def weight_transaction(
        self, weight_version: str | None = None, coverage: str = "full", **begin_options: Any
    ) -> WeightTransaction:
        """Return a context manager that begins a weight update and ends it with the block, or aborts it on an error.

        The block sends the content by `update.send(...)`.  `begin_options`: further arguments of `begin_weight_update`.
        For broadcasts from a model see `weight_sync.sender`.
        Raises `EngineError` with the refusal; unless it states otherwise, or staging is `in_place`, old weights serve.
        """
        timeout_s = self._connection.timeouts.weights
        return transaction({self.base_url: self}, None, timeout_s, weight_version, coverage, "abort_all", begin_options)

    def adapter_update(self, name: str) -> AdapterUpdate:
        """Return a context manager that makes a PEFT model's adapter the next version of adapter `name`.

        The block sends it by `update.send(model)`.  Raises as `weight_transaction`.
        """
        return AdapterUpdate(name, self.weight_transaction)

    def _many(
        self, requests: Iterable[Request], concurrency: int, progress: bool, options: GenerateOptions
    ) -> Generator[tuple[int, Result], None, None]:
        with contextlib.closing(LoopThread()) as loop:
            client = AsyncRolloutClient(**self._settings)
            try:
                yield from loop.iterate(generate_many(client.generate, requests, concurrency, progress, options))
            finally:
                loop.run(client.close())

    def _do(self, steps: Steps[T]) -> T:
        return do_blocking(steps, self._exchange)

    def _exchange(self, call: Call[T]) -> T:
        body = bytearray()
        try:
            with self._opened(call) as response:
                deadline = time.monotonic() + self._connection.deadline(call)
                for chunk in response.iter_bytes():
                    body += chunk
                    require_before(deadline)
        except httpx.HTTPError as error:
            return self._connection.no_answer(error, call)
        return call.parse(read_reply(response, body))

    @contextlib.contextmanager
    def _opened(self, call: Call[Any]) -> Iterator[httpx.Response]:
        """Send the call and yield the server's answer, its body unread.  A generation waits for its place first."""
        arguments = self._connection.request(call)
        with contextlib.ExitStack() as stack:
            if call.timeout == "generate":
                if not self._places.acquire(timeout=self._connection.deadline(call)):
                    raise ServerTimeout(self._connection.no_place(call))
                stack.callback(self._places.release)
            yield stack.enter_context(self._http.stream(**arguments))

    def _open(self, stack: contextlib.ExitStack, call: Call[Any]) -> Any:
        """Return the answer to a stream, which `stack` closes; read an error and raise it."""
        try:
            response = stack.enter_context(self._opened(call))
            if not response.is_success:
                call.parse(read_reply(response, response.read()))
        except httpx.HTTPError as error:
            stack.close()
            return self._connection.no_answer(error, call)
        except ClientError:
            stack.close()
            raise
        return response

    def _events(self, events: streams.Events) -> Generator[GenerationOutput, None, None]:
        """Yield the outputs of a stream, over one connection or several."""
        try:
            while not events.done:
                try:
                    yield from self._read(events)
                except ServerUnreachable as error:
                    events.go_on_after(error)
                    time.sleep(FIRST_WAIT_S)
        except (GeneratorExit, KeyboardInterrupt):
            if events.rid is not None:
                with contextlib.suppress(ClientError):
                    self.abort(events.rid)  # the server keeps a stream whose connection is closed
            raise

    def _read(self, events: streams.Events) -> Generator[GenerationOutput, None, None]:
        """Yield the outputs of one connection."""
        steps: Steps[Any] = repeated(events.call, self._retry_s)
        try:
            with contextlib.ExitStack() as stack:
                response: Any = do_blocking(steps, functools.partial(self._open, stack))
                for chunk in response.iter_bytes():
                    yield from events.feed(chunk)
                    if events.done:
                        return
        except httpx.HTTPError as error:
            self._connection.no_answer(error, events.call)
        events.require_done()
