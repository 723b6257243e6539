"""Samples from a live server: a stream of groups for training that never waits for the trainer, and held-out ones.

    workers: always in_flight groups at the server -> the freshest finished groups -> a batch a step
                      ^                                  (older ones are dropped, and counted)      |
                      '---- weights change under what is in flight: every token names it ----------'
                            version sampled it

Shapes: N samples, S positions, O output positions, M ids of masks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from capture.routed_experts import RoutedExperts
from capture.sampling_mask import SamplingMask
from examples.grpo.task import Problem
from rollout.client import AsyncRolloutClient, GenerationOutput


@dataclass(frozen=True)
class Sampling:
    """The sampling of answers, in training and when they are judged."""

    max_new_tokens: int
    top_p: float
    temperature: float = 1.0
    group_size: int = 8

    def params(self, n: int) -> dict[str, float]:
        return {
            "temperature": self.temperature, "top_p": self.top_p, "n": n, "max_new_tokens": self.max_new_tokens,
        }  # fmt: skip


@dataclass(frozen=True)
class Group:
    """A problem's samples, with the engine's record of each."""

    problem: Problem
    prompt_ids: list[int]
    outputs: list[GenerationOutput]

    @property
    def rewards(self) -> list[float]:
        return [self.problem.reward(output.text or "") for output in self.outputs]


@dataclass(frozen=True)
class Batch:
    """Samples of any number of groups, padded at the end.

    Of the output positions [N, O], `mask_NO` is true where there is a token, and `versions_NO` has the number of the
    weight version that sampled it.  `logprobs_NO` has the engine's log-probability among all tokens, and
    `masked_logprobs_NO` among the tokens of its sampling mask.  `masks` has the output tokens of all samples in order.
    It is None without a top-p, where every token is in the mask.
    """

    prompt_len: int
    input_ids_NS: torch.Tensor
    mask_NO: torch.Tensor
    versions_NO: torch.Tensor
    logprobs_NO: torch.Tensor
    masked_logprobs_NO: torch.Tensor
    rewards_N: torch.Tensor
    advantages_N: torch.Tensor
    routes: list[RoutedExperts]
    masks: SamplingMask | None

    @property
    def target_ids_NO(self) -> torch.Tensor:
        return self.input_ids_NS[:, self.prompt_len :]


def make_batch(groups: Sequence[Group]) -> Batch:
    """Make a batch of the samples of all groups.  Raises `ValueError` for prompts of several lengths."""
    samples = [(group, output) for group in groups for output in group.outputs]
    prompt_len = len(groups[0].prompt_ids)
    if any(len(group.prompt_ids) != prompt_len for group in groups):
        raise ValueError("the prompts of a batch must have equal lengths")
    longest = max(len(output.output_ids) for _, output in samples)
    input_ids_NS = torch.zeros(len(samples), prompt_len + longest, dtype=torch.int64)
    columns = torch.zeros(3, len(samples), longest)
    for row, (group, output) in enumerate(samples):
        length = len(output.output_ids)
        input_ids_NS[row, : prompt_len + length] = torch.tensor(group.prompt_ids + output.output_ids)
        versions = [int(span.version) for span in output.weight_versions for _ in range(span.start, span.end)]
        for column, values in zip(columns, (versions, output.logprobs, output.sampling_logprobs or output.logprobs)):
            column[row, :length] = torch.tensor(values, dtype=torch.float32)
    masks = [output.sampling_mask for _, output in samples if output.sampling_mask is not None]
    lengths_N = torch.tensor([len(output.output_ids) for _, output in samples])
    return Batch(
        prompt_len=prompt_len,
        input_ids_NS=input_ids_NS,
        mask_NO=torch.arange(longest) < lengths_N[:, None],
        versions_NO=columns[0].long(),
        logprobs_NO=columns[1],
        masked_logprobs_NO=columns[2],
        rewards_N=torch.tensor([reward for group in groups for reward in group.rewards]),
        advantages_N=torch.cat([advantages(group.rewards) for group in groups]),
        routes=[output.routed_experts for _, output in samples if output.routed_experts is not None],
        masks=SamplingMask.joined(masks) if masks else None,
    )


def advantages(rewards: Sequence[float]) -> torch.Tensor:
    """Return the rewards of a group [n], less their mean, over their standard deviation (GRPO, Shao et al. 2024).

    Where all rewards are equal, return zeros.
    """
    values = torch.tensor(rewards)
    spread = values.std(correction=0)
    return torch.zeros_like(values) if spread == 0 else (values - values.mean()) / spread


class FreshGroups:
    """The newest `capacity` finished groups; where one more comes, the oldest is dropped."""

    def __init__(self, capacity: int) -> None:
        self.num_dropped = 0
        self._groups: deque[Group] = deque(maxlen=capacity)
        self._changed = asyncio.Event()

    def put(self, group: Group) -> None:
        self.num_dropped += len(self._groups) == self._groups.maxlen
        self._groups.append(group)
        self._changed.set()

    async def take(self) -> list[Group]:
        """Take all groups, once there are as many as it holds."""
        while len(self._groups) < (self._groups.maxlen or 0):
            self._changed.clear()
            await self._changed.wait()
        groups = list(self._groups)
        self._groups.clear()
        return groups


class Rollouts:
    """Asks the server through `client`; `encode` gives the ids of a text.  Every sample comes with its whole record.

    `adapter`: the adapter of the model that is asked; None: the model alone.
    """

    def __init__(
        self,
        client: AsyncRolloutClient,
        encode: Callable[[str], list[int]],
        sampling: Sampling,
        adapter: str | None = None,
    ) -> None:
        self._client = client
        self._encode = encode
        self._sampling = sampling
        self._options: dict[str, Any] = {} if adapter is None else {"lora_path": adapter}

    async def group(self, problem: Problem, n: int) -> Group:
        prompt_ids = self._encode(problem.question)
        outputs = await self._client.generate(
            input_ids=[prompt_ids],
            sampling_params=self._sampling.params(n),
            return_logprob=True,
            return_routed_experts=True,
            return_sampling_mask=self._sampling.top_p < 1,
            **self._options,
        )
        assert isinstance(outputs, list)
        return Group(problem, prompt_ids, outputs)

    async def groups(self, problems: Sequence[Problem]) -> list[Group]:
        """Sample the groups of these problems, all at once."""
        return list(await asyncio.gather(*(self.group(problem, self._sampling.group_size) for problem in problems)))

    async def held_out(self, stream: Iterator[Problem], count: int) -> list[Group]:
        """Sample one answer to each of the next `count` problems, all at once."""
        return list(await asyncio.gather(*(self.group(problem, 1) for problem in islice(stream, count))))

    async def produce(self, stream: Iterator[Problem], finished: FreshGroups, in_flight: int) -> None:
        """Keep `in_flight` groups at the server for as long as this runs.

        Raises what a request raises: a lost sample ends the run.
        """

        async def worker() -> None:
            for problem in stream:  # shared: each takes the next
                finished.put(await self.group(problem, self._sampling.group_size))

        async with asyncio.TaskGroup() as workers:
            for _ in range(in_flight):
                workers.create_task(worker())
