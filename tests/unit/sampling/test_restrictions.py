"""Rows that may sample only some tokens, in every sampler.

The judge is the same row without a restriction, whose logits are -infinity where a token is not allowed.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollout.core.sampling_params import SamplingParams
from rollout.kernels.build import load_kernels
from rollout.sampling.base import SampledTokens, Sampler
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler
from rollout.sampling.torch_sampler import TorchSampler
from tests.interpreted import kernels

VOCAB = 307
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 5, "logit_bias": {3: 9.0, 40: -2.0}},
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_new_tokens": 9},
    {"min_p": 0.1, "presence_penalty": -1.0},
]


def invariant() -> Sampler:
    kernels("sample"), kernels("sample_filter")
    from rollout.sampling.invariant_sampler import InvariantGpuSampler

    return InvariantGpuSampler(VOCAB)


def native() -> Sampler:
    load_kernels()
    return NativeSampler()


SAMPLERS: dict[str, Callable[[], Sampler]] = {"native": native, "torch": TorchSampler, "invariant": invariant}


def rows_of(is_restricted: bool) -> list[SamplingRow]:
    return [
        SamplingRow(
            SamplingParams(**params),
            99 + i,
            (2, 5),
            [1, 8],
            [8, 9, 9],
            top_logprobs=3,
            chosen_ids=(4,),
            wants_mask=True,
            is_restricted=is_restricted and i != 1,
        )
        for i, params in enumerate(PARAMS)
    ]


def allowed_sets() -> np.ndarray:
    """Return sets of very different sizes: bool [N, V]; the second row may sample all tokens."""
    rng = np.random.default_rng(3)
    allowed = rng.random((len(PARAMS), VOCAB)) < np.array([0.5, 2, 0.02, 0.9, 0.1, 0.3])[:, None]
    allowed[:, 300] = True
    return allowed


def sampled(sampler: Sampler, logits_NV: torch.Tensor, *, by_sets: bool, picked: list[int]) -> SampledTokens:
    """Sample the picked rows, restricted by sets, or by their logits."""
    allowed, logits = allowed_sets()[picked], logits_NV[picked].clone()
    info = SamplingBatchInfo([rows_of(by_sets)[i] for i in picked], VOCAB)
    if by_sets:
        padded = np.zeros((len(picked), -(-VOCAB // 32) * 32), dtype=bool)
        padded[:, :VOCAB] = allowed
        info.allowed_GW[:] = np.packbits(padded, axis=1, bitorder="little").view(np.int32)[info.restricted]
    else:
        logits[torch.from_numpy(~allowed)] = -torch.inf
    return sampler.sample(logits, info, torch.full((len(picked),), 3))


def masks(tokens: SampledTokens) -> list[tuple[list[int], list[float]]]:
    begins, flat = tokens.kept_begins().tolist(), (tokens.kept_ids.flatten(), tokens.kept_logprobs.flatten())
    spans = [slice(begin, begin + count) for begin, count in zip(begins, tokens.kept_counts.tolist(), strict=True)]
    return [(flat[0][span].tolist(), flat[1][span].tolist()) for span in spans]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_restriction_acts_as_logits_of_minus_infinity_and_greedy_masks_hold_all_that_is_allowed(name: str) -> None:
    sampler = SAMPLERS[name]()
    logits = torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    every = list(range(len(PARAMS)))
    mine, judge = (sampled(sampler, logits, by_sets=by_sets, picked=every) for by_sets in (True, False))
    for field in ("token_ids", "logprobs", "top_ids", "top_logprobs", "chosen_logprobs"):
        assert torch.equal(getattr(mine, field), getattr(judge, field)), field
    allowed = allowed_sets()
    for i, (mask, other) in enumerate(zip(masks(mine), masks(judge), strict=True)):
        if PARAMS[i].get("temperature") != 0.0:
            assert mask == other
            continue
        ids, logprobs = mask
        expected = allowed[i].copy()
        if PARAMS[i].get("min_new_tokens"):
            expected[[2, 5]] = False
        assert ids == expected.nonzero()[0].tolist()
        assert logprobs[ids.index(int(mine.token_ids[i]))] == pytest.approx(float(mine.logprobs[i]), abs=1e-5)
        assert float(np.exp(logprobs).sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_restricted_row_has_the_same_bits_alone_and_among_others() -> None:
    sampler = native()
    logits = torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(2))
    every = list(range(len(PARAMS)))
    together = sampled(sampler, logits, by_sets=True, picked=every)
    for i in every:
        alone = sampled(sampler, logits, by_sets=True, picked=[i])
        assert torch.equal(alone.token_ids, together.token_ids[i : i + 1])
        assert torch.equal(alone.logprobs, together.logprobs[i : i + 1])
        assert masks(alone)[0] == masks(together)[i]


def test_a_set_of_the_wrong_row_is_noticed() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    info = SamplingBatchInfo([rows_of(True)[0], rows_of(True)[2]], VOCAB)
    info.allowed_GW[:] = 0
    info.allowed_GW[0, 1], info.allowed_GW[1, 2] = 1, 1
    for sampler in (native(), TorchSampler()):
        assert sampler.sample(logits.clone(), info, torch.tensor([0, 0])).token_ids.tolist() == [32, 64]
