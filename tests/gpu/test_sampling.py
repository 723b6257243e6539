"""The sampler on the device: distribution, filters, seeds, log-probabilities; and the half that graphs capture.

The judge is `tests/sampler_reference.py`, in float64, which knows the noise of a seed and a position: a token is right
if that noise lies in its share, so that the device samples what a CPU does.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from rollout.core.sampling_params import SamplingParams
from rollout.sampling.base import PlainTokens, SampledTokens, Sampler
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import select_sampler
from tests.gpu.needs import not_run
from tests.sampler_reference import complaints

VOCAB = 5003  # no multiple of a tile
DRAWS = 20_000


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def sampler(dtype: torch.dtype, device: torch.device, on_cuda: bool, facts: dict[str, Any]) -> Sampler:
    found = select_sampler(dtype, device, kernels_available=on_cuda, mask_limit=VOCAB)
    facts["sampler"] = type(found).__name__
    return found


def row(seed: int = 0, output: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    more = {name: params.pop(name) for name in ("top_logprobs", "chosen_ids", "wants_mask") if name in params}
    return SamplingRow(SamplingParams(**params), seed, (7,), [1, 2, 3], list(output), **more)


def random_logits(count: int, dtype: torch.dtype, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return (3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def distinct_logits(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows without equal logits, also in bfloat16: which of two counts as better is a kernel's own choice."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(97, generator=generator) / 8 for _ in range(count)]).to(dtype)


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow], device: torch.device) -> SampledTokens:
    positions = torch.tensor([len(one.output_ids) for one in rows], dtype=torch.int64)
    info = SamplingBatchInfo(rows, logits.shape[1], device)
    found = sampler.sample(logits.clone().to(device), info, positions)
    return SampledTokens(**{item.name: getattr(found, item.name).cpu() for item in fields(SampledTokens)})


def test_plain_rows_are_right(sampler: Sampler, dtype: torch.dtype, device: torch.device) -> None:
    rows = [row(seed=i, output=tuple(range(i % 7)), temperature=0.5 + 0.1 * (i % 9)) for i in range(64)]
    rows += [row(temperature=0.0)] * 8
    logits = random_logits(len(rows), dtype)
    assert complaints(logits.float(), rows, draw(sampler, logits, rows, device)) == []


def test_filters_edits_masks_and_best_tokens_are_right(
    sampler: Sampler, dtype: torch.dtype, device: torch.device
) -> None:
    rows = [
        row(seed=1, top_k=5, wants_mask=True),
        row(seed=2, top_p=0.7, wants_mask=True),
        row(seed=3, min_p=0.05, top_logprobs=4),
        row(seed=4, top_k=50, top_p=0.9, temperature=1.3, chosen_ids=(3, 4, 9)),
        row(seed=5, output=(9, 9, 4), frequency_penalty=0.5, repetition_penalty=1.2),
        row(seed=6, min_new_tokens=3, logit_bias={11: 4.0}),
        row(temperature=0.0, top_logprobs=2),
    ]
    logits = distinct_logits(len(rows), dtype)
    assert complaints(logits.float(), rows, draw(sampler, logits, rows, device)) == []


def test_draws_follow_the_distribution(
    sampler: Sampler, dtype: torch.dtype, device: torch.device, facts: dict[str, Any]
) -> None:
    """Chi-square over 20,000 draws with 49 degrees of freedom: 100 has a probability under 1e-4."""
    logits = random_logits(1, dtype, seed=2, vocab=50)
    rows = [row(seed=i, temperature=1.5) for i in range(DRAWS)]
    tokens = draw(sampler, logits.expand(DRAWS, -1), rows, device)
    wanted = torch.softmax(logits[0].double() / 1.5, -1) * DRAWS
    counts = torch.bincount(tokens.token_ids, minlength=50).double()
    some = wanted > 5
    facts["chi-square"] = ((counts - wanted)[some] ** 2 / wanted[some]).sum().item()
    assert facts["chi-square"] < 100


def test_a_sample_does_not_depend_on_its_place_in_the_batch(
    sampler: Sampler, dtype: torch.dtype, device: torch.device
) -> None:
    logits = random_logits(33, dtype, seed=3)
    rows = [row(seed=i + 1, temperature=0.8) for i in range(33)]
    together = draw(sampler, logits, rows, device)
    backwards = draw(sampler, logits.flip(0), rows[::-1], device)
    alone = [draw(sampler, logits[i : i + 1], [rows[i]], device) for i in range(0, 33, 8)]
    assert torch.equal(together.token_ids, backwards.token_ids.flip(0))
    assert torch.equal(together.logprobs, backwards.logprobs.flip(0))
    for i, one in zip(range(0, 33, 8), alone, strict=True):
        assert one.token_ids[0] == together.token_ids[i] and one.logprobs[0] == together.logprobs[i]


def test_what_graphs_capture_samples_the_same(sampler: Sampler, dtype: torch.dtype, device: torch.device) -> None:
    rows = [row(seed=2**63 + i, output=(5,) * (i % 3), temperature=0.7) for i in range(16)] + [row(temperature=0.0)]
    if sampler.mask_limit:
        rows += [row(seed=i, top_p=0.9, wants_mask=i % 2 == 0) for i in range(8)]
        rows += [row(seed=i, top_k=9, min_p=0.01, wants_mask=True) for i in range(8)]
    logits = random_logits(len(rows), dtype, seed=4)
    info = SamplingBatchInfo(rows, VOCAB, device)
    plain = sampler.plain_rows(info, device)
    if plain is None:
        not_run(f"{type(sampler).__name__} has no half for graphs")
    positions = torch.tensor([len(one.output_ids) for one in rows], device=device)
    out = PlainTokens.empty(len(rows), VOCAB, device)
    sampler.sample_plain(logits.clone().to(device), plain, positions, out)
    want = draw(sampler, logits, rows, device)
    assert torch.equal(out.token_ids.cpu(), want.token_ids)
    assert torch.equal(out.logprobs.cpu().to(want.logprobs.dtype), want.logprobs)
    if sampler.mask_limit:  # others write no masks
        assert torch.equal(out.kept_counts.cpu(), want.kept_counts)
        kept = torch.arange(VOCAB) < want.kept_counts[:, None]
        assert torch.equal(out.kept_ids.cpu()[kept], want.kept_ids[kept])


def test_filters_and_masks_of_plain_rows_are_right(sampler: Sampler, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of all filters, most of them with many kept tokens; the float64 judge allows for rounding at a border."""
    settings: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"top_p": 0.95, "top_k": 20},
        {"top_k": 1500, "temperature": 1.5},
        {"min_p": 0.001},
        {"top_p": 0.5, "top_k": 300, "min_p": 0.01},
        {},
    ]
    rows = [row(seed=i, output=(1,) * (i % 4), wants_mask=i % 3 > 0, **settings[i % 6]) for i in range(24)]
    logits = torch.stack([torch.randperm(VOCAB) for _ in rows]).to(dtype).float() / 300  # few are equal
    logits = logits.to(dtype) if dtype == torch.float32 else distinct_logits(len(rows), dtype)
    assert complaints(logits.float(), rows, draw(sampler, logits, rows, device)) == []


def test_the_judge_sees_another_row_s_noise(sampler: Sampler, dtype: torch.dtype, device: torch.device) -> None:
    """Seeds that are handed to the sampler in another order are a fault that the judge must see."""
    rows = [row(seed=i, temperature=1.5) for i in range(32)]
    logits = random_logits(len(rows), dtype, seed=5)
    tokens = draw(sampler, logits, rows[::-1], device)
    assert len(complaints(logits.float(), rows, tokens)) > 16
