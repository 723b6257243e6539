"""Versions of small models, and the answers to a fixed request of engines that were started with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint, random_weights
from tests.scheduler_harness import Harness

Tensors = dict[str, torch.Tensor]

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW_TOKENS = 4
NUM_CONTENTS = 3
DTYPE = "bfloat16"

MATRIX_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "layers": 2, "dense_first": 1, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "experts": 4, "top_k": 2, "moe_intermediate_size": 32, "context_length": 64,
}  # fmt: skip
HISTORY_SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 16, "layers": 2, "dense_first": 0, "heads": 2, "kv_heads": 1, "head_dim": 8,
    "intermediate_size": 16, "experts": 4, "top_k": 2, "moe_intermediate_size": 8, "context_length": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Version:
    """A label, and the number of the content that it stands for."""

    label: str
    content: int


@dataclass(frozen=True)
class Answer:
    """The answer to the fixed request: the tokens sampled greedily, and the log-probabilities of prompt and tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float | None, ...]


class Contents:
    """Random contents of one shape, `contents[i]`, that differ in every tensor; `checkpoints[i]` holds the i-th."""

    def __init__(self, folder: Path, shape: dict[str, Any], dtype: str, count: int) -> None:
        specs = [CheckpointSpec(seed=seed, dtype=dtype, **shape) for seed in range(count)]  # type: ignore[arg-type]
        self.checkpoints = [make_checkpoint(folder / f"content{spec.seed}", spec) for spec in specs]
        self.contents: list[Tensors] = [dict(random_weights(spec)) for spec in specs]


class Zoo(Contents):
    """The contents of the matrix.  `answers[i]` is the answer of an engine that was started with content i.

    `adapter`: the name that requests have; None: they are for the model alone.
    """

    adapter: str | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, MATRIX_SHAPE, DTYPE, NUM_CONTENTS)
        self.answers = [ask(Harness(checkpoint, **harness_settings()), "cold") for checkpoint in self.checkpoints]
        assert len({answer.logprobs for answer in self.answers}) == NUM_CONTENTS

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the engines under test."""
        return harness_settings()


def harness_settings() -> dict[str, Any]:
    """Return the settings of the matrix's engines."""
    return {
        "dtype": DTYPE,
        "max_total_tokens": 512,
        "max_running_requests": 8,
        "skip_tokenizer_init": True,
        "enable_return_routed_experts": False,
    }


def ask(harness: Harness, namespace: str) -> Answer:
    """Send the fixed request under the cache key `namespace`, and return its answer."""
    (result,) = harness.generate(
        [PROMPT], {"max_new_tokens": NEW_TOKENS}, extra_key=namespace, logprob_start_len=0, return_routed_experts=False
    )
    assert result.finished is not None and result.finished.prompt_logprobs is not None
    return Answer(tuple(result.token_ids), tuple(result.logprobs), tuple(result.finished.prompt_logprobs.values))
