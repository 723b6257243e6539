"""The fleet: engines that are started, brought to the weights in force, made known to the router, watched, replaced.

An engine goes one way, whether it is among the first or comes later:

    start -> [between two releases: newest weights -> group of weights -> router] -> its end -> off the router -> next

Releases and admissions exclude each other, so that an engine that the router knows takes part in each release.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError

from examples.fleet import check
from examples.fleet import events as happened
from examples.fleet.engine import EngineActor
from examples.fleet.errors import FleetError
from examples.fleet.events import EventLog
from examples.fleet.router import Router
from examples.fleet.sample import Sample
from examples.fleet.trainer import Trainer, engine_client
from rollout.client import RolloutClient

START_S = 120.0
POLL_S = 0.1
STOP_S = 30.0
MAX_FAILURES = 3


@dataclass(eq=False)
class FleetEngine:
    """`ended` is done when the engine has ended, or its actor has."""

    name: str
    actor: Any
    url: str
    pid: int
    client: RolloutClient
    ended: asyncio.Future[str]


class Fleet:
    """The fleet.  `folder` holds a log and a local checkpoint of every engine.  `settings`: of each server.

    Leaving it ends all engines at once: what waits for one of them then ends, too.
    """

    def __init__(
        self, router: Router, trainer: Trainer, events: EventLog, folder: Path, settings: dict[str, Any]
    ) -> None:
        self.version = 0  # served by every engine that the router knows
        self.committed = [0]
        self.serving: dict[str, FleetEngine] = {}
        self._router = router
        self._trainer = trainer
        self._events = events
        self._folder = folder
        self._settings = settings
        self._numbers = itertools.count()
        self._actors: list[Any] = []
        self.is_replaced = False  # the engine that was killed, by one that has taken part in a release
        self._admitted_at: dict[str, int] = {}
        self._seen: set[str] = set()  # engines whose first sample came
        self._weights = asyncio.Lock()  # a release, or an admission

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors if ray.is_initialized() else ():  # a call would start Ray anew
            ray.kill(actor)

    async def keep(self) -> None:
        """Start an engine, and a new one whenever it ends.  Raises `FleetError` if several in a row do not come up."""
        failures = 0
        while True:
            name = f"engine-{next(self._numbers)}"
            self._events.add(happened.STARTED, name)
            actor = ray.remote(num_cpus=1)(EngineActor).remote(name, self._settings, str(self._folder / f"{name}.log"))
            self._actors.append(actor)
            try:
                engine = await self._start(name, actor)
                await self._admit(engine)
            except FleetError as error:
                ray.kill(actor)
                self._events.add(happened.FAILED, name, why=str(error))
                failures += 1
                if failures == MAX_FAILURES:
                    raise
                continue
            failures = 0
            await engine.ended
            self._events.add(happened.NOTICED, name, self.version)
            await self._forget(engine)

    async def release(self, learn: Sequence[Sample]) -> None:
        """Let the trainer take a step, and bring its weights to all engines.

        An engine that does not take them is ended.
        """
        await asyncio.to_thread(self._trainer.learn, learn)
        async with self._weights:
            version, left_out = await asyncio.to_thread(self._trainer.release)
            # The version is in force when no engine is left that has another one.
            for engine in [self.serving[name] for name in left_out if name in self.serving]:
                await self._router.remove(engine.url)
                ray.kill(engine.actor)
            self.version = version
            self.committed.append(version)
            names = ", ".join(sorted(self.serving.keys() - set(left_out)))
            self._events.add(happened.COMMITTED, names, version)

    def kill(self) -> None:
        """Kill the engine that has served longest, by SIGKILL.  Not even its actor is notified."""
        engine = next(iter(self.serving.values()))
        self._events.add(happened.KILLED, engine.name, self.version)
        os.kill(engine.pid, signal.SIGKILL)

    def answered(self, sample: Sample) -> None:
        """Note the first sample of each engine.

        Of the replacement, note also the first sample of weights that are newer than at its admission.
        """
        if sample.engine not in self._seen:
            self._seen.add(sample.engine)
            self._events.add(happened.FIRST_SAMPLE, sample.engine, sample.spans[0].version)
        replacement = check.replacement_of(self._events.events)
        if sample.engine == replacement and sample.spans[-1].version > self._admitted_at[sample.engine]:
            self.is_replaced = True

    async def stop(self) -> list[int]:
        """End all engines in order; return their exit statuses."""
        async with asyncio.timeout(STOP_S):
            return list(await asyncio.gather(*(engine.actor.stop.remote() for engine in self.serving.values())))

    # --- one engine --------------------------------------------------------------------------------------------------

    async def _start(self, name: str, actor: Any) -> FleetEngine:
        """Return the engine as soon as it answers.  No request can come to it yet."""
        try:
            async with asyncio.timeout(START_S):
                url, pid = await actor.address.remote()
                ended = asyncio.ensure_future(_end_of(actor))
                engine = FleetEngine(name, actor, url, pid, engine_client(url), ended)
                while not await asyncio.to_thread(engine.client.health, timeout=POLL_S * 20):
                    if ended.done():
                        raise FleetError(f"{name} did not start: {ended.result()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise FleetError(f"{name} did not start within {START_S:g} s") from None
        except RayError as error:
            raise FleetError(f"{name} did not start: {error}") from error
        return engine

    async def _admit(self, engine: FleetEngine) -> None:
        """Bring the engine to the weights that all engines serve, then make it known to the router."""
        local = self._folder / f"{engine.name}-weights"
        await asyncio.to_thread(self._trainer.bring, engine.client, local)  # most of the weights, while releases go on
        async with self._weights:
            version = await asyncio.to_thread(self._trainer.bring, engine.client, local)
            await asyncio.to_thread(self._trainer.join, engine.name, engine.client)
            self._events.add(happened.AT_VERSION, engine.name, version)
            self.serving[engine.name] = engine
            self._admitted_at[engine.name] = version
            await self._router.add(engine.url)
            self._events.add(happened.REGISTERED, engine.name, version)

    async def _forget(self, engine: FleetEngine) -> None:
        """Remove an engine that has ended, first from the router, so that no more requests go there."""
        await self._router.remove(engine.url)
        ray.kill(engine.actor)
        async with self._weights:
            del self.serving[engine.name]
            await asyncio.to_thread(self._trainer.leave, engine.name)
        engine.client.close()


async def _end_of(actor: Any) -> str:
    try:
        reason: str = await actor.ended.remote()
        return reason
    except RayError as error:
        return f"its actor ended: {error}"
