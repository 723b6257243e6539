"""Groups of samples from a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.real_model.problems import Problem
from lockstep_rl import AsyncClient, GenerationOutput

MAX_NEW_TOKENS = 12


@dataclass(frozen=True)
class Group:
    """The samples of a problem, with the engine's record of each."""

    problem: Problem
    outputs: list[GenerationOutput]

    @property
    def rewards(self) -> list[float]:
        return [reward_of(self.problem, output) for output in self.outputs]

    @property
    def prompt_ids(self) -> list[int]:
        """The ids that the server made of the prompt, so that nothing is tokenised twice."""
        ids = self.outputs[0].prompt_ids
        assert ids is not None, "asked for"
        return ids

    @property
    def differs(self) -> bool:
        """True where the rewards differ.  A group whose rewards are equal has no advantages, and teaches nothing."""
        return len(set(self.rewards)) > 1


def reward_of(problem: Problem, output: GenerationOutput) -> float:
    ended = output.finish_reason is not None and output.finish_reason.type == "stop"
    return problem.reward(output.text or "", ended=ended)


def mean_reward(groups: Sequence[Group]) -> float:
    rewards = [reward for group in groups for reward in group.rewards]
    return sum(rewards) / len(rewards)


async def sample(
    client: AsyncClient, problems: Sequence[Problem], n: int, temperature: float, adapter: str | None = None
) -> list[Group]:
    """Sample `n` answers of one line to each problem, all at once; by an adapter of the model, if it is named."""
    options: dict[str, Any] = {} if adapter is None else {"lora_path": adapter}
    params = {"temperature": temperature, "n": n, "max_new_tokens": MAX_NEW_TOKENS, "stop": ["\n"]}

    async def one(problem: Problem) -> Group:
        outputs = await client.generate(
            [problem.prompt], sampling_params=params, return_logprob=True, return_prompt_token_ids=True, **options
        )
        assert isinstance(outputs, list)
        return Group(problem, outputs)

    return list(await asyncio.gather(*(one(problem) for problem in problems)))
