"""One run: supervised steps, then GRPO against a live server that samples all the while.

    supervised steps -> checkpoint -> server
                                        |   groups, asynchronously (rollouts)
        every step:   batch <-----------'
                      clipped steps, each token against the version that sampled it (policy)
                      refresh, while samples are in flight  --> server

Shapes: N samples, S positions, O output positions, T output tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.grpo.measure import Mismatch, mismatch
from examples.grpo.policy import (
    Masters,
    Variant,
    behaviour_logprobs,
    expected_reward,
    output_logits,
    policy_loss,
    supervised_step,
    trainer_logprobs,
)
from examples.grpo.rollouts import Batch, FreshGroups, Group, Rollouts, Sampling, make_batch
from examples.grpo.task import Problem, Task
from examples.live.ending import in_thread
from examples.live.progress import Shown
from examples.live.refreshing import connected_sender
from rollout.client import AsyncRolloutClient
from rollout.numerics import use_engine_numerics
from weight_sync.sender import WeightSender

GROUP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """The length and rates of a run.  Supervision ends where right answers have the probability `supervised_until`.

    A step takes `updates` optimiser steps, each on a part of its groups, and then refreshes the server.  Ratios are to
    the engine's log-probabilities; if not `corrected`, to the trainer's own before the step, as where a framework
    recomputes them.  `falls`: the rate falls to a tenth.  `in_flight`: groups at the server at any time; with 0 it
    samples between steps only.
    """

    supervised_until: float = 0.15
    supervised_steps: int = 2000
    supervised_batch: int = 128
    supervised_rate: float = 1e-3
    balance: float = 0.0
    steps: int = 600
    groups_per_step: int = 32
    updates: int = 1
    in_flight: int = 8
    rate: float = 3e-4
    falls: bool = True
    top_p: float = 0.95
    corrected: bool = True
    judge_every: int = 10
    judged: int = 256


@dataclass(frozen=True)
class Step:
    """The record of a step of GRPO.  `lags`: share of its tokens by how many versions ago they were sampled."""

    step: int
    seconds: float
    reward: float
    loss: float
    gradient_norm: float
    lags: list[float]
    spanning: int  # samples that more than one version made
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True)
class _Update:
    loss: float
    gradient_norm: float
    ratios_T: torch.Tensor


@dataclass(frozen=True)
class Judgement:
    """Held-out problems under one version: the mean reward of a sample each, and the mismatch on these samples."""

    step: int
    seconds: float
    reward: float
    mismatch: Mismatch


@dataclass
class Result:
    seed: int
    variant: Variant
    judgements: list[Judgement] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_groups_dropped: int = 0  # finished, and older than the groups that a step took


def supervise(model: Any, tokenizer: Tokenizer, task: Task, plan: Plan, seed: int, shown: Shown) -> float:
    """Take supervised steps until right answers are likely enough; return how likely they are then."""
    end_id, optimizer = model.config.eos_token_id, Masters(model, plan.supervised_rate)
    stream, reached = task.problems(seed, held_out=False), 0.0
    for step in range(1, plan.supervised_steps + 1):
        chosen = list(islice(stream, plan.supervised_batch))
        examples = [[*encode(tokenizer, each.question + each.answer), end_id] for each in chosen]
        loss = supervised_step(model, optimizer, examples, len(encode(tokenizer, chosen[0].question)), plan.balance)
        if step % 10 == 0:
            judged = task.problems(-1, held_out=False)
            reached = expected_reward(model, lambda text: encode(tokenizer, text), end_id, judged)
        shown.report("supervised steps", step, plan.supervised_steps, f"loss {loss:.3f}, right answers {reached:.3f}")
        if reached >= plan.supervised_until:
            break
    return reached


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


class Grpo:
    """GRPO of `model` against the server at `url`, which serves its weights as version 0."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, url: str, task: Task, plan: Plan, result: Result, shown: Shown
    ) -> None:
        self._model = model
        self._task = task
        self._tokenizer = tokenizer
        self._url = url
        self._plan = plan
        self._result = result
        self._shown = shown
        self._optimizer = Masters(model, plan.rate, plan.steps * plan.updates if plan.falls else None)
        self._started = time.monotonic()

    async def run(self) -> None:
        """Run all steps.  Raises what the server or a refresh raises."""
        plan = self._plan
        async with AsyncRolloutClient(self._url) as client:
            sampling = Sampling(self._task.max_new_tokens, plan.top_p)
            rollouts = Rollouts(client, lambda text: encode(self._tokenizer, text), sampling)
            held_out = self._task.problems(1, held_out=True)
            await self._judge(0, rollouts, held_out)
            stream = self._task.problems(self._result.seed, held_out=False)
            with connected_sender(self._url) as sender:
                async with self._batches(rollouts, stream) as next_batch:
                    for step in range(1, plan.steps + 1):
                        groups = await next_batch()
                        self._result.steps.append(await in_thread(self._step, step, groups))
                        await in_thread(self._refresh, sender, str(step))
                        if step % plan.judge_every == 0:
                            await self._judge(step, rollouts, held_out)

    @contextlib.asynccontextmanager
    async def _batches(
        self, rollouts: Rollouts, stream: Iterator[Problem]
    ) -> AsyncIterator[Callable[[], Awaitable[list[Group]]]]:
        """Yield a call for the groups of the next step: the freshest of a stream, or new ones of the newest version."""
        count, in_flight = self._plan.groups_per_step, self._plan.in_flight
        if in_flight == 0:
            yield lambda: rollouts.groups(list(islice(stream, count)))
            return
        finished = FreshGroups(count)
        producer = asyncio.create_task(rollouts.produce(stream, finished, in_flight))
        try:
            yield lambda: _next(finished, producer)
        finally:
            producer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await producer
            self._result.num_groups_dropped = finished.num_dropped

    def _refresh(self, sender: WeightSender, version: str) -> None:
        sender.refresh(self._model, weight_version=version, dtype=torch.bfloat16)

    def _step(self, step: int, groups: Sequence[Group]) -> Step:
        plan = self._plan
        parts = [make_batch(groups[part :: plan.updates]) for part in range(plan.updates)]
        old = [self._old_logprobs(part) for part in parts]
        updates = [self._update(part, old_T) for part, old_T in zip(parts, old)]
        batch = make_batch(groups)
        lags_T = (step - 1 - batch.versions_NO)[batch.mask_NO]
        oldest_N = torch.where(batch.mask_NO, batch.versions_NO, step).min(1).values
        newest_N = torch.where(batch.mask_NO, batch.versions_NO, -1).max(1).values
        ratios_T = torch.cat([update.ratios_T for update in updates])
        reward = float(batch.rewards_N.mean())
        self._shown.report("GRPO", step, plan.steps, f"reward {reward:.3f}, held out {self._last_reward():.3f}")
        return Step(
            step=step,
            seconds=time.monotonic() - self._started,
            reward=reward,
            loss=sum(update.loss for update in updates) / plan.updates,
            gradient_norm=sum(update.gradient_norm for update in updates) / plan.updates,
            lags=(torch.bincount(lags_T) / len(lags_T)).tolist(),
            spanning=int((oldest_N < newest_N).sum()),
            ratio_low=float(ratios_T.quantile(0.001)),
            ratio_high=float(ratios_T.quantile(0.999)),
        )

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        variant = self._result.variant
        return trainer_logprobs(output_logits(self._model, batch, variant), batch, variant)

    @torch.no_grad()
    def _old_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities [T] that ratios are to."""
        return behaviour_logprobs(batch, self._result.variant) if self._plan.corrected else self._logprobs(batch)

    def _update(self, batch: Batch, old_T: torch.Tensor) -> _Update:
        """Take one step of the optimiser."""
        logprobs_T = self._logprobs(batch)
        advantages_T = batch.advantages_N[:, None].expand_as(batch.mask_NO)[batch.mask_NO]
        loss = policy_loss(logprobs_T, old_T, advantages_T)
        loss.backward()
        return _Update(loss.item(), self._optimizer.step(), (logprobs_T.detach() - old_T).exp().double())

    async def _judge(self, step: int, rollouts: Rollouts, held_out: Iterator[Problem]) -> None:
        """Judge held-out samples of the version that the trainer has now: nothing is refreshed meanwhile."""
        groups = await rollouts.held_out(held_out, self._plan.judged)
        batch = make_batch(groups)
        found = await in_thread(mismatch, self._model, batch, self._result.variant)
        seconds = time.monotonic() - self._started
        self._result.judgements.append(Judgement(step, seconds, float(batch.rewards_N.mean()), found))

    def _last_reward(self) -> float:
        return self._result.judgements[-1].reward


async def _next(finished: FreshGroups, producer: asyncio.Task[None]) -> list[Group]:
    """Return the groups of a step.  Raises the error that ended the producer, or `TimeoutError`."""
    getting = asyncio.create_task(finished.take())
    done, _ = await asyncio.wait({getting, producer}, timeout=GROUP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if getting in done:
        return getting.result()
    getting.cancel()
    if producer in done:
        producer.result()
    raise TimeoutError(f"the server did not return a batch of samples within {GROUP_TIMEOUT_S:g} s")


def numerics_of(model: Any, variant: Variant) -> contextlib.AbstractContextManager[Any]:
    """Have the model compute inside the block with the numerics of the variant."""
    return use_engine_numerics(model) if variant == "exact" else contextlib.nullcontext()


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
