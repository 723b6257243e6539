"""The mismatch of trainer and engine on sampled tokens: log-probabilities and routes.

Pure functions over tensors of output tokens.

Shapes: T output tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import msgspec
import torch


class LogprobMismatch(msgspec.Struct, frozen=True):
    """`mean_abs` and `max_abs` in nats; `kl` estimates KL(engine || trainer) per token in nats."""

    num_tokens: int
    mean_abs: float
    max_abs: float
    kl: float


class BitAgreement(msgspec.Struct, frozen=True):
    """`num_equal` of `num_tokens` log-probabilities have the same bits on both sides; `kl` as in `LogprobMismatch`."""

    num_tokens: int
    num_equal: int
    kl: float


class RouteMismatch(msgspec.Struct, frozen=True):
    """Share of tokens with a different set of experts in any layer, and of (token, layer) pairs."""

    token_share: float
    token_layer_share: float


def logprob_mismatch(engine_T: torch.Tensor, trainer_T: torch.Tensor) -> LogprobMismatch:
    """Compare log-probabilities of tokens that the engine sampled.

    The KL is the "k3" estimator exp(d) - 1 - d, d = trainer - engine (Schulman, "Approximating KL divergence", 2020).
    It is unbiased, never negative, and of low variance.
    """
    difference = trainer_T.double() - engine_T.double()
    return LogprobMismatch(
        num_tokens=difference.numel(),
        mean_abs=difference.abs().mean().item(),
        max_abs=difference.abs().max().item(),
        kl=(difference.expm1() - difference).mean().item(),
    )


def bit_agreement(engine_T: torch.Tensor, trainer_T: torch.Tensor) -> BitAgreement:
    """Count the tokens whose log-probabilities, float32 on both sides, have the same bits."""
    equal_T = engine_T.view(torch.int32) == trainer_T.view(torch.int32)
    mismatch = logprob_mismatch(engine_T, trainer_T)
    return BitAgreement(num_tokens=mismatch.num_tokens, num_equal=int(equal_T.sum()), kl=mismatch.kl)


def route_mismatch(engine_TLK: torch.Tensor, trainer_TLK: torch.Tensor) -> RouteMismatch:
    """Compare logical expert ids of both sides as sets: the order within K carries no meaning for the output."""
    differs_TL = (engine_TLK.sort(dim=-1).values != trainer_TLK.sort(dim=-1).values).any(dim=-1)
    return RouteMismatch(
        token_share=differs_TL.any(dim=-1).double().mean().item(),
        token_layer_share=differs_TL.double().mean().item(),
    )
