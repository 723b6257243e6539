"""Samples of a real scheduler, and the same tokens under engine numerics in a Hugging Face model.

Shapes: B samples, S positions, L MoE layers, K top-k.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from capture.replay import force_routes
from rollout.numerics import EngineNumerics, engine_logprobs
from tests.family_zoo import SEEING
from tests.invariance import Ask, Facts, Server


def trainer_model(folder: Path, dtype: torch.dtype, name: str = "qwen3_moe") -> Any:
    """Load the checkpoint in transformers, in training mode."""
    kind = transformers.AutoModelForImageTextToText if name in SEEING else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=dtype)
    model.set_attn_implementation("eager")  # sinks and float32, everywhere the same
    return model.train()


def sampled(
    folder: Path, count: int, dtype: str = "bfloat16", temperature: float = 1.0
) -> tuple[list[Ask], list[Facts]]:
    """Sample prompts that share prefixes, then their continuations; requests arrive while others decode.

    Prompts are computed in chunks of 16 tokens.
    """
    server = Server(folder, dtype, chunked_prefill_size=16, state_snapshot_interval=8)
    rng = random.Random(0)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 320) for _ in range(rng.randint(1, most)))

    def ask(prompt: tuple[int, ...]) -> Ask:
        seed = rng.randrange(2**32)
        return Ask(prompt, {"max_new_tokens": rng.randint(2, 24), "temperature": temperature, "sampling_seed": seed})

    shared = tuple(rng.randrange(3, 320) for _ in range(140))
    asks = [ask(shared[: rng.choice((3, 40, 140))] + tokens(20)) for _ in range(count - count // 2)]
    facts = server.together(asks, [rng.randrange(3) for _ in asks], every_token=False)
    known = [(*each.prompt, *found.token_ids) for each, found in zip(asks, facts)]
    turns = [ask(before + tokens(10)) for before in known[: count // 2]]
    facts += server.together(turns, [rng.randrange(3) for _ in turns], every_token=False)
    assert sum(found.cached_tokens for found in facts) > 0, "no prefix was hit"
    return asks + turns, facts


@dataclass(frozen=True)
class Batch:
    """Samples side by side, every other one padded on the left.  `spans`: the place of each sample's tokens, and its
    outputs."""

    input_ids: torch.Tensor
    mask: torch.Tensor
    spans: list[tuple[slice, slice]]

    @classmethod
    def of(cls, asks: Sequence[Ask], facts: Sequence[Facts]) -> Batch:
        lengths = [len(ask.prompt) + len(known.token_ids) for ask, known in zip(asks, facts)]
        shape = (len(asks), max(lengths))
        ids, mask, spans = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), []
        for row, (ask, known, length) in enumerate(zip(asks, facts, lengths)):
            start = shape[1] - length if row % 2 else 0
            ids[row, start : start + length] = torch.tensor([*ask.prompt, *known.token_ids])
            mask[row, start : start + length] = 1
            spans.append((slice(start, start + length), slice(start + len(ask.prompt), start + length)))
        return cls(ids, mask, spans)


def disagreements(
    model: Any, numerics: EngineNumerics, asks: Sequence[Ask], facts: Sequence[Facts], temperature: float = 1.0
) -> list[str]:
    """Return the log-probabilities and routes of the trainer that differ from the engine's, bit for bit."""
    batch = Batch.of(asks, facts)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.mask).logits
    found = []
    for row, (known, (tokens, outputs)) in enumerate(zip(facts, batch.spans)):
        before = slice(outputs.start - 1, outputs.stop - 1)
        ours = engine_logprobs(logits[row, before], batch.input_ids[row, outputs], temperature)
        if ours.numpy().tobytes() != known.logprobs.astype(np.float32).tobytes():
            found.append(f"log-probabilities of sample {row}")
        if numerics.routes is not None:
            routes = numerics.routes[row, tokens.start : tokens.stop - 1].numpy()
            if not np.array_equal(routes, known.routes):
                found.append(f"routes of sample {row}")
    return found


def gradients(
    model: Any, batch: Batch, routes: torch.Tensor | None = None, *, by_engine: bool = False
) -> dict[str, torch.Tensor]:
    """Return gradients of a loss of random weights over all log-probabilities, with the routes forced where given."""
    model.zero_grad()
    is_pair = (batch.mask[:, 1:] * batch.mask[:, :-1]).bool()
    weights = torch.randn(is_pair.shape, generator=torch.Generator().manual_seed(0))
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    with nullcontext() if routes is None else force_routes(model, routes):
        arguments = {"input_ids": batch.input_ids, "attention_mask": batch.mask, "position_ids": positions}
        logits, targets = model(**arguments, use_cache=False).logits[:, :-1], batch.input_ids[:, 1:]
    if by_engine:
        logprobs = engine_logprobs(logits, targets)
    else:
        logprobs = logits.float().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    (logprobs * weights)[is_pair].mean().backward()
    return {name: tensor.grad.float() for name, tensor in model.named_parameters() if tensor.grad is not None}


def gradient_errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return relative errors by parameter, in the 2-norm."""
    return {name: ((found[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted}
