"""The trainer's policy: a Hugging Face model that scores samples under its own or given routes, and takes steps.

The model computes in float32 with weights that bfloat16 holds exactly, so that engine and trainer have the same
numbers and differ in arithmetic only; the optimiser keeps float32 masters, so that small steps add up.

Shapes: N samples of one prompt, S positions, O output positions, T output tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from capture.errors import UnsupportedRouterError
from capture.replay import find_routers, force_routes, pad_routes, record_routes
from examples.demo.mismatch import (
    BitAgreement,
    LogprobMismatch,
    RouteMismatch,
    bit_agreement,
    logprob_mismatch,
    route_mismatch,
)
from examples.demo.objective import group_advantages, policy_gradient_loss
from examples.demo.rollouts import SampleGroup
from rollout.numerics import engine_logprobs, use_engine_numerics


def load_model(path: str | Path) -> torch.nn.Module:
    """Load the checkpoint in `transformers`, float32, without dropout."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False
    ).eval()
    return model


def has_experts(model: torch.nn.Module) -> bool:
    """Return whether the model has experts, whose routes can be followed."""
    try:
        return bool(find_routers(model))
    except UnsupportedRouterError:
        return False


def frozen_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Copy the model as it is now, for later comparison."""
    return copy.deepcopy(model).requires_grad_(False)


def output_logprobs(model: Any, group: SampleGroup) -> torch.Tensor:
    """Return the log-probability of every output token [N, O], float32; meaningless where `group.mask_NO` is false.

    No attention mask: padding comes after the sample, where causal attention does not look.
    """
    logits_NSV = model(input_ids=group.input_ids_NS, use_cache=False).logits
    targets_NO = group.input_ids_NS[:, group.prompt_len :]
    logprobs_NOV = logits_NSV[:, group.prompt_len - 1 : -1].log_softmax(dim=-1)
    logprobs_NO: torch.Tensor = logprobs_NOV.gather(-1, targets_NO[..., None]).squeeze(-1)
    return logprobs_NO


def forced(model: torch.nn.Module, group: SampleGroup) -> AbstractContextManager[Any]:
    """Have every token that has a row follow the engine's routes inside the block.  A dense model has no routes."""
    return nullcontext() if group.routes is None else force_routes(model, group.routes)


@torch.no_grad()
def mismatch_forced(model: torch.nn.Module, groups: Iterable[SampleGroup]) -> LogprobMismatch:
    """Compare the engine with the trainer, which follows the engine's routes."""
    engine_parts, trainer_parts = [], []
    for group in groups:
        with forced(model, group):
            logprobs_NO = output_logprobs(model, group)
        engine_parts.append(group.engine_logprobs_NO[group.mask_NO])
        trainer_parts.append(logprobs_NO[group.mask_NO])
    return logprob_mismatch(torch.cat(engine_parts), torch.cat(trainer_parts))


@torch.no_grad()
def mismatch_own(model: torch.nn.Module, groups: Iterable[SampleGroup]) -> tuple[LogprobMismatch, RouteMismatch]:
    """Compare the engine with the trainer, which routes by itself.  Routes are of the rows that predict an output."""
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for group in groups:
        num_samples, seq_len = group.input_ids_NS.shape
        with record_routes(model) as recorded:
            logprobs_NO = output_logprobs(model, group)
        assert group.routes is not None
        own_NSLK = recorded.ids().unflatten(0, (num_samples, seq_len))
        engine_NSLK = pad_routes(group.routes, group.routes[0].num_experts, seq_len)
        predicting = slice(group.prompt_len - 1, seq_len - 1)
        sides = (group.engine_logprobs_NO, logprobs_NO, engine_NSLK[:, predicting], own_NSLK[:, predicting])
        for part, side in zip(parts, sides):
            part.append(side[group.mask_NO])
    engine_T, trainer_T, engine_TLK, trainer_TLK = (torch.cat(part) for part in parts)
    return logprob_mismatch(engine_T, trainer_T), route_mismatch(engine_TLK, trainer_TLK)


@torch.no_grad()
def agreement_exact(model: Any, groups: Iterable[SampleGroup]) -> BitAgreement:
    """Compare the engine with the trainer under engine numerics, which routes by itself.

    Raises `UnsupportedFeature` where no operators are compiled.
    """
    engine_parts, trainer_parts = [], []
    with use_engine_numerics(model):
        for group in groups:
            logits_NOV = model(input_ids=group.input_ids_NS, use_cache=False).logits[:, group.prompt_len - 1 : -1]
            logprobs_NO = engine_logprobs(logits_NOV, group.input_ids_NS[:, group.prompt_len :])
            engine_parts.append(group.engine_logprobs_NO[group.mask_NO])
            trainer_parts.append(logprobs_NO[group.mask_NO])
    return bit_agreement(torch.cat(engine_parts), torch.cat(trainer_parts))


class PolicyOptimizer:
    """Adam over float32 masters of the model's weights; the model gets them rounded to bfloat16 after each step."""

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        self._model = model
        self._weights = list(model.parameters())
        self._masters = [weight.detach().clone() for weight in self._weights]
        self._adam = torch.optim.Adam(self._masters, lr=learning_rate)

    def step(self, groups: list[SampleGroup]) -> tuple[float, float]:
        """Take one policy-gradient step with the routes forced; return the loss before it and the gradient's norm."""
        loss = self._backward(groups)
        squares = 0.0
        for master, weight in zip(self._masters, self._weights):
            master.grad = weight.grad
            squares += 0.0 if weight.grad is None else weight.grad.square().sum().item()
        self._adam.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights):
                weight.copy_(master.to(torch.bfloat16))
                weight.grad = master.grad = None
        return loss, squares**0.5

    def _backward(self, groups: list[SampleGroup]) -> float:
        num_tokens = sum(group.num_tokens for group in groups)
        total = 0.0
        for group in groups:
            with forced(self._model, group):
                loss = _group_loss(self._model, group, num_tokens)
                loss.backward()
            total += loss.item()
        return total


@torch.no_grad()
def loss_of(model: torch.nn.Module, groups: list[SampleGroup]) -> float:
    """Return the policy-gradient loss of the samples under the model as it is, with the routes forced."""
    num_tokens = sum(group.num_tokens for group in groups)
    total = 0.0
    for group in groups:
        with forced(model, group):
            total += _group_loss(model, group, num_tokens).item()
    return total


def _group_loss(model: torch.nn.Module, group: SampleGroup, num_tokens: int) -> torch.Tensor:
    advantages_N = group_advantages(group.rewards_N)
    return policy_gradient_loss(output_logprobs(model, group), group.mask_NO, advantages_N, num_tokens)
