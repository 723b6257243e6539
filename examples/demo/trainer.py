"""The demo's trainer process: a plain reinforcement-learning loop around a Lockstep server.

    connect -> roll out -> [ score: own routes, forced routes -> step, routes forced -> refresh -> roll out ] * steps

Read `train` first.  The process talks to the server through `RolloutClient` and `WeightSender` only, and to its parent
in JSON lines on standard output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers.utils import logging as transformers_logging

from examples.demo import policy
from examples.demo.messages import (
    Failure,
    Message,
    Progress,
    RolloutReport,
    StepReport,
    TrainerReport,
    encode,
)
from examples.demo.objective import group_advantages, load_questions
from examples.demo.rollouts import RolloutPlan, SampleGroup, roll_out, version_problem
from rollout.client import RolloutClient, Timeouts
from rollout.core.errors import LockstepError
from rollout.kernels.build import load_kernels
from weight_sync.errors import WeightSyncError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.sender import NamedTensors, WeightSender, named_tensors_of, split_fused_experts

Report = Callable[[Message], None]

BUCKET_BYTES = 8 << 20
WEIGHT_TIMEOUT_S = 60.0
SHOWN_PROBLEMS = 3


class Trainer:
    """A policy, the server that samples from it, and the reports of what both agree on."""

    def __init__(self, model: torch.nn.Module, client: RolloutClient, plan: RolloutPlan, report: Report) -> None:
        self._model = model
        self._client = client
        self._plan = plan
        self._report = report
        self._sender = WeightSender(client, timeout_s=WEIGHT_TIMEOUT_S)

    def train(self, num_steps: int, learning_rate: float) -> TrainerReport:
        """Take `num_steps` steps, each followed by a refresh and a new round of samples; return the report."""
        optimizer = policy.PolicyOptimizer(self._model, learning_rate)
        start = self._fingerprints()
        self._sender.connect()
        try:
            groups = self._roll_out(0)
            rollouts = [self._rollout_report(groups, "0", stale_model=None)]
            steps = []
            for step in range(num_steps):
                version = str(step + 1)
                stale_model = policy.frozen_copy(self._model)
                steps.append(self._step(optimizer, groups, version))
                groups = self._roll_out(step + 1)
                rollouts.append(self._rollout_report(groups, version, stale_model))
        finally:
            self._sender.close()
        return TrainerReport(rollouts, steps, start)

    def _roll_out(self, round_index: int) -> list[SampleGroup]:
        progress = partial(self._progress, f"roll out under version {round_index}")
        progress(0, len(self._plan.questions))
        return roll_out(self._client, self._plan, round_index, progress)

    def _step(self, optimizer: policy.PolicyOptimizer, groups: list[SampleGroup], version: str) -> StepReport:
        self._progress(f"policy-gradient step {version}", 0, 2)
        loss_before, gradient_norm = optimizer.step(groups)
        self._progress(f"policy-gradient step {version}", 1, 2)
        loss_after = policy.loss_of(self._model, groups)
        self._progress(f"policy-gradient step {version}", 2, 2)

        progress = partial(self._progress, f"refresh to version {version}")
        progress(0, 1)
        engine_before = self._client.weights_checker()["checksums"]
        refresh = self._sender.refresh(
            named_tensors_of(self._model, torch.bfloat16), version, bucket_bytes=BUCKET_BYTES, progress=progress
        )
        return StepReport(
            version=version,
            loss_before=loss_before,
            loss_after=loss_after,
            gradient_norm=gradient_norm,
            refresh_bytes=refresh.num_bytes,
            refresh_seconds=refresh.seconds,
            engine_before=engine_before,
            engine_after=self._client.weights_checker()["checksums"],
            trainer_after=self._fingerprints(),
        )

    def _rollout_report(
        self, groups: list[SampleGroup], version: str, stale_model: torch.nn.Module | None
    ) -> RolloutReport:
        phase, total = f"score version {version}", 3 if stale_model is None else 4
        self._progress(phase, 0, total)
        routes, forced = None, None
        if self._plan.with_routes:
            own, routes = policy.mismatch_own(self._model, groups)
            self._progress(phase, 1, total)
            forced = policy.mismatch_forced(self._model, groups)
        else:
            own = policy.mismatch_forced(self._model, groups)
        self._progress(phase, 2, total)
        exact = policy.agreement_exact(self._model, groups) if load_kernels().available else None
        self._progress(phase, 3, total)
        stale = None
        if stale_model is not None:
            stale = policy.mismatch_forced(stale_model, groups)
            self._progress(phase, 4, total)
        outputs = [output for group in groups for output in group.outputs]
        problems = [problem for output in outputs if (problem := version_problem(output, version)) is not None]
        return RolloutReport(
            version=version,
            num_samples=len(outputs),
            num_tokens=sum(group.num_tokens for group in groups),
            reward_mean=torch.cat([group.rewards_N for group in groups]).mean().item(),
            num_groups_with_signal=sum(bool(group_advantages(group.rewards_N).any()) for group in groups),
            num_groups=len(groups),
            num_version_problems=len(problems),
            version_problems=problems[:SHOWN_PROBLEMS],
            own=own,
            routes=routes,
            forced=forced,
            stale=stale,
            exact=exact,
        )

    def _fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of every logical tensor that a refresh would send now."""
        named: NamedTensors = split_fused_experts(named_tensors_of(self._model, torch.bfloat16))
        return {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in named}

    def _progress(self, phase: str, done: int, total: int) -> None:
        self._report(Progress(phase, done, total))


def main(argv: Sequence[str]) -> int:
    """Train against a running server; return the exit status."""
    args = _parse(argv)
    channel = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between the messages

    def report(message: Message) -> None:
        os.write(channel, encode(message))

    transformers_logging.disable_progress_bar()
    try:
        report(Progress("load the trainer's model", 0, 1))
        model = policy.load_model(args.model_path)
        report(Progress("load the trainer's model", 1, 1))
        questions, has_experts = load_questions()[: args.prompts], policy.has_experts(model)
        plan = RolloutPlan(questions, args.samples, args.max_new_tokens, args.seed, has_experts)
        with RolloutClient(args.url, timeouts=Timeouts(weights=2 * WEIGHT_TIMEOUT_S)) as client:
            report(Trainer(model, client, plan, report).train(args.steps, args.learning_rate))
    except (LockstepError, WeightSyncError) as error:
        report(Failure(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.demo.trainer", description="The demo's trainer.")
    parser.add_argument("--url", required=True, help="the server's address")
    parser.add_argument("--model-path", required=True, help="the checkpoint that the server has loaded")
    parser.add_argument("--prompts", type=int, required=True, help="number of questions")
    parser.add_argument("--samples", type=int, required=True, help="samples per question")
    parser.add_argument("--max-new-tokens", type=int, required=True, help="longest answer in tokens")
    parser.add_argument("--seed", type=int, required=True, help="seed of the sampling")
    parser.add_argument("--steps", type=int, required=True, help="policy-gradient steps")
    parser.add_argument("--learning-rate", type=float, required=True, help="Adam's")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
