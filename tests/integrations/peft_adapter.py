"""A trainer's LoRA adapter of the checkpoint; PEFT's own forward is the judge of what a server samples with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

from tests.integrations.weights import trainer_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANK, ALPHA = 4, 8
TOLERANCE = 1e-4
"""Two computations in float32 differ by the order of their sums; contents of an adapter differ in the first digits."""


def adapted_model(checkpoint: Path, seed: int) -> Any:
    """Return the trainer's model with an adapter of PEFT."""
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(trainer_model(checkpoint), config)
    train(model, seed)
    return model


def train(model: Any, seed: int) -> None:
    """Give the adapter the content of this seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def assert_sampled_by(model: Any, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """Check that PEFT gives the log-probabilities of tokens sampled at temperature 1, and that the base does not."""
    assert len(tokens) == len(logprobs) > 0, (tokens, logprobs)
    off = distance(model, prompt, tokens, logprobs)
    assert off < TOLERANCE, f"{tokens} are off by {off}"
    with model.disable_adapter():
        off = distance(model, prompt, tokens, logprobs)
        assert off > 100 * TOLERANCE, f"{tokens} are of the base: off by {off}"


def distance(model: Any, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> float:
    """Return how far the model's log-probabilities of tokens sampled at temperature 1 are from these."""
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    own = logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((own - torch.tensor(logprobs).double()).abs().max())
