"""The settings: which model, which task, how long and at which rates.

fp8    32 experts, 4 of them a token; running sums of 12 digits; the engine has FP8 weights; 4 updates a step
bf16   8 experts, 2 of them a token; sums of three digits; the engine has the trainer's bfloat16; 1 update a step
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from examples.grpo.task import Task
from examples.grpo.train import Plan
from examples.make_checkpoint.spec import CheckpointSpec

BF16_SPEC = CheckpointSpec(
    vocab_size=320, hidden_size=96, layers=3, dense_first=0, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2,
    moe_intermediate_size=96, context_length=128,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """`is_fp8`: the server quantises what it is sent, as engines with FP8 rollouts do; the trainer stays as it is."""

    spec: CheckpointSpec
    task: Task
    plan: Plan
    is_fp8: bool = False


SETTINGS = {
    "fp8": Setting(
        replace(BF16_SPEC, experts=32, top_k=4, moe_intermediate_size=32),
        Task("running", 12),
        Plan(steps=80, updates=4, rate=1e-4, balance=0.02),
        is_fp8=True,
    ),
    "bf16": Setting(BF16_SPEC, Task("sums", 3), Plan()),
}
