"""One run: supervised steps on demonstrations, then policy gradient on episodes with the tool.

supervised steps -> checkpoint -> server
    every step:   groups of episodes, all at once (episodes)
                  one clipped step on the ids, log-probabilities and routes of their records (policy)
                  refresh  --> server
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.agent.episodes import Agent, Episode
from examples.agent.policy import (
    demonstrations,
    expected_reward,
    padded,
    recorded_logprobs,
    sampled_logprobs,
    supervised_step,
)
from examples.agent.task import problems
from examples.grpo.policy import Masters, policy_loss
from examples.grpo.rollouts import advantages
from examples.live.ending import in_thread
from examples.live.progress import Shown
from examples.live.refreshing import connected_sender


@dataclass(frozen=True)
class Plan:
    """The length and rates of a run.  Supervision ends where the demonstrated way has this probability."""

    supervised_until: float = 0.3
    supervised_steps: int = 1500
    supervised_batch: int = 64
    supervised_rate: float = 1e-3
    tool_share: float = 0.5
    steps: int = 60
    problems_per_step: int = 16
    group_size: int = 8
    rate: float = 2e-4
    judge_every: int = 10
    judged: int = 128


@dataclass(frozen=True)
class Step:
    """The record of a step; `calls`: of the tool, an episode; `cached`: share of prompt ids that were in the KV cache;
    `mismatch`: the mean difference of the trainer's and the engine's log-probabilities, without its sign.
    """

    step: int
    seconds: float
    reward: float
    calls: float
    turns: float
    tokens: int
    cached: float
    mismatch: float


@dataclass(frozen=True)
class Judgement:
    """Episodes of held-out problems under one version."""

    step: int
    reward: float
    calls: float


@dataclass
class Result:
    seed: int
    judgements: list[Judgement] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def supervise(model: Any, tokenizer: Tokenizer, plan: Plan, seed: int, shown: Shown) -> float:
    """Take supervised steps until the way with the tool is likely enough; return how likely it is then."""
    optimizer, reached = Masters(model, plan.supervised_rate), 0.0
    stream = demonstrations(tokenizer, seed, plan.tool_share)
    for step in range(1, plan.supervised_steps + 1):
        loss = supervised_step(model, optimizer, list(islice(stream, plan.supervised_batch)))
        if step % 10 == 0:
            reached = expected_reward(model, tokenizer)
        shown.report(
            "supervised steps", step, plan.supervised_steps, f"loss {loss:.3f}, demonstrated way {reached:.3f}"
        )
        if reached >= plan.supervised_until * plan.tool_share:
            break
    return reached


class Training:
    """Policy gradient of `model` against the server at `url`, which serves its weights as version 0."""

    def __init__(self, model: Any, tokenizer: Tokenizer, url: str, plan: Plan, result: Result, shown: Shown) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._url = url
        self._plan = plan
        self._result = result
        self._shown = shown
        self._optimizer = Masters(model, plan.rate)
        self._started = time.monotonic()

    async def run(self) -> None:
        """Run all steps.  Raises what the server, a record or a refresh raises."""
        plan = self._plan
        training, held_out = problems(self._result.seed, held_out=False), problems(1, held_out=True)
        async with Agent(self._url, self._tokenizer) as agent:
            with connected_sender(self._url) as sender:
                await self._judge(0, agent, list(islice(held_out, plan.judged)))
                for step in range(1, plan.steps + 1):
                    episodes = await agent.play(list(islice(training, plan.problems_per_step)), plan.group_size)
                    self._result.steps.append(await in_thread(self._step, step, episodes))
                    await in_thread(sender.refresh, self._model, weight_version=str(step), dtype=torch.bfloat16)
                    if step % plan.judge_every == 0 or step == plan.steps:
                        await self._judge(step, agent, list(islice(held_out, plan.judged)))

    def _step(self, step: int, episodes: Sequence[Episode]) -> Step:
        difference = policy_step(self._model, self._optimizer, episodes, self._plan.group_size)
        records = [episode.record for episode in episodes]
        reward, calls = _mean([each.reward for each in episodes]), _mean([each.num_calls for each in episodes])
        self._shown.report("policy gradient", step, self._plan.steps, f"reward {reward:.3f}, calls {calls:.2f}")
        return Step(
            step=step,
            seconds=time.monotonic() - self._started,
            reward=reward,
            calls=calls,
            turns=_mean([record.num_turns for record in records]),
            tokens=sum(sum(record.is_sampled) for record in records),
            cached=sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records),
            mismatch=difference,
        )

    async def _judge(self, step: int, agent: Agent, chosen: list[Any]) -> None:
        episodes = await agent.play(chosen, 1)
        self._result.judgements.append(
            Judgement(step, _mean([each.reward for each in episodes]), _mean([each.num_calls for each in episodes]))
        )


def policy_step(model: Any, optimizer: Masters, episodes: Sequence[Episode], group_size: int) -> float:
    """Take a step on episodes in groups of `group_size`; return the mean of |trainer - engine| log-probabilities."""
    loss, difference = policy_objective(model, episodes, group_size)
    loss.backward()
    optimizer.step()
    return difference


def policy_objective(model: Any, episodes: Sequence[Episode], group_size: int) -> tuple[torch.Tensor, float]:
    """Return the clipped loss, a mean over sampled tokens, and the mean of |trainer - engine| log-probabilities.

    Every token of an episode has the episode's advantage in its group, and its ratio is to the weights that sampled it.
    """
    records = [episode.record for episode in episodes]
    batch = padded([(record.ids, record.is_sampled) for record in records])
    rewards = [episode.reward for episode in episodes]
    groups = [rewards[first : first + group_size] for first in range(0, len(rewards), group_size)]
    advantages_N = torch.cat([advantages(group) for group in groups])
    logprobs_T = sampled_logprobs(model, batch, [record.routes for record in records])
    engine_T = recorded_logprobs(episodes).to(logprobs_T.dtype)
    advantages_T = advantages_N[:, None].expand_as(batch.mask_NS)[batch.mask_NS]
    loss = policy_loss(logprobs_T, engine_T, advantages_T)
    return loss, float((logprobs_T.detach() - engine_T).abs().mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
