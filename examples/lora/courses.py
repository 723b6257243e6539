"""The problems that an adapter is trained on, samples of them from a live server, and the loss on these samples.

digits   the small MoE model of `examples.grpo`: sums, or running sums; the engine's experts are replayed
words    SmolLM2-135M: word problems of one kind
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from examples.grpo.policy import behaviour_logprobs, output_logits, policy_loss, trainer_logprobs
from examples.grpo.rollouts import Group as DigitsGroup
from examples.grpo.rollouts import Rollouts, Sampling, make_batch
from examples.grpo.task import Task
from examples.grpo.train import encode
from examples.real_model import rollouts as words
from examples.real_model.policy import output_logprobs, pack
from examples.real_model.problems import Problem, load, shuffled
from lockstep_rl import AsyncClient


class Samples(Protocol):
    """Groups of samples, with their rewards."""

    @property
    def rewards(self) -> list[float]:
        """The rewards of all samples."""

    def loss(self, model: Any) -> torch.Tensor | None:
        """Return the loss of `model`, the adapted one; None where no group teaches anything."""


class Course(Protocol):
    """The problems of one adapter."""

    async def sample(self, client: AsyncClient, adapter: str, problems: int, samples: int) -> Samples:
        """Sample answers to the next training problems by `adapter`, `samples` to each, all at once."""

    async def judge(self, client: AsyncClient, adapter: str, problems: int) -> float:
        """Return the mean reward of one sample to each of the same held-out problems."""


class DigitsSamples:
    def __init__(self, groups: Sequence[DigitsGroup]) -> None:
        self._groups = groups

    @property
    def rewards(self) -> list[float]:
        return [reward for group in self._groups for reward in group.rewards]

    def loss(self, model: Any) -> torch.Tensor | None:
        batch = make_batch(self._groups)
        if not batch.advantages_N.any():
            return None
        logprobs_T = trainer_logprobs(output_logits(model, batch, "replay"), batch, "replay")
        advantages_T = batch.advantages_N[:, None].expand_as(batch.mask_NO)[batch.mask_NO]
        return policy_loss(logprobs_T, behaviour_logprobs(batch, "replay"), advantages_T)


class Digits:
    """A task of digits for the model whose tokenizer is `tokenizer`."""

    def __init__(self, task: Task, tokenizer: Tokenizer, seed: int) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._stream = task.problems(seed, held_out=False)

    async def sample(self, client: AsyncClient, adapter: str, problems: int, samples: int) -> DigitsSamples:
        chosen = list(islice(self._stream, problems))
        rollouts = self._rollouts(client, adapter)
        return DigitsSamples(await asyncio.gather(*(rollouts.group(problem, samples) for problem in chosen)))

    async def judge(self, client: AsyncClient, adapter: str, problems: int) -> float:
        groups = await self._rollouts(client, adapter).held_out(self._task.problems(1, held_out=True), problems)
        return _mean(DigitsSamples(groups).rewards)

    def _rollouts(self, client: AsyncClient, adapter: str) -> Rollouts:
        sampling = Sampling(self._task.max_new_tokens, top_p=1.0)
        return Rollouts(client, lambda text: encode(self._tokenizer, text), sampling, adapter)


class WordsSamples:
    def __init__(self, groups: Sequence[words.Group]) -> None:
        self._groups = groups

    @property
    def rewards(self) -> list[float]:
        return [reward for group in self._groups for reward in group.rewards]

    def loss(self, model: Any) -> torch.Tensor | None:
        used = [group for group in self._groups if group.differs]
        if not used:
            return None
        packed = pack(used)
        return policy_loss(output_logprobs(model, packed), packed.engine_T, packed.advantages_T)


class Words:
    """Word problems of one kind: add, subtract or multiply."""

    def __init__(self, kind: str, seed: int) -> None:
        self._held_out = [problem for problem in load("held_out") if problem.kind == kind]
        self._stream: Iterator[Problem] = shuffled([each for each in load("train") if each.kind == kind], seed)

    async def sample(self, client: AsyncClient, adapter: str, problems: int, samples: int) -> WordsSamples:
        chosen = list(islice(self._stream, problems))
        return WordsSamples(await words.sample(client, chosen, samples, 1.0, adapter))

    async def judge(self, client: AsyncClient, adapter: str, problems: int) -> float:
        return _mean(WordsSamples(await words.sample(client, self._held_out[:problems], 1, 1.0, adapter)).rewards)


def _mean(rewards: Sequence[float]) -> float:
    return sum(rewards) / len(rewards)
