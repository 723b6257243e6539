"""GRPO of a real model against a live server.

    the server samples the problems of step k + 1  |  the trainer takes step k      at the same time
    a refresh sends the trained layers, also while samples are in flight            every step

Every token names the version that sampled it; its importance ratio is to that version.  It is at most one step old.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from examples.grpo.policy import policy_loss
from examples.live.ending import in_thread
from examples.live.layers import LastLayers
from examples.live.progress import Shown
from examples.live.refreshing import connected_sender
from examples.real_model.policy import output_logprobs, pack
from examples.real_model.problems import Problem, load, shuffled
from examples.real_model.rollouts import Group, mean_reward, sample
from lockstep_rl import AsyncClient, WeightSender


@dataclass(frozen=True)
class Plan:
    """The sizes and rates of a run.  `groups`: problems a step, `samples`: answers to each."""

    steps: int = 40
    groups: int = 8
    samples: int = 8
    layers: int = 8
    rate: float = 1e-4
    judge_every: int = 10
    judged: int = 100


@dataclass(frozen=True)
class Step:
    """The record of a step.  `reward`: of all samples; the other numbers are of the groups whose rewards differ.

    `lags`: share of the tokens by how many versions ago they were sampled.  `kl`: of the trainer from the engine on the
    tokens of the present version, by the estimator of Schulman (2020) that is never negative; None without such tokens.
    """

    step: int
    seconds: float
    reward: float
    groups_used: int
    tokens: int
    gradient_norm: float
    lags: list[float]
    kl: float | None


@dataclass(frozen=True)
class Judgement:
    """Held-out problems under one version: the mean reward of a sample each, also by kind, and of greedy answers."""

    step: int
    seconds: float
    sampled: float
    greedy: float | None
    by_kind: dict[str, float]


@dataclass
class Result:
    seed: int
    seconds: float = 0.0
    judgements: list[Judgement] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Training:
    """A run of `model` against the server at `url`, which serves its weights as version 0."""

    def __init__(self, model: Any, url: str, plan: Plan, result: Result, progress: Shown) -> None:
        self._model = model
        self._url = url
        self._plan = plan
        self._result = result
        self._progress = progress
        self._layers = LastLayers(model, plan.layers, plan.rate, plan.steps)
        self._held_out = load("held_out")[: plan.judged]
        self._started = time.monotonic()

    async def run(self) -> None:
        """Run all steps.  Raises what the server or a refresh raises."""
        plan = self._plan
        stream = shuffled(load("train"), self._result.seed)
        async with AsyncClient(self._url) as client:
            await self._judge(client, 0)
            with connected_sender(self._url) as sender:
                coming = self._sampling(client, stream)
                try:
                    for step in range(1, plan.steps + 1):
                        self._progress.doing(f"step {step}: sampling")
                        groups = await coming
                        if step < plan.steps:
                            coming = self._sampling(client, stream)
                        self._progress.doing(f"step {step}: training")
                        await in_thread(self._step, step, groups)
                        self._progress.doing(f"step {step}: refreshing the server")
                        await in_thread(self._refresh, sender, str(step))
                        if step % plan.judge_every == 0 or step == plan.steps:
                            await self._judge(client, step)
                finally:
                    coming.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await coming
        self._result.seconds = self._seconds()

    def _sampling(self, client: AsyncClient, stream: Iterator[Problem]) -> asyncio.Task[list[Group]]:
        problems = list(islice(stream, self._plan.groups))
        return asyncio.create_task(sample(client, problems, self._plan.samples, 1.0))

    def _refresh(self, sender: WeightSender, version: str) -> None:
        """Bring the trained layers to the server; the others are as they were."""
        sender.refresh(self._layers.tensors(), version, dtype=torch.bfloat16, coverage="partial")

    def _step(self, step: int, groups: Sequence[Group]) -> None:
        used = [group for group in groups if group.differs]
        norm, lags, kl, tokens = 0.0, [], None, 0
        if used:
            packed = pack(used)
            logprobs_T = output_logprobs(self._model, packed)
            policy_loss(logprobs_T, packed.engine_T, packed.advantages_T).backward()
            norm = self._layers.step()
            lags_T = step - 1 - packed.versions_T
            lags, tokens = (torch.bincount(lags_T) / len(lags_T)).tolist(), len(lags_T)
            difference_T = (logprobs_T.detach() - packed.engine_T)[lags_T == 0].double()
            kl = float((difference_T.exp() - 1 - difference_T).mean()) if len(difference_T) else None
        reward = mean_reward(groups)
        record = Step(step, self._seconds(), reward, len(used), tokens, norm, lags, kl)
        self._result.steps.append(record)
        self._progress.line(
            f"seed {self._result.seed}, step {step} of {self._plan.steps}: reward {reward:.2f}, {len(used)} of "
            f"{len(groups)} groups used, held out {self._result.judgements[-1].sampled:.2f}"
        )

    async def _judge(self, client: AsyncClient, step: int) -> None:
        """Judge held-out answers of the version that the trainer has now: nothing is refreshed meanwhile."""
        self._progress.doing(f"step {step}: answering {len(self._held_out)} held-out problems")
        sampled = await sample(client, self._held_out, 1, 1.0)
        greedy = None
        if step in (0, self._plan.steps):
            greedy = mean_reward(await sample(client, self._held_out, 1, 0.0))
        kinds = sorted({problem.kind for problem in self._held_out})
        by_kind = {kind: mean_reward([group for group in sampled if group.problem.kind == kind]) for kind in kinds}
        judgement = Judgement(step, self._seconds(), mean_reward(sampled), greedy, by_kind)
        self._result.judgements.append(judgement)
        self._progress.line(f"step {step}: held-out reward {judgement.sampled:.3f}, by kind {_shown(by_kind)}")

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def _shown(by_kind: dict[str, float]) -> str:
    return ", ".join(f"{kind} {reward:.2f}" for kind, reward in by_kind.items())
