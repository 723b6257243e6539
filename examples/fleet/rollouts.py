"""The stream of prompts: always the same number on their way; a request that died with its engine is sent again."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import httpx

from examples.fleet.errors import FleetError
from examples.fleet.sample import Prompt, Sample, parse_sample
from rollout.client import RouteLayout

LEAST_TOKENS, MORE_TOKENS = 32, 128
AGAIN_AFTER_S = 0.1
ANSWER_S = 60.0


class Rollouts:
    """`texts`: prompts as token ids, asked in turns.  `version()`: what all engines serve at this moment.

    `answered(sample)` is called for each.
    """

    def __init__(
        self,
        url: str,
        texts: Sequence[Sequence[int]],
        layout: RouteLayout,
        version: Callable[[], int],
        answered: Callable[[Sample], None],
    ) -> None:
        self._texts = texts
        self._layout = layout
        self._version = version
        self._answered = answered
        self._indices = itertools.count()
        self._stopping = False
        self._http = httpx.AsyncClient(
            base_url=url, timeout=ANSWER_S, trust_env=False, limits=httpx.Limits(max_connections=None)
        )
        self.asked: list[int] = []
        self.sent_again = 0
        self.samples: list[Sample] = []

    async def run(self, in_flight: int) -> None:
        """Ask until `stop`, and return when all is answered.  Raises `FleetError`."""
        async with self._http, asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(self._ask_on())

    def stop(self) -> None:
        """Ask for no new samples from now on."""
        self._stopping = True

    async def _ask_on(self) -> None:
        while not self._stopping:
            index = next(self._indices)
            tokens = LEAST_TOKENS + 37 * index % MORE_TOKENS
            prompt = Prompt(index, tuple(self._texts[index % len(self._texts)]), tokens)
            self.asked.append(index)
            sample = await self._sample(prompt)
            self.samples.append(sample)
            self._answered(sample)

    async def _sample(self, prompt: Prompt) -> Sample:
        deadline = time.monotonic() + ANSWER_S
        attempts, why = 0, ""
        while time.monotonic() < deadline:
            attempts += 1
            asked_at_version = self._version()
            try:
                reply = await self._http.post("/inference/v1/generate", json=prompt.body())
                if reply.status_code == httpx.codes.OK:
                    sample = parse_sample(reply.json(), prompt, self._layout, asked_at_version, attempts)
                    if sample is not None:
                        return sample
                elif reply.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    raise FleetError(f"sample {prompt.index} was refused: {reply.status_code} {reply.text[:200]}")
                why = f"{reply.status_code} {reply.text[:200]}"
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            self.sent_again += 1
            await asyncio.sleep(AGAIN_AFTER_S)
        raise FleetError(f"sample {prompt.index} was sent {attempts} times without an answer: {why}")
