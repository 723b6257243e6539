"""`RolloutFleet`: `AsyncRolloutFleet` on a thread of its own, for blocking callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, Unpack

from rollout.client.async_client import AsyncRolloutClient
from rollout.client.brackets import WeightTransaction
from rollout.client.client import RolloutClient
from rollout.client.fleet import AsyncRolloutFleet
from rollout.client.fleet_engine import FleetEngine
from rollout.client.generation_calls import GenerationCalls
from rollout.client.loop_thread import LoopThread
from rollout.client.many import Request, Result
from rollout.client.method import Blocking
from rollout.client.types import FleetPolicy, GenerateOptions, RouteLayout, Timeouts
from rollout.client.wire import Steps
from rollout.core.messages.io_struct import PauseMode
from weight_sync.joint_update import OnEngineFailure

T = TypeVar("T")


class RolloutFleet(GenerationCalls, Blocking):
    """Several engines of one model behind one client: see `AsyncRolloutFleet`.  Safe to share between threads.

    `bring_up_to_date(client, weight_version)` is called on a thread of its own, with a client of the engine.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeouts: Timeouts | None = None,
        route_layout: RouteLayout | None = None,
        max_connections: int | None = None,
        policy: FleetPolicy | None = None,
        bring_up_to_date: Callable[[RolloutClient, str], None] | None = None,
    ) -> None:
        """Take the arguments of `AsyncRolloutFleet`.  Raises `BadRequest`."""

        async def bring(client: AsyncRolloutClient, weight_version: str) -> None:
            assert bring_up_to_date is not None
            with RolloutClient(**client._settings) as blocking:
                await asyncio.to_thread(bring_up_to_date, blocking, weight_version)

        self._fleet = AsyncRolloutFleet(
            urls,
            api_key=api_key,
            admin_api_key=admin_api_key,
            timeouts=timeouts,
            route_layout=route_layout,
            max_connections=max_connections,
            policy=policy,
            bring_up_to_date=None if bring_up_to_date is None else bring,
        )
        self._layout, self._retry_s = route_layout, self._fleet._retry_s
        self._loop = LoopThread()

    @property
    def engines(self) -> dict[str, FleetEngine]:
        """The engines by URL; read only."""
        return self._fleet.engines

    @property
    def weight_version(self) -> str | None:
        """See `AsyncRolloutFleet.weight_version`."""
        return self._fleet.weight_version

    def close(self) -> None:
        """End the checks and close all connections."""
        self._loop.run(self._fleet.close())
        self._loop.close()

    def __enter__(self) -> RolloutFleet:
        try:
            self._loop.run(self._fleet.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate_many(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int = 64,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Generator[tuple[int, Result], None, None]:
        """Run `RolloutClient.generate_many` on all engines; `concurrency` is the whole fleet's."""
        many = self._fleet.generate_many(requests, concurrency=concurrency, progress=progress, **options)
        return self._loop.iterate(many)

    def wait_until_ready(self, num_engines: int | None = None, timeout: float = 300.0) -> None:
        """Return once `num_engines` (None: all) are in use.  Raises `ServerTimeout` after `timeout` seconds."""
        self._loop.run(self._fleet.wait_until_ready(num_engines, timeout))

    def abort(self, rid: str) -> None:
        """Abort the request with exactly this id, on whatever engine; it answers with what it has."""
        self._loop.run(self._fleet.abort(rid))

    def abort_all(self) -> None:
        """Abort every request on every engine; each answers with what it has."""
        self._loop.run(self._fleet.abort_all())

    @contextlib.contextmanager
    def paused(self, mode: PauseMode = "retract") -> Iterator[None]:
        """Pause all engines in use, as `AsyncRolloutFleet.paused` does."""
        with self._entered(self._fleet.paused(mode)):
            yield

    @contextlib.contextmanager
    def weight_transaction(
        self,
        weight_version: str,
        coverage: str = "full",
        *,
        on_engine_failure: OnEngineFailure = "abort_all",
        **begin_options: Any,
    ) -> Iterator[WeightTransaction]:
        """Update the weights of all engines in use, as `AsyncRolloutFleet.weight_transaction` does."""
        update = self._fleet.weight_transaction(
            weight_version, coverage, on_engine_failure=on_engine_failure, **begin_options
        )
        with self._entered(update) as handle:
            yield handle.blocking

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Take no engine back in this block: for refreshes that this fleet does not make, as by `WeightSender`."""
        return self._fleet.held()

    def _do(self, steps: Steps[T]) -> T:
        return self._loop.run(self._fleet._do(steps))

    @contextlib.contextmanager
    def _entered(self, block: AbstractAsyncContextManager[T]) -> Iterator[T]:
        value = self._loop.run(block.__aenter__())
        try:
            yield value
        except BaseException as error:
            if not self._loop.run(block.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self._loop.run(block.__aexit__(None, None, None))
