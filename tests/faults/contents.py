"""Versions of a small model, and what an engine that was started with each of them answers to one fixed request.

Knows checkpoints.  Does not know refreshes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.entrypoints.make_checkpoint import CheckpointSpec, make_checkpoint, random_weights
from tests.scheduler_harness import Harness

Tensors = dict[str, torch.Tensor]

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW_TOKENS = 4
NUM_CONTENTS = 3
DTYPE = "bfloat16"

_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "layers": 2, "dense_first": 1, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "experts": 4, "top_k": 2, "moe_intermediate_size": 32, "context_length": 64,
    "dtype": DTYPE,
}  # fmt: skip


@dataclass(frozen=True)
class Version:
    """A label, and the number of the content that it stands for."""

    label: str
    content: int


@dataclass(frozen=True)
class Answer:
    """To the fixed request: the tokens sampled greedily, and the log-probabilities of prompt and tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float | None, ...]


class Zoo:
    """`contents[i]` differ in every tensor; the first is that of `checkpoints[0]`, and so on.

    `answers[i]`: of an engine that was started with content i and never refreshed.
    """

    def __init__(self, folder: Path) -> None:
        specs = [CheckpointSpec(seed=seed, **_SHAPE) for seed in range(NUM_CONTENTS)]
        self.checkpoints = [make_checkpoint(folder / f"content{spec.seed}", spec) for spec in specs]
        self.contents: list[Tensors] = [dict(random_weights(spec)) for spec in specs]
        self.answers = [ask(new_harness(checkpoint), "cold") for checkpoint in self.checkpoints]
        assert len({answer.logprobs for answer in self.answers}) == NUM_CONTENTS


def new_harness(checkpoint: Path, **settings: Any) -> Harness:
    """An engine of the fixed settings, whose log-probabilities do not depend on the batch."""
    return Harness(checkpoint, **harness_settings() | settings)


def harness_settings() -> dict[str, Any]:
    return {
        "dtype": DTYPE,
        "max_total_tokens": 512,
        "max_running_requests": 8,
        "skip_tokenizer_init": True,
        "enable_return_routed_experts": False,
    }


def ask(harness: Harness, namespace: str) -> Answer:
    """The fixed request, of which nothing is cached under `namespace`."""
    (result,) = harness.generate(
        [PROMPT], {"max_new_tokens": NEW_TOKENS}, extra_key=namespace, logprob_start_len=0, return_routed_experts=False
    )
    assert result.finished is not None and result.finished.prompt_logprobs is not None
    return Answer(tuple(result.token_ids), tuple(result.logprobs), tuple(result.finished.prompt_logprobs.values))
