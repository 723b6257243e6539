"""Log-probabilities of tokens by the engine's sampler operator, with a gradient.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rollout.core.errors import BadRequest
from rollout.numerics.checks import kernels_for
from rollout.sampling.native_sampler import select_sampler


class _Logprobs(torch.autograd.Function):
    """The log-probabilities of token ids [N] by logits [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
        available = kernels_for(logits.device).available
        sampler = select_sampler(logits.dtype, logits.device, available, deterministic=True)
        ctx.save_for_backward(logits, token_ids)
        ctx.temperature = temperature
        return sampler.score(logits.contiguous(), token_ids, temperature, [], 0).logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, token_ids = ctx.saved_tensors
        of_logits = (logits.to(gradient.dtype) / ctx.temperature).softmax(-1).neg_()
        of_logits.scatter_add_(1, token_ids[:, None], torch.ones_like(gradient)[:, None])
        return of_logits.mul_((gradient / ctx.temperature)[:, None]).to(logits.dtype), None, None


class _WithGradientOf(torch.autograd.Function):
    """The values of one tensor with the gradient of another: `source`, of the same shape."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradient


def with_gradient_of(logprobs: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return `logprobs` float32 [...], bit for bit, with the gradient of `source` float32 [...].

    This is a straight-through estimator (Bengio et al. 2013, arXiv:1308.3432).  It is for a trainer that wants the
    engine's log-probabilities with the gradients of its own forward in float32.  These are free of the rounding of
    activations in bfloat16.  Raises `BadRequest`.
    """
    if logprobs.shape != source.shape or not logprobs.dtype == source.dtype == torch.float32:
        raise BadRequest(
            f"both must be float32 of one shape, got {logprobs.dtype} {list(logprobs.shape)} and {source.dtype} "
            f"{list(source.shape)}"
        )
    if torch.is_grad_enabled() and not source.requires_grad:
        raise BadRequest("source has no gradient; compute it with gradients enabled")
    joined: torch.Tensor = _WithGradientOf.apply(logprobs, source)
    return joined


def engine_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probabilities float32 [...] of `token_ids` int64 [...] under `logits` [..., V].

    They have the bits that the engine reports for a sample, if the logits come from `use_engine_numerics` and the
    temperature is the sample's.  A greedy sample has temperature 1.  A request's bias and penalties change the engine's
    logits, but not these.  The result is differentiable in `logits`.  Raises `BadRequest`.
    """
    if logits.shape[:-1] != token_ids.shape or logits.dtype not in (torch.bfloat16, torch.float32):
        raise BadRequest(
            f"logits must be bfloat16 or float32 [..., V] for token ids {list(token_ids.shape)}, got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise BadRequest(f"temperature must be above 0 (1 for greedy samples), got {temperature}")
    if token_ids.dtype != torch.int64:
        raise BadRequest(f"token ids must be int64, got {token_ids.dtype}")
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < logits.shape[-1]:
        raise BadRequest(f"token ids must be in 0..{logits.shape[-1] - 1}; give ones that count, and mask the result")
    flat = logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
    logprobs: torch.Tensor = _Logprobs.apply(flat, token_ids.reshape(-1), float(temperature)).view(token_ids.shape)
    return logprobs
