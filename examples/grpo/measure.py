"""The mismatch of engine and trainer, on samples of the very weights that the trainer has.

Shapes: N samples, S positions, T output tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from capture.replay import pad_routes, record_routes
from examples.grpo.policy import Variant, behaviour_logprobs, full_logprobs, output_logits, trainer_logprobs
from examples.grpo.rollouts import Batch


@dataclass(frozen=True)
class Mismatch:
    """`kl`: of the trainer from the engine, by the estimator of Schulman (2020) that is never negative; `share_off`: of
    tokens whose two probabilities differ by over 5 %; `bits_equal`: whether none differs at all.  These are of
    probabilities among all tokens, with the engine's routes where the variant replays them.

    `ratio_low`, `ratio_high`: the 0.1 and 99.9 percentiles of the ratios that the loss would take, as the variant has
    them.  `flips_by_layer`: share of tokens that the trainer, left alone, sends to another set of experts.
    """

    kl: float
    share_off: float
    bits_equal: bool
    ratio_low: float
    ratio_high: float
    flips_by_layer: list[float]


@torch.no_grad()
def mismatch(model: Any, batch: Batch, variant: Variant) -> Mismatch:
    """Measure the mismatch on a batch that the weights of `model` sampled.

    Raises `ValueError` if several versions sampled it.
    """
    if len(batch.versions_NO[batch.mask_NO].unique()) != 1:
        raise ValueError("a mismatch needs samples of one weight version")
    logits_TV = output_logits(model, batch, variant)
    trainer_T, engine_T = full_logprobs(logits_TV, batch), batch.logprobs_NO[batch.mask_NO]
    difference_T = (trainer_T - engine_T).double()
    ratios_T = (trainer_logprobs(logits_TV, batch, variant) - behaviour_logprobs(batch, variant)).double().exp()
    return Mismatch(
        kl=float((difference_T.exp() - 1 - difference_T).mean()),
        share_off=float((difference_T.exp() - 1).abs().gt(0.05).double().mean()),
        bits_equal=torch.equal(trainer_T, engine_T),
        ratio_low=float(ratios_T.quantile(0.001)),
        ratio_high=float(ratios_T.quantile(0.999)),
        flips_by_layer=_flips(model, batch),
    )


def _flips(model: Any, batch: Batch) -> list[float]:
    """Return for each layer the share of flips among the positions that predict an output token."""
    num_samples, seq_len = batch.input_ids_NS.shape
    with record_routes(model) as recorded:
        model(input_ids=batch.input_ids_NS, use_cache=False)
    own_NSLK = recorded.ids().unflatten(0, (num_samples, seq_len))
    engine_NSLK = pad_routes(batch.routes, batch.routes[0].num_experts, seq_len)
    predicting = slice(batch.prompt_len - 1, seq_len - 1)
    own_TLK, engine_TLK = own_NSLK[:, predicting][batch.mask_NO], engine_NSLK[:, predicting][batch.mask_NO]
    differs_TL = (own_TLK.sort(-1).values != engine_TLK.sort(-1).values).any(-1)
    return [float(share) for share in differs_TL.double().mean(0)]
