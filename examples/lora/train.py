"""GRPO of several adapters of one model at once, against one server.

    every step:   samples of all adapters, in the same batches of the server
                  for each adapter:   a step of its own optimiser -> its next version, while the server goes on

The trainer holds the model once, frozen, with all adapters (PEFT).  A refresh sends one adapter's matrices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import peft
import torch

from examples.grpo.policy import WARMUP_STEPS
from examples.live.ending import in_thread
from examples.live.progress import Shown
from examples.live.refreshing import connected_sender
from examples.lora.courses import Course, Samples
from lockstep_rl import AsyncClient, Client


@dataclass(frozen=True)
class Plan:
    """The sizes and rates of a run.  `groups`: problems a step of each adapter, `samples`: answers to each.

    `supervised_steps`: the most of each task before, of a model with random weights.
    """

    supervised_steps: int = 2000
    steps: int = 60
    groups: int = 16
    samples: int = 8
    rank: int = 16
    rate: float = 2e-3
    judge_every: int = 10
    judged: int = 128


@dataclass
class Learned:
    """The record of one adapter: rewards by step, judgements as (step, held-out reward), and its refreshes."""

    adapter: str
    rewards: list[float] = field(default_factory=list)
    judgements: list[tuple[int, float]] = field(default_factory=list)
    refresh_seconds: list[float] = field(default_factory=list)
    refresh_bytes: int = 0


@dataclass
class Result:
    """A run.  `full_bytes`, `full_seconds`: of a refresh of the whole model, sent once at the end."""

    setting: str
    seed: int
    seconds: float = 0.0
    full_bytes: int = 0
    full_seconds: float = 0.0
    adapters: list[Learned] = field(default_factory=list)


def adapted(model: Any, names: list[str], rank: int, modules: list[str]) -> peft.PeftModel:
    """Return `model` with a new adapter of each name, none of which changes it yet."""
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)
    found = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        found.add_adapter(name, config)
    return found


class Pupil:
    """One adapter of `model` in training."""

    def __init__(self, model: peft.PeftModel, name: str, course: Course, plan: Plan) -> None:
        self.learned = Learned(name)
        self.course = course
        self._model = model
        self._weights = [weight for path, weight in model.named_parameters() if f".{name}." in path]
        self._adam = torch.optim.AdamW(self._weights, lr=plan.rate, weight_decay=0.0, betas=(0.9, 0.95))
        rises = torch.optim.lr_scheduler.LambdaLR(self._adam, lambda step: min((step + 1) / WARMUP_STEPS, 1.0))
        self._schedule = rises

    def step(self, samples: Samples) -> None:
        """Take one step of the optimiser on samples of this adapter."""
        self.learned.rewards.append(sum(samples.rewards) / len(samples.rewards))
        self._model.set_adapter(self.learned.adapter)
        loss = samples.loss(self._model.get_base_model())
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
            self._adam.step()
            self._schedule.step()
        self._adam.zero_grad()

    def send(self, client: Client) -> None:
        """Make the present matrices the adapter's next version."""
        name, start = self.learned.adapter, time.perf_counter()
        with client.adapter_update(name) as update:
            update.send(self._model, name)
        self.learned.refresh_seconds.append(time.perf_counter() - start)
        self.learned.refresh_bytes = sum(weight.nbytes for weight in self._weights)


class Training:
    """A run of the adapters of `model` against the server at `url`, which serves the model as version 0."""

    def __init__(
        self, model: Any, url: str, courses: Mapping[str, Course], modules: list[str], plan: Plan, shown: Shown
    ) -> None:
        self._base, self._url, self._plan, self._shown = model, url, plan, shown
        self._full = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        peft_model = adapted(model, list(courses), plan.rank, modules)
        self.pupils = [Pupil(peft_model, name, course, plan) for name, course in courses.items()]

    async def run(self, result: Result) -> None:
        """Run all steps.  Raises what the server or a refresh raises."""
        plan, started = self._plan, time.monotonic()
        result.adapters = [pupil.learned for pupil in self.pupils]
        with Client(self._url) as sending:
            async with AsyncClient(self._url) as client:
                self._shown.doing("sending the adapters")
                for pupil in self.pupils:
                    await in_thread(pupil.send, sending)
                await self._judge(client, 0)
                for step in range(1, plan.steps + 1):
                    await self._step(client, sending)
                    rewards = ", ".join(
                        f"{each.learned.adapter} {each.learned.rewards[-1]:.2f}" for each in self.pupils
                    )
                    self._shown.report("GRPO", step, plan.steps, f"reward of {rewards}")
                    if step % plan.judge_every == 0 or step == plan.steps:
                        await self._judge(client, step)
        result.seconds = time.monotonic() - started
        result.full_bytes, result.full_seconds = await in_thread(self._refresh_all)

    async def _step(self, client: AsyncClient, sending: Client) -> None:
        plan = self._plan
        self._shown.doing("sampling and training")
        asked = (each.course.sample(client, each.learned.adapter, plan.groups, plan.samples) for each in self.pupils)
        for pupil, samples in zip(self.pupils, await asyncio.gather(*asked), strict=True):
            await in_thread(pupil.step, samples)
            await in_thread(pupil.send, sending)

    async def _judge(self, client: AsyncClient, step: int) -> None:
        """Judge held-out answers of the versions that the trainer has now."""
        self._shown.doing("judging held-out answers")
        asked = (each.course.judge(client, each.learned.adapter, self._plan.judged) for each in self.pupils)
        for pupil, reward in zip(self.pupils, await asyncio.gather(*asked), strict=True):
            pupil.learned.judgements.append((step, reward))
            self._shown.line(f"step {step}: held-out reward of {pupil.learned.adapter} {reward:.3f}")

    def _refresh_all(self) -> tuple[int, float]:
        """Send the whole model once, as a trainer without adapters does; return its bytes and seconds."""
        with connected_sender(self._url) as sender:
            start = time.perf_counter()
            sender.refresh(self._full, "1", dtype=torch.bfloat16)
            return 2 * sum(tensor.numel() for tensor in self._full.values()), time.perf_counter() - start
