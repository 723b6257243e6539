"""On-policy distillation between two live servers.

student's server   samples answers           ---> sequences
teacher's server   client.score(top_k=...)   ---> the teacher's likeliest tokens at every place of them
trainer            reverse KL of each token, one step on the student's last layers
student's server   a refresh brings the trained layers
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from examples.distillation.loss import TeacherScores, agreement, joined, reverse_kl
from examples.live.ending import in_thread
from examples.live.layers import LastLayers
from examples.live.progress import Shown
from examples.live.refreshing import connected_sender
from examples.real_model.policy import output_logits, pack
from examples.real_model.problems import load, shuffled
from examples.real_model.rollouts import Group, mean_reward, sample
from lockstep_rl import AsyncClient, WeightSender


@dataclass(frozen=True)
class Plan:
    """The sizes and rates of a run.  The student lacks `removed` layers from `first_removed` on.

    It trains all layers above the gap.  `groups`: problems a step, `samples`: answers to each.
    """

    steps: int = 40
    first_removed: int = 12
    removed: int = 6
    groups: int = 8
    samples: int = 4
    top_k: int = 64
    rate: float = 1e-4
    judge_every: int = 10
    judged: int = 80


@dataclass(frozen=True)
class Step:
    """The record of a step: the mean reverse KL of its tokens before it."""

    step: int
    seconds: float
    kl: float
    tokens: int
    gradient_norm: float


@dataclass(frozen=True)
class Judgement:
    """The student on held-out problems.

    `kl` and `agreement` are of its own samples, `greedy` is the reward of greedy answers.
    """

    step: int
    seconds: float
    kl: float
    agreement: float
    greedy: float


@dataclass
class Result:
    seed: int
    layers: tuple[int, int]  # of teacher and student
    teacher_greedy: float = 0.0
    seconds: float = 0.0
    judgements: list[Judgement] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Distillation:
    """A run of `student`, which `student_url` serves as version 0, towards the model at `teacher_url`."""

    def __init__(
        self, student: Any, student_url: str, teacher_url: str, plan: Plan, result: Result, progress: Shown
    ) -> None:
        self._model = student
        self._student_url = student_url
        self._teacher_url = teacher_url
        self._plan = plan
        self._result = result
        self._progress = progress
        above_gap = len(student.model.layers) - plan.first_removed
        self._layers = LastLayers(student, above_gap, plan.rate, plan.steps)
        self._held_out = load("held_out")[: plan.judged]
        self._started = time.monotonic()

    async def run(self) -> None:
        """Run all steps.  Raises what a server or a refresh raises."""
        plan = self._plan
        stream = shuffled(load("train"), self._result.seed)
        async with AsyncClient(self._student_url) as student, AsyncClient(self._teacher_url) as teacher:
            self._progress.doing("the teacher answers held-out problems")
            self._result.teacher_greedy = mean_reward(await sample(teacher, self._held_out, 1, 0.0))
            with connected_sender(self._student_url) as sender:
                await self._judge(student, teacher, 0)
                for step in range(1, plan.steps + 1):
                    self._progress.doing(f"step {step}: sampling")
                    groups = await sample(student, list(islice(stream, plan.groups)), plan.samples, 1.0)
                    self._progress.doing(f"step {step}: scoring by the teacher")
                    scores = await self._scored(teacher, groups)
                    self._progress.doing(f"step {step}: training")
                    await in_thread(self._step, step, groups, scores)
                    await in_thread(self._refresh, sender, str(step))
                    if step % plan.judge_every == 0 or step == plan.steps:
                        await self._judge(student, teacher, step)
        self._result.seconds = self._seconds()

    def _refresh(self, sender: WeightSender, version: str) -> None:
        """Bring the trained layers to the server; the others are as they were."""
        sender.refresh(self._layers.tensors(), version, dtype=torch.bfloat16, coverage="partial")

    async def _scored(self, teacher: AsyncClient, groups: Sequence[Group]) -> TeacherScores:
        """Score the output tokens of all samples, in the order in which `pack` has them."""
        sequences = [group.prompt_ids + output.output_ids for group in groups for output in group.outputs]
        starts = [len(group.prompt_ids) for group in groups for _ in group.outputs]
        return joined(await teacher.score(sequences, start=starts, top_k=self._plan.top_k))

    def _step(self, step: int, groups: Sequence[Group], scores: TeacherScores) -> None:
        kl_T = reverse_kl(output_logits(self._model, pack(groups)), scores)
        loss = kl_T.mean()
        loss.backward()
        norm = self._layers.step()
        self._result.steps.append(Step(step, self._seconds(), loss.item(), len(kl_T), norm))
        last = self._result.judgements[-1]
        self._progress.line(
            f"step {step} of {self._plan.steps}: KL {loss.item():.3f} a token; held out: KL {last.kl:.3f}, "
            f"greedy answers right {last.greedy:.2f}"
        )

    @torch.no_grad()  # holds in the thread that calls, and in no other
    def _measure(self, groups: Sequence[Group], scores: TeacherScores) -> tuple[float, float]:
        logits_TV = output_logits(self._model, pack(groups))
        return float(reverse_kl(logits_TV, scores).mean()), agreement(logits_TV, scores)

    async def _judge(self, student: AsyncClient, teacher: AsyncClient, step: int) -> None:
        """Judge held-out answers of the version that the trainer has now."""
        self._progress.doing(f"step {step}: answering {len(self._held_out)} held-out problems")
        groups = await sample(student, self._held_out, 1, 1.0)
        greedy = mean_reward(await sample(student, self._held_out, 1, 0.0))
        scores = await self._scored(teacher, groups)
        kl, same = await in_thread(self._measure, groups, scores)
        self._result.judgements.append(Judgement(step, self._seconds(), kl, same, greedy))
        self._progress.line(
            f"step {step}: held-out KL {kl:.3f} a token, same likeliest token {same:.0%}, greedy answers right "
            f"{greedy:.2f} (teacher: {self._result.teacher_greedy:.2f})"
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._started
