"""The settings: which model, which task, how long and at which rates.

            fp8                                         bf16
model       4 layers of 32 experts, 1 a token           3 layers of 8 experts, 2 a token
task        running sums of 12 digits                   sums of two numbers of 3 digits
engine      weights in FP8                              the trainer's weights in bfloat16
a step      4 updates, ratios to the trainer itself     1 update, ratios to the engine
samples     between steps                               all the while
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
        replace(BF16_SPEC, layers=4, experts=32, top_k=1, moe_intermediate_size=64, norm_topk_prob=False),
        Task("running", 12),
        Plan(steps=60, updates=4, in_flight=0, rate=1e-4, falls=False, balance=0.02, top_p=1.0, corrected=False),
        is_fp8=True,
    ),
    "bf16": Setting(BF16_SPEC, Task("sums", 3), Plan()),
}
