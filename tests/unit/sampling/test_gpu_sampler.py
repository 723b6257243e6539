"""The sampler of the GPU path, interpreted on the CPU, and plain rows in plain torch.

Tokens are compared with float64 (`tests.sampler_reference`), with the other samplers, which have to draw the same
tokens, and with the exact distribution.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.core.sampling_params import SamplingParams
from rollout.kernels.build import load_kernels
from rollout.sampling.base import PlainRows, PlainTokens, Sampler
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler, select_sampler
from rollout.sampling.torch_sampler import TorchSampler, uniform, uniform_of_bits
from tests.interpreted import kernels, mutated
from tests.sampler_reference import complaints

sample = kernels("sample")
TEMPERATURES = (0.0, 0.3, 1.0, 1.7)
VOCABULARIES = (1, 50, 2048, 5000)  # a chunk has 2048


def gpu_sampler() -> Sampler:
    """Return the sampler, whose module loads triton and is therefore imported after `tests.interpreted`."""
    return select_sampler(torch.float32, "cuda", kernels_available=True, mask_limit=4096)


def row(seed: int = 0, temperature: float = 1.0, position: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=temperature, **params), seed, (7,), [1], [3] * position)


def mixed_rows(count: int) -> list[SamplingRow]:
    """Return rows of all temperatures, with seeds over all 64 bits and positions of up to 30."""
    generator = np.random.default_rng(1)
    seeds = generator.integers(0, 2**64, count, dtype=np.uint64).tolist()
    return [row(seed, TEMPERATURES[i % 4], int(generator.integers(0, 30))) for i, seed in enumerate(seeds)]


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positions_of(rows: list[SamplingRow]) -> torch.Tensor:
    return torch.tensor([len(row.output_ids) for row in rows], dtype=torch.int64)


def sampled(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]) -> Any:
    return sampler.sample(logits.clone(), SamplingBatchInfo(rows, logits.shape[1]), positions_of(rows))


def plainly(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    info = SamplingBatchInfo(rows, logits.shape[1])
    plain, out = sampler.plain_rows(info, "cpu"), PlainTokens.empty(len(rows), 0, "cpu")
    assert plain is not None
    sampler.sample_plain(logits, plain, positions_of(rows), out)
    return out.token_ids, out.logprobs


def by_kernels(module: Any, logits: torch.Tensor, rows: list[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    plain, out = SamplingBatchInfo(rows, logits.shape[1]).plain_rows, PlainTokens.empty(len(rows), 0, "cpu")
    assert plain is not None
    module.sample_rows(logits, *plain, positions_of(rows), out)
    return out.token_ids, out.logprobs


def disagreement(module: Any, logits: torch.Tensor, rows: list[SamplingRow]) -> str:
    """Return how the kernels disagree with `TorchSampler`; "" if they agree."""
    ours, theirs = by_kernels(module, logits, rows), sampled(TorchSampler(), logits, rows)
    if not torch.equal(ours[0], theirs.token_ids):
        return f"tokens {ours[0].tolist()}, not {theirs.token_ids.tolist()}"
    close = torch.allclose(ours[1], theirs.logprobs, rtol=1e-6, atol=1e-6, equal_nan=True)
    return "" if close else f"log-probabilities {(ours[1] - theirs.logprobs).abs().max()}"


def test_noise_from_bits_is_that_from_numbers() -> None:
    seeds = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 12345678901234567890], np.uint64)
    for position in (0, 1, 17, 2**31, 2**62):
        positions = np.full(len(seeds), position)
        bits = torch.from_numpy(seeds.view(np.int64))
        got = uniform_of_bits(bits, torch.from_numpy(positions)).numpy()
        assert np.array_equal(got, uniform(seeds, positions))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_and_logprobs_are_those_of_plain_torch(vocab: int) -> None:
    logits, rows = _randn(16, vocab), mixed_rows(16)
    assert not disagreement(sample, logits, rows)
    if vocab > 7:  # the rows have ids of up to 7
        assert not complaints(logits, rows, sampled(gpu_sampler(), logits, rows))


def test_plain_rows_of_plain_torch_are_its_rows() -> None:
    for vocab in VOCABULARIES:
        logits, rows = _randn(16, vocab), mixed_rows(16)
        before = logits.clone()
        tokens, (ids, logprobs) = sampled(TorchSampler(), logits, rows), plainly(TorchSampler(), logits, rows)
        assert torch.equal(ids, tokens.token_ids) and torch.equal(logprobs, tokens.logprobs)
        assert torch.equal(logits, before)


def test_tokens_are_those_of_the_compiled_sampler() -> None:
    assert load_kernels().available
    logits, rows = _randn(16, 3000), mixed_rows(16)
    ours, native = by_kernels(sample, logits, rows), sampled(NativeSampler(), logits, rows)
    assert torch.equal(ours[0], native.token_ids)
    torch.testing.assert_close(ours[1], native.logprobs, rtol=1e-6, atol=1e-6)


def test_half_precision_logits_are_their_numbers_in_float32() -> None:
    logits, rows = _randn(8, 3000).half(), mixed_rows(8)
    for got, expected in zip(by_kernels(sample, logits, rows), by_kernels(sample, logits.float(), rows)):
        assert torch.equal(got, expected)


def test_logits_of_a_wider_table() -> None:
    wide, rows = _randn(4, 120), mixed_rows(4)
    for got, expected in zip(
        by_kernels(sample, wide[:, 10:90], rows), by_kernels(sample, wide[:, 10:90].contiguous(), rows)
    ):
        assert torch.equal(got, expected)


def test_of_equal_logits_the_lowest_id_is_taken() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4000, 2100, 4999]] = 2.0
    logits[1, [2048, 2047]] = 1.0
    assert by_kernels(sample, logits, [row(temperature=0.0)] * 3)[0].tolist() == [2100, 2047, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_that_is_no_distribution(temperature: float) -> None:
    logits = torch.zeros(6, 4200)
    logits[0, [4100, 3000]] = torch.nan
    logits[0, 3] = torch.inf
    logits[1, [2500, 4000]] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = -torch.nan
    logits[4, :4199] = -torch.inf
    ids, logprobs = by_kernels(sample, logits, [row(temperature=temperature)] * 6)
    assert ids[:5].tolist() == [3000, 2500, 0, 5, 4199]
    assert logprobs[:4].isnan().all() and logprobs[4] == 0.0
    assert logprobs[5] == pytest.approx(-math.log(4200), abs=1e-6)
    assert not disagreement(sample, logits, [row(temperature=temperature)] * 6)


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    logits = torch.full((40, 4200), -torch.inf)
    logits[:, [2047, 2048, 4199]] = torch.tensor([0.0, 1.0, 2.0])
    logits[:, 3000] = -200.0  # its weight is 0 in float32
    ids = by_kernels(sample, logits, [row(seed) for seed in range(40)])[0]
    assert set(ids.tolist()) == {2047, 2048, 4199}


def test_rows_do_not_depend_on_one_another() -> None:
    logits, rows = 2 * _randn(6, 4200), mixed_rows(6)
    whole = by_kernels(sample, logits, rows)
    for picked in ([3], [5, 1], [4, 3, 2, 1, 0]):
        part = by_kernels(sample, logits[picked], [rows[i] for i in picked])
        assert all(torch.equal(a, b[picked]) for a, b in zip(part, whole))


@pytest.mark.full
def test_draws_follow_the_distribution() -> None:
    """Chi-square of 2,000 draws with 11 degrees of freedom: over 40 has a probability under 1e-4."""
    logits = _randn(1, 12)
    rows = [row(seed, 0.7, position) for seed in range(200) for position in range(10)]
    ids = by_kernels(sample, logits.expand(len(rows), -1), rows)[0]
    expected = torch.softmax(logits[0].double() / 0.7, -1) * len(rows)
    counts = torch.bincount(ids, minlength=12).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 40


def test_other_rows_go_to_plain_torch() -> None:
    logits = _randn(3, 60)
    info: Any
    for change in (
        {"params": SamplingParams(logit_bias={3: 1.0})},
        {"params": SamplingParams(frequency_penalty=1.0)},
        {"params": SamplingParams(min_new_tokens=2)},
        {"chosen_ids": (3,)},
        {"top_logprobs": 2},
    ):
        rows = [row(1), row(2, 0.5), dataclasses.replace(row(3), **change)]
        info = SamplingBatchInfo(rows, 60)
        assert gpu_sampler().plain_rows(info, "cpu") is None and TorchSampler().plain_rows(info, "cpu") is None
        ours, theirs = sampled(gpu_sampler(), logits, rows), sampled(TorchSampler(), logits, rows)
        for field in dataclasses.fields(ours):
            torch.testing.assert_close(
                getattr(ours, field.name), getattr(theirs, field.name), rtol=0, atol=0, equal_nan=True
            )


def test_the_results_have_the_shapes_of_the_others() -> None:
    """A greedy row with filters is a plain one; one that does not want its log-probability gets NaN from `sample`."""
    logits = _randn(3, 60)
    rows = [row(1), row(temperature=0.0, top_k=3), dataclasses.replace(row(3), wants_logprob=False)]
    ours, theirs = sampled(gpu_sampler(), logits, rows), sampled(TorchSampler(), logits, rows)
    for field in dataclasses.fields(ours):
        got, expected = getattr(ours, field.name), getattr(theirs, field.name)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert ours.logprobs.isnan().tolist() == [False, False, True]
    assert sampled(gpu_sampler(), logits[:0], []).token_ids.shape == (0,)


def test_a_sampler_without_plain_rows_says_so() -> None:
    assert load_kernels().available
    native = NativeSampler()
    assert native.plain_rows(SamplingBatchInfo([row()], 5), "cpu") is None
    with pytest.raises(NotImplementedError, match="NativeSampler"):
        empty = PlainRows.unused(1, "cpu"), torch.zeros(1), PlainTokens.empty(1, 0, "cpu")
        native.sample_plain(torch.zeros(1, 5), *empty)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"),
        ("(position + 1)", "(position + 2)"),
        ("tl.min(tl.where(numbers == most, token, V), 0)", "tl.max(tl.where(numbers == most, token, -1), 0)"),
        ("before + tl.cumsum(inner, 0)", "tl.cumsum(inner, 0)"),
        ("chunk < drawn_chunk, weights", "chunk <= drawn_chunk, weights"),
        ("tl.load(totals + place, mask=there, other=0.0) * scales", "tl.load(totals + place, mask=there, other=0.0)"),
        (" - tl.log(total)).to(", " - tl.log(total) * 1.00001).to("),
        ("is_distribution & (tl.load(greedy + row) == 0)", "is_distribution"),
        ("tl.where(nan_token < V, nan_token, best_token)", "best_token"),
    ],
)  # fmt: skip
def test_wrong_samplers_are_caught(old: str, new: str, tmp_path: Path) -> None:
    wrong = mutated(sample, tmp_path, (old, new))
    cases = [(_randn(24, vocab), mixed_rows(24)) for vocab in (50, 5000)]
    strange = torch.zeros(24, 4200)
    strange[0, 3000], strange[1, 2500], strange[2] = torch.nan, torch.inf, -torch.inf
    strange[3:, :2048], strange[3:, 3000:] = -torch.inf, -torch.inf
    cases.append((strange, mixed_rows(24)))
    assert any(disagreement(wrong, *case) for case in cases)


def edge_complaint(folder: Path, *changes: tuple[str, str]) -> str:
    """Draw with noise 0 and 1, among many tokens without weight, and return the first wrong token.

    Return "" if the first and the last token with a weight are drawn.
    """
    logits = torch.full((1, 6200), -torch.inf)
    logits[0, [2500, 2501, 4095]] = torch.tensor([0.0, 1.0, 0.5])
    for value, expected in ((0.0, 2500), (1.0, 4095)):
        noise = ("tl.load(positions + row))\n    target", f"tl.load(positions + row)) * 0.0 + {value}\n    target")
        drawn = int(by_kernels(mutated(sample, folder, noise, *changes), logits, [row()])[0])
        if drawn != expected:
            return f"token {drawn} with noise {value}"
    return ""


def test_noise_at_the_edges(tmp_path: Path) -> None:
    assert not edge_complaint(tmp_path)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(cumulative > target) & (weights > 0.0)", "cumulative >= target"),
        ("(1.0 - 1.1102230246251565e-16) * kept_total", "kept_total"),
    ],
)
def test_wrong_edges_are_caught(old: str, new: str, tmp_path: Path) -> None:
    fallback = (
        "tl.where(first < SIZE, first, tl.max(tl.where(weights > 0.0, at, 0), 0))",
        "tl.minimum(first, SIZE - 1)",
    )
    assert edge_complaint(tmp_path, (old, new), fallback)
