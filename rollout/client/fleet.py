"""`AsyncRolloutFleet`: several engines as one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from rollout.client.async_client import AsyncRolloutClient
from rollout.client.brackets import AsyncWeightTransaction, WeightTransaction, in_loop, transaction
from rollout.client.errors import ClientError, FleetError, ServerError, ServerTimeout, ServerUnreachable
from rollout.client.fleet_engine import Choice, FleetEngine
from rollout.client.generation_calls import GenerationCalls
from rollout.client.many import Request, Result, generate_many
from rollout.client.method import Awaiting, do_awaiting
from rollout.client.types import FleetPolicy, GenerateOptions, RouteLayout, Timeouts
from rollout.client.wire import Call, Health, Steps, health_call
from rollout.core.errors import BadRequest
from rollout.core.messages.io_struct import PauseMode
from weight_sync.joint_update import OnEngineFailure

T = TypeVar("T")
BringUpToDate = Callable[[AsyncRolloutClient, str], Awaitable[None]]
_POLL_S = 0.05


class AsyncRolloutFleet(GenerationCalls, Awaiting):
    """Several engines of one model behind one client, for one event loop.  `RolloutFleet` is the same for threads.

    A request goes to the engine of its `session_id`, otherwise to the one with the fewest on their way.  An engine that
    cannot be reached, fails its health checks, or serves another weight version than the others is left out; what it
    had on its way is sent to another one from the start, so no sample has tokens of two engines.  It is taken back when
    it is healthy and serves the weight version of those in use (of the last commit, where none is).

    `bring_up_to_date(client, weight_version)` may send the weights to an engine that is healthy but has others.
    Checks begin with the first call, or `async with`; `close` ends them.
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
        bring_up_to_date: BringUpToDate | None = None,
    ) -> None:
        """Give each engine the arguments of `AsyncRolloutClient`.  Raises `BadRequest`."""
        if not urls or len(set(urls)) != len(urls):
            raise BadRequest(f"a fleet needs at least one engine and each only once, got {list(urls)}")
        settings: dict[str, Any] = {
            "api_key": api_key,
            "admin_api_key": admin_api_key,
            "timeouts": timeouts,
            "route_layout": route_layout,
            "max_connections": max_connections,
        }
        self.engines = {url: FleetEngine(AsyncRolloutClient(url, **settings)) for url in urls}
        self.weight_version: str | None = None
        """The version that an engine must serve to be taken back while none is in use: the last commit's, at first most
        engines'."""
        self._layout = route_layout
        self._timeouts = timeouts or Timeouts()
        self._retry_s = self._timeouts.retry
        self._policy = policy or FleetPolicy()
        self._bring_up_to_date = bring_up_to_date
        self._choice = Choice(list(self.engines.values()))
        self._num_holds = 0
        self._holds = 0  # that ever began
        self._watchers: list[asyncio.Task[None]] = []
        self._first_round: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncRolloutFleet:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Check every engine, and from now on again and again.  The first call of the fleet does so, too."""
        if self._first_round is None:
            self._first_round = asyncio.ensure_future(self._take_first())
        await asyncio.shield(self._first_round)

    async def close(self) -> None:
        """End the checks and close all connections."""
        tasks = [*([self._first_round] if self._first_round else []), *self._watchers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.client.close() for engine in self.engines.values()))

    def generate_many(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int = 64,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Run `AsyncRolloutClient.generate_many` on all engines; `concurrency` is the whole fleet's."""
        return generate_many(self.generate, requests, concurrency, progress, options)

    async def wait_until_ready(self, num_engines: int | None = None, timeout: float = 300.0) -> None:
        """Return once `num_engines` (None: all) are in use.  Raises `ServerTimeout` after `timeout` seconds."""
        wanted = len(self.engines) if num_engines is None else num_engines
        deadline = time.monotonic() + timeout
        await self.start()
        while len(self._in_use()) < wanted:
            if time.monotonic() > deadline:
                raise ServerTimeout(f"fewer than {wanted} engines were ready within {timeout:g} s: {self._reasons()}")
            await asyncio.sleep(_POLL_S)

    # --- all engines ---------------------------------------------------------------------------------------------

    async def on_all(self, call: Callable[[AsyncRolloutClient], Awaitable[T]]) -> dict[str, T]:
        """Make `call(client)` on all engines in use at once, and return the results by URL.

        Raises `FleetError` if any fails, `ServerUnreachable` if none is in use.
        """
        return await _all({engine.url: call(engine.client) for engine in await self._some_in_use()})

    async def abort(self, rid: str) -> None:
        """Abort the request with exactly this id, on whatever engine; it answers with what it has."""
        await self.on_all(lambda client: client.abort(rid))

    async def abort_all(self) -> None:
        """Abort every request on every engine; each answers with what it has."""
        await self.on_all(lambda client: client.abort_all())

    @contextlib.asynccontextmanager
    async def paused(self, mode: PauseMode = "retract") -> AsyncIterator[None]:
        """Pause all engines in use until the block ends.  No engine is taken back meanwhile.

        Raises `FleetError` if one could not be paused, and then the paused ones are continued; or if one refuses to go
        on.  An engine that cannot be reached then is left out.
        """
        with self.held():
            pauses = {engine: engine.client.paused(mode) for engine in await self._some_in_use()}
            try:
                await _all({engine.url: pause.__aenter__() for engine, pause in pauses.items()})
                yield
            finally:
                await _all({engine.url: self._end_pause(engine, pause) for engine, pause in pauses.items()})

    async def _end_pause(self, engine: FleetEngine, pause: Any) -> None:
        try:
            await pause.__aexit__(None, None, None)
        except (ServerUnreachable, ServerTimeout) as error:  # it goes on when it is taken back
            engine.is_paused = True
            self._leave_out(engine, f"its pause could not be ended: {error}")

    @contextlib.asynccontextmanager
    async def weight_transaction(
        self,
        weight_version: str,
        coverage: str = "full",
        *,
        on_engine_failure: OnEngineFailure = "abort_all",
        **begin_options: Any,
    ) -> AsyncIterator[AsyncWeightTransaction]:
        """Update the weights of all engines in use: begin, `update.send(...)` in the block, verify and commit on all.

        `on_engine_failure`: an engine's failure aborts the update on all (`abort_all`), or leaves the engine out of the
        fleet until it has the version (`leave_out`).  No engine is taken back meanwhile.
        Raises `EngineError`; unless its `committed` states otherwise, or staging is `in_place`, old weights serve.
        """
        with self.held():
            clients = {engine.url: engine.client for engine in await self._some_in_use()}
            loop, timeout_s = asyncio.get_running_loop(), self._timeouts.weights
            update = transaction(clients, loop, timeout_s, weight_version, coverage, on_engine_failure, begin_options)
            try:
                async with in_loop(update) as handle:
                    yield handle
            finally:
                self._settle(update, weight_version)

    def _settle(self, update: WeightTransaction, weight_version: str) -> None:
        """Leave out engines that do not have a version which others have committed."""
        if any(report.committed for report in update.engines.values()):
            self.weight_version = weight_version
            for url, report in update.engines.items():
                if report.committed:
                    self.engines[url].weight_version = weight_version
                else:
                    self._leave_out(self.engines[url], f"it did not take version {weight_version}: {report.error}")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take no engine back in this block: for refreshes that this fleet does not make, as by `WeightSender`."""
        self._num_holds += 1
        self._holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1

    # --- one engine ----------------------------------------------------------------------------------------------

    async def _do(self, steps: Steps[T]) -> T:
        await self.start()
        return await do_awaiting(steps, self._exchange)

    async def _exchange(self, call: Call[T]) -> T:
        """Make a call of one engine: of another one if the first dies or reports that it does not serve."""
        session_id = (call.json or {}).get("session_id")
        tried: list[FleetEngine] = []
        failure: ClientError | None = None
        while len(tried) < self._policy.max_engines:
            engine = self._choice.choose(session_id, tried)
            if engine is None:
                break
            tried.append(engine)
            try:
                return await engine.exchange(call)
            except ServerUnreachable as error:
                self._leave_out(engine, str(error))
                failure = error
            except ServerError as error:
                if error.status != 503:
                    raise
                failure = error
        raise failure or self._nobody()

    async def _some_in_use(self) -> list[FleetEngine]:
        """Return the engines in use, one at least.  Raises `ServerUnreachable`."""
        await self.start()
        if not (in_use := self._in_use()):
            raise self._nobody()
        return in_use

    def _nobody(self) -> ServerUnreachable:
        return ServerUnreachable(f"no engine is in use: {self._reasons()}", was_sent=False)

    def _in_use(self) -> list[FleetEngine]:
        return [engine for engine in self.engines.values() if engine.left_out is None]

    def _reasons(self) -> str:
        return "; ".join(f"{engine.url}: {engine.left_out}" for engine in self.engines.values() if engine.left_out)

    def _leave_out(self, engine: FleetEngine, why: str) -> None:
        if engine.left_out is None:
            engine.leave_out(why)
            self._choice.forget(engine)

    # --- checks --------------------------------------------------------------------------------------------------

    async def _take_first(self) -> None:
        """Take the healthy engines that serve what most of them serve."""
        engines = list(self.engines.values())
        checks = await asyncio.gather(*(self._is_healthy(engine) for engine in engines))
        healthy = [engine for engine, is_healthy in zip(engines, checks) if is_healthy]
        if healthy:
            ((self.weight_version, _),) = Counter(engine.weight_version for engine in healthy).most_common(1)
        for engine in engines:
            if engine not in healthy:
                engine.left_out = "it is not healthy"
            elif engine.weight_version == self.weight_version:
                engine.take_back()
            else:
                engine.left_out = self._other_version(engine)
        self._watchers = [asyncio.ensure_future(self._watch(engine)) for engine in engines]

    async def _watch(self, engine: FleetEngine) -> None:
        while True:
            await asyncio.sleep(self._policy.check_every_s)
            await self._check(engine)

    async def _check(self, engine: FleetEngine) -> None:
        """Count a failure, or take the engine back if it may be."""
        version, start_id, holds = engine.weight_version, engine.start_id, self._holds
        if not await self._is_healthy(engine):
            engine.num_failures += 1
            if engine.num_failures >= self._policy.max_failures:
                self._leave_out(engine, "it is not healthy")
            return
        if self._was_started_anew(engine, version, start_id):
            self._choice.forget(engine)  # it has no prefixes any more
            if engine.weight_version != self.weight_version:
                self._leave_out(engine, f"it was started anew, with weight version {engine.weight_version}")
        engine.num_failures = 0
        if holds == self._holds and not self._num_holds:
            self._compare_version(engine)
        else:
            engine.num_differences = 0
        if engine.left_out is not None and not self._num_holds:
            try:
                await self._take_back(engine)
            except Exception as error:
                engine.left_out = f"it is healthy, but could not be taken back: {type(error).__name__}: {error}"

    @staticmethod
    def _was_started_anew(engine: FleetEngine, version: str | None, start_id: str | None) -> bool:
        """Tell whether the engine was started anew since its last report.

        Without an id, another version after a failed check counts as a new start.
        """
        if start_id is not None and engine.start_id is not None:
            return engine.start_id != start_id
        return engine.num_failures > 0 and engine.weight_version != version

    def _compare_version(self, engine: FleetEngine) -> None:
        """Leave the engine out once it has served another weight version than most for too many checks."""
        versions = [other.weight_version for other in self._in_use() if not other.num_failures]
        if engine.left_out is not None or not versions:
            return
        counts = Counter(versions)
        most = max(counts.values())
        if counts[self.weight_version] < most:
            self.weight_version = next(version for version, count in counts.items() if count == most)
        if engine.weight_version == self.weight_version:
            engine.num_differences = 0
            return
        engine.num_differences += 1
        if engine.num_differences >= self._policy.max_differences:
            self._leave_out(engine, self._other_version(engine))

    async def _is_healthy(self, engine: FleetEngine) -> bool:
        """Return whether the engine is healthy; if so, note its weight version and its process."""
        try:
            async with asyncio.timeout(self._policy.check_timeout_s):
                health, version = await self._read(engine)
        except Exception:  # whatever it is: a check that ended would never notice anything again
            return False
        if health.is_healthy:
            engine.start_id, engine.weight_version = health.start_id, version
        return health.is_healthy

    async def _read(self, engine: FleetEngine) -> tuple[Health, str | None]:
        """Return the engine's health and, where that is good, its weight version, both of one process."""
        check = health_call(self._policy.check_timeout_s)
        health = await engine.client._exchange(check)
        if not health.is_healthy:
            return health, None
        version = await engine.client.weight_version()
        if engine.weight_version is not None and version != engine.weight_version:  # it may be a new process
            health = await engine.client._exchange(check)
        return health, version

    async def _take_back(self, engine: FleetEngine) -> None:
        """Take an engine back if it serves what the others serve, or can be made to."""
        if engine.is_paused:
            await engine.client.continue_generation()
            engine.is_paused = False
        wanted = await self._wanted()
        if self._bring_up_to_date is not None and wanted not in (None, engine.weight_version):
            async with asyncio.timeout(self._timeouts.weights):
                await self._bring_up_to_date(engine.client, wanted)
            if not await self._is_healthy(engine):
                return
        holds = self._holds
        wanted = await self._wanted()  # it may be another one by now
        if wanted is not None and engine.weight_version != wanted:
            engine.left_out = self._other_version(engine)
        elif holds == self._holds and not self._num_holds:
            self.weight_version = engine.weight_version
            engine.take_back()

    def _other_version(self, engine: FleetEngine) -> str:
        return f"it serves weight version {engine.weight_version}, the fleet {self.weight_version}"

    async def _wanted(self) -> str | None:
        """Return the weight version that the engines in use serve now; if none is in use, the last commit's.

        Raises `ClientError` where they serve different ones, as amid a refresh, or where one was started anew.
        """
        in_use = self._in_use()
        if not in_use:
            return self.weight_version
        start_ids = [engine.start_id for engine in in_use]
        async with asyncio.timeout(self._policy.check_timeout_s):
            found = await asyncio.gather(*(self._read(engine) for engine in in_use))
        for engine, start_id, (health, _) in zip(in_use, start_ids, found):
            if engine.left_out is not None or not health.is_healthy or start_id not in (None, health.start_id):
                raise ClientError(f"the engine at {engine.url} failed or was restarted meanwhile")
        versions = [version for _, version in found]
        if len(set(versions)) > 1:
            raise ClientError(f"the engines in use serve different weight versions: {versions}")
        self.weight_version = versions[0]
        return versions[0]


async def _all(calls: Mapping[str, Awaitable[T]]) -> dict[str, T]:
    """Await all calls and return their results by name.  Raises `FleetError` if any fails, once all have ended."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    failures = {name: result for name, result in zip(calls, results) if isinstance(result, BaseException)}
    if failures:
        raise FleetError(failures)
    return {name: result for name, result in zip(calls, results) if not isinstance(result, BaseException)}
