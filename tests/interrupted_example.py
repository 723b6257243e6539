"""Run an example at its smallest, and print `NOW` whenever a moment begins: `python -m tests.interrupted_example`.

Arguments: the example, the moment (`rollout`, `training` or `refresh`), the folder of results.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.agent import episodes
from examples.agent import run as agent_run
from examples.agent import train as agent_train
from examples.distillation import run as distillation_run
from examples.distillation import train as distillation_train
from examples.grpo import rollouts
from examples.grpo import run as grpo_run
from examples.grpo import train as grpo_train
from examples.live.ending import leave
from examples.lora import run as lora_run
from examples.lora import train as lora_train
from examples.make_checkpoint.run import make_checkpoint
from examples.make_checkpoint.spec import CheckpointSpec
from examples.real_model import run as real_model_run
from examples.real_model import train as real_model_train
from weight_sync.sender import WeightSender

ENDLESS = "1000"
AGENT = agent_train.Plan(supervised_steps=3, supervised_batch=4, problems_per_step=8, group_size=8, judged=2)
GRPO = grpo_train.Plan(supervised_steps=3, groups_per_step=8, in_flight=3, judged=2)
LORA = lora_train.Plan(supervised_steps=3, groups=2, samples=2, rank=2, judged=2)
REAL_MODEL = real_model_train.Plan(layers=2, judged=2)
DISTILLATION = distillation_train.Plan(first_removed=17, removed=1, top_k=16, judged=2)
TRAINED = CheckpointSpec(
    family="llama", vocab_size=512, hidden_size=64, layers=20, heads=4, kv_heads=2, head_dim=16, intermediate_size=96,
    tie=True, context_length=256,
)  # fmt: skip


def checkpoint(out: str) -> str:
    """Write a tiny checkpoint, which stands for the trained one."""
    folder = Path(out) / "checkpoint"
    make_checkpoint(folder, TRAINED)
    return str(folder)


EXAMPLES: dict[str, Callable[[str], int]] = {
    "agent": lambda out: agent_run.main(["--steps", ENDLESS, "--out", out], AGENT),
    "grpo": lambda out: grpo_run.main(["--setting", "bf16", "--steps", ENDLESS, "--out", out], GRPO),
    "lora": lambda out: lora_run.main(["--steps", ENDLESS, "--out", out], LORA),
    "real_model": lambda out: real_model_run.main(
        ["--steps", ENDLESS, "--checkpoint", checkpoint(out), "--out", out], REAL_MODEL
    ),
    "distillation": lambda out: distillation_run.main(
        ["--steps", ENDLESS, "--teacher", checkpoint(out), "--out", out], DISTILLATION
    ),
}
MOMENTS: dict[tuple[str, str], tuple[Any, str]] = {
    ("agent", "rollout"): (episodes.Agent, "_turn"),
    ("agent", "training"): (agent_train, "policy_step"),
    ("agent", "refresh"): (WeightSender, "refresh"),
    ("grpo", "rollout"): (rollouts.Rollouts, "group"),
    ("grpo", "training"): (grpo_train.Grpo, "_update"),
    ("grpo", "refresh"): (WeightSender, "refresh"),
    ("lora", "training"): (lora_train.Pupil, "step"),
    ("lora", "refresh"): (lora_train.Pupil, "send"),
    ("real_model", "training"): (real_model_train.Training, "_step"),
    ("real_model", "refresh"): (WeightSender, "refresh"),
    ("distillation", "training"): (distillation_train.Distillation, "_step"),
}


def announce(owner: Any, name: str) -> None:
    """Have calls of `owner.name` print `NOW` first."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def announced(*args: Any, **kwargs: Any) -> Any:
        print("NOW", flush=True)
        return call(*args, **kwargs)

    setattr(owner, name, announced)


if __name__ == "__main__":
    example, moment, out = sys.argv[1:]
    announce(*MOMENTS[example, moment])
    leave(EXAMPLES[example](out))
