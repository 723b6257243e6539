"""Brackets around a block: a pause that ends with it, and a weight update that is in force after it or never.

Each serves `with` and `async with`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Literal

from rollout.client.errors import ClientError, ServerError
from rollout.client.wire import Steps
from weight_sync.joint_update import EngineReport, JointUpdate, OnEngineFailure
from weight_sync.waiting import in_thread

Transport = Literal[
    "update_weights_from_tensor",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_distributed",
    "pull_weights",
]


class Pause:
    """A pause of `client` around a block; `pause` and `resume` are the calls that begin and end it.

    A pause that may or may not have begun is ended, too.  One that the server refused is not: another client may have
    begun the pause in force.
    """

    def __init__(self, client: Any, pause: Steps[Any], resume: Steps[Any]) -> None:
        self._client, self._pause, self._resume = client, pause, resume

    def __enter__(self) -> None:
        try:
            self._client._do(self._pause)
        except ServerError:
            self._resume.close()
            raise
        except BaseException as error:
            self._client._do(self._end(error))
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._client._do(self._end(error))

    async def __aenter__(self) -> None:
        try:
            await self._client._do(self._pause)
        except ServerError:
            self._resume.close()
            raise
        except BaseException as error:
            await self._client._do(self._end(error))
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._client._do(self._end(error))

    def _end(self, cause: BaseException | None) -> Steps[None]:
        try:
            yield from self._resume
        except ClientError as error:
            if cause is None:
                raise
            cause.add_note(f"and the pause could not be ended: {type(error).__name__}: {error}")


class WeightTransaction(JointUpdate):
    """A weight update of one version on all engines: `send` its content; it is in force at the end of the block.

    An exception in the block aborts it, and the old weights serve on, unless staging is `in_place`.  Used once.
    """

    def send(self, transport: Transport, **fields: Any) -> dict[str, dict[str, Any]]:
        """Make all engines take content by the client's method `transport`, and return their answers by name.

        Raises `EngineError` with each failed engine's error.
        """
        return self.call(transport, **fields)


class AsyncWeightTransaction:
    """`WeightTransaction` for one event loop: entered by `async with`, `send` to be awaited."""

    def __init__(self, update: WeightTransaction) -> None:
        self.blocking = update

    @property
    def engines(self) -> dict[str, EngineReport]:
        """Reports of the engines by name; final after the block."""
        return self.blocking.engines

    async def send(self, transport: Transport, **fields: Any) -> dict[str, dict[str, Any]]:
        """Send as `WeightTransaction.send` does."""
        return await asyncio.to_thread(self.blocking.send, transport, **fields)


@asynccontextmanager
async def in_loop(update: WeightTransaction) -> AsyncIterator[AsyncWeightTransaction]:
    """Put `update` around a block of an event loop, which makes the calls itself and waits for them on a thread."""
    entering = asyncio.ensure_future(asyncio.to_thread(update.__enter__))
    try:
        await asyncio.shield(entering)
    except asyncio.CancelledError as error:
        await asyncio.wait({entering})
        await asyncio.to_thread(update.__exit__, type(error), error, None)
        raise
    try:
        yield AsyncWeightTransaction(update)
    except BaseException as error:
        await asyncio.to_thread(update.__exit__, type(error), error, None)
        raise
    await asyncio.to_thread(update.__exit__, None, None, None)


def transaction(
    clients: Mapping[str, Any],
    loop: asyncio.AbstractEventLoop | None,
    timeout_s: float,
    weight_version: str | None,
    coverage: str,
    on_engine_failure: OnEngineFailure,
    begin_options: dict[str, Any],
) -> WeightTransaction:
    """Return a weight update on `clients` by name: synchronous clients, or asynchronous ones of `loop`.

    `begin_options`: further arguments of `begin_weight_update`.
    """
    engines = {name: _Calls(client, loop, timeout_s) for name, client in clients.items()}
    fields = {"weight_version": weight_version, "coverage": coverage, "update_id": uuid.uuid4().hex} | begin_options
    return WeightTransaction(engines, on_engine_failure, fields)


class _Calls:
    """Control calls of one client on their way."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop | None, timeout_s: float) -> None:
        self._client, self._loop, self.timeout_s = client, loop, timeout_s

    def call(self, verb: str, **fields: Any) -> Future[Any]:
        method = getattr(self._client, verb)
        if self._loop is None:
            return in_thread(method, **fields)
        return asyncio.run_coroutine_threadsafe(method(**fields), self._loop)
