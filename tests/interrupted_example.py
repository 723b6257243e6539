"""Run an example at its smallest, and print `NOW` whenever a moment begins: `python -m tests.interrupted_example`.

Arguments: the example, the moment (`rollout`, `training` or `refresh`), the folder of results.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from examples.agent import episodes
from examples.agent import run as agent_run
from examples.agent import train as agent_train
from examples.grpo import rollouts
from examples.grpo import run as grpo_run
from examples.grpo import train as grpo_train
from weight_sync.sender import WeightSender

ENDLESS = "1000"
AGENT = agent_train.Plan(supervised_steps=3, supervised_batch=4, problems_per_step=8, group_size=8, judged=2)
GRPO = grpo_train.Plan(supervised_steps=3, groups_per_step=8, in_flight=3, judged=2)
EXAMPLES: dict[str, Callable[[str], int]] = {
    "agent": lambda out: agent_run.main(["--steps", ENDLESS, "--out", out], AGENT),
    "grpo": lambda out: grpo_run.main(["--setting", "bf16", "--steps", ENDLESS, "--out", out], GRPO),
}
MOMENTS: dict[tuple[str, str], tuple[Any, str]] = {
    ("agent", "rollout"): (episodes.Agent, "_turn"),
    ("agent", "training"): (agent_train, "policy_step"),
    ("agent", "refresh"): (WeightSender, "refresh"),
    ("grpo", "rollout"): (rollouts.Rollouts, "group"),
    ("grpo", "training"): (grpo_train.Grpo, "_update"),
    ("grpo", "refresh"): (WeightSender, "refresh"),
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
    sys.exit(EXAMPLES[example](out))
