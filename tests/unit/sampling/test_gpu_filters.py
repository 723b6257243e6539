"""Top-k, top-p and min-p of the GPU path, and its masks, interpreted on the CPU.

Kept tokens are compared with float64 (`tests.sampler_reference`) and with the compiled sampler.  Logits are multiples
of an eighth, so that many are equal.  No mass of few equal weights hits a limit of top-p, but where a test wants it.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.sampling_params import SamplingParams
from rollout.kernels.build import load_kernels
from rollout.sampling.base import PlainTokens, SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler
from tests.interpreted import kernels, mutated
from tests.sampler_reference import complaints

sample, sample_filter = kernels("sample"), kernels("sample_filter")
TOP_K, TOP_P, MIN_P = (-1, 1, 7, 300, 100_000), (1.0, 0.9137, 0.437, 0.0213), (0.0, 0.0371)
FILTERS = [{"top_k": k, "top_p": p, "min_p": m} for k, p, m in product(TOP_K, TOP_P, MIN_P)]


def row(seed: int, temperature: float = 1.0, *, wants_mask: bool = True, **params: Any) -> SamplingRow:
    more = {"wants_mask": wants_mask}
    return SamplingRow(SamplingParams(temperature=temperature, **params), seed, (), [1], [3] * (seed % 5), **more)


def some_rows(part: int) -> list[SamplingRow]:
    """Return a row for each combination of filters of one of 5 parts, with temperatures and seeds of their own.

    The first wants no mask.
    """
    return [
        row(2**62 + 977 * i + part, (0.5, 1.0, 1.0, 2.0)[i % 4], wants_mask=i > 0, **params)
        for i, params in enumerate(FILTERS[part::5])
    ]


def logits_of(count: int, vocab: int, spread: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return logits in eighths [count, vocab], a third of each row -infinity."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(count, vocab, generator=generator) * spread * 8).round() / 8
    hidden = torch.rand(count, vocab, generator=generator) < 0.33
    hidden[:, -1] = False
    return logits.masked_fill(hidden, -torch.inf).to(dtype)


def by_kernels(module: Any, logits: torch.Tensor, rows: list[SamplingRow], width: int | None = None) -> SampledTokens:
    info = SamplingBatchInfo(rows, logits.shape[1])
    out = PlainTokens.empty(len(rows), logits.shape[1] if width is None else width, "cpu")
    positions = torch.tensor([len(row.output_ids) for row in rows])
    assert info.plain_rows is not None
    module.sample_rows(logits, *info.plain_rows, positions, out)
    return SampledTokens.plain(out, info)


def by_cpu(logits: torch.Tensor, rows: list[SamplingRow]) -> SampledTokens:
    assert load_kernels().available
    positions = torch.tensor([len(row.output_ids) for row in rows])
    return NativeSampler().sample(logits, SamplingBatchInfo(rows, logits.shape[1]), positions)


def masks(tokens: SampledTokens) -> list[tuple[list[int], list[float]]]:
    """Return the ids and the log-probabilities of each row's mask."""
    ids, logprobs = tokens.kept_ids.flatten().tolist(), tokens.kept_logprobs.flatten().tolist()
    spans = zip(tokens.kept_begins().tolist(), tokens.kept_counts.tolist(), strict=True)
    return [(ids[begin : begin + count], logprobs[begin : begin + count]) for begin, count in spans]


def disagreement(module: Any, logits: torch.Tensor, rows: list[SamplingRow]) -> str:
    """Return how the kernels disagree with the compiled sampler; "" if they agree."""
    ours, theirs = by_kernels(module, logits, rows), by_cpu(logits, rows)
    for i, ((ids, logprobs), (want, want_logprobs)) in enumerate(zip(masks(ours), masks(theirs), strict=True)):
        if ids != want:
            return f"row {i}, {rows[i].params}: mask of {len(ids)} ids, not of {len(want)}"
        if not torch.allclose(torch.tensor(logprobs), torch.tensor(want_logprobs), rtol=1e-6, atol=1e-6):
            return f"row {i}: log-probabilities of the mask"
    if not torch.equal(ours.token_ids, theirs.token_ids):
        return f"tokens {ours.token_ids.tolist()}, not {theirs.token_ids.tolist()}"
    close = torch.allclose(ours.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-6)
    return "" if close else "log-probabilities"


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize(("vocab", "spread"), [(300, 3.0), (2500, 2.0), (2048, 0.25)])
@pytest.mark.full(but=["300-3.0", "2500-2.0-0"])
def test_kept_tokens_are_those_of_the_compiled_sampler_and_of_float64(vocab: int, spread: float, part: int) -> None:
    rows = some_rows(part)
    logits = logits_of(len(rows), vocab, spread)
    assert not disagreement(sample, logits, rows)
    assert not complaints(logits, rows, by_kernels(sample, logits, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_their_numbers_in_float32(dtype: torch.dtype) -> None:
    rows = some_rows(1)
    logits = logits_of(len(rows), 2500, 2.0, dtype) - 3.0  # both signs, and their keys
    ours, wide = by_kernels(sample, logits, rows), by_kernels(sample, logits.float(), rows)
    assert torch.equal(ours.token_ids, wide.token_ids) and torch.equal(ours.logprobs, wide.logprobs)
    assert masks(ours) == masks(wide)


@pytest.mark.parametrize("part", [2, 3])
def test_logits_that_are_all_different(part: int) -> None:
    """Float64 judges the border: a token there may be kept or not, within rounding."""
    rows = some_rows(part)
    logits = 4 * torch.randn(len(rows), 2500, generator=torch.Generator().manual_seed(part))
    assert not complaints(logits, rows, by_kernels(sample, logits, rows))


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    logits = torch.zeros(5, 4096)
    logits[3, 3000] = 1.0
    logits[4] = torch.tensor([-0.0, 0.0]).repeat(2048)
    rows = [row(1, top_k=3000), row(2, top_p=0.5), row(3, top_k=1000, top_p=0.25), row(4, top_k=3), row(5, top_k=2)]
    kept = [ids for ids, _ in masks(by_kernels(sample, logits, rows))]
    assert kept == [list(range(3000)), list(range(2048)), list(range(250)), [0, 1, 3000], [0, 1]]


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    rows = some_rows(4)
    logits = logits_of(len(rows), 2500, 2.0)
    whole = by_kernels(sample, logits, rows)
    for picked in ([3], [7, 1], [5]):
        part = by_kernels(sample, logits[picked], [rows[i] for i in picked])
        assert torch.equal(part.token_ids, whole.token_ids[picked])
        assert torch.equal(part.logprobs, whole.logprobs[picked])
        assert not any(rows[i].wants_mask for i in picked) or masks(part) == [masks(whole)[i] for i in picked]


def test_of_a_mask_over_the_limit_the_count_is_known() -> None:
    logits, rows = logits_of(2, 2500, 0.25), [row(1, top_k=900), row(2, top_k=40)]
    whole, cut = by_kernels(sample, logits, rows), by_kernels(sample, logits, rows, width=64)
    assert whole.kept_counts.tolist() == cut.kept_counts.tolist() == [900, 40]
    assert cut.kept_ids[0].tolist() == masks(whole)[0][0][:64] and masks(cut)[1] == masks(whole)[1]


def test_masks_of_rows_that_draw_nothing() -> None:
    logits = torch.zeros(3, 2500)
    logits[0, 2300], logits[1, 2200], logits[2] = 1.0, torch.nan, -torch.inf
    rows = [row(1, 0.0, top_k=3), row(2, top_p=0.5), row(3, top_k=2)]
    found = masks(by_kernels(sample, logits, rows))
    assert found[0] == ([2300], [0.0]) and [ids for ids, _ in found] == [[2300], [2200], [0]]
    assert all(torch.tensor(logprobs).isnan().all() for _, logprobs in found[1:])


def test_every_token_with_a_weight_is_in_the_mask_of_a_row_without_filters() -> None:
    logits = logits_of(1, 2500, 2.0)
    ((ids, _),) = masks(by_kernels(sample, logits, [row(1)]))
    assert ids == (logits[0] > -100).nonzero().squeeze(1).tolist()


def test_filters_of_others_change_nothing_of_a_row() -> None:
    """A row without filters has the bits of a batch without filters."""
    logits = logits_of(5, 2500, 2.0)
    plain = [row(i, wants_mask=False) for i in range(5)]
    mixed = [plain[i] if i % 2 else row(i, top_p=0.5) for i in range(5)]
    ours, theirs = by_kernels(sample, logits, plain), by_kernels(sample, logits, mixed)
    assert torch.equal(ours.token_ids[1::2], theirs.token_ids[1::2])
    assert torch.equal(ours.logprobs, torch.where(ours.token_ids == theirs.token_ids, theirs.logprobs, ours.logprobs))


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.where(x == 0.0, 0.0, x)", "x"),
        ("(bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT", "bits >> SHIFT"),
        ("mask=token < V, other=float(\"-inf\"))", "mask=token < V, other=0.0)"),
        ("in_3 = (n_3 >= count)", "in_3 = (n_3 > count)"),
        ("in_2 = (n_2 >= count) | (w_2 >= mass)", "in_2 = (n_2 >= count) | (w_2 >= 1.01 * mass)"),
        ("(low_count - high_count > 1)", "(low_count - high_count > 2)"),
        ("tl.minimum(count - high_count, by_mass)", "count - high_count"),
        ("tl.minimum(count - high_count, by_mass)", "by_mass"),
        ("tl.ceil((mass - high_weight) / weight)", "tl.ceil(mass / weight)"),
        ("            top_p * whole,", "            top_p * total,"),
        ("tl.where(is_one_key, cut, low_weight)", "low_weight"),
        ("(token <= last_id)", "(token < last_id)"),
        (">= min_p)", "> 1.5 * min_p)"),
        ("seen + tl.cumsum", "tl.cumsum"),
        ("return last_id, seen + count", "return last_id, seen"),
    ],
)  # fmt: skip
def test_wrong_filters_are_caught(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wrong_filter", mutated(sample_filter, tmp_path, (old, new)))
    wrong = mutated(sample, tmp_path, ("from rollout.kernels.gpu.sample_filter import", "from wrong_filter import"))
    assert is_caught(wrong)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(top < V) | (mass < 1.0) | (least > 0.0)", "(top < V) | (mass < 1.0)"),
        ("weights = kept * scales", "weights = kept"),
        ("kept_total = tl.sum(weights, 0)\n\n", "\n"),
        ("last, last_id, least, SHIFT), inner, 0.0)", "last, last_id, least, SHIFT), inner, inner)"),
        ("& (weights > 0.0)\n            place", "\n            place"),
        ("count + tl.cumsum", "tl.cumsum"),
        ("- most.to(tl.float64) - tl.log(total)\n            tl.store", "- most.to(tl.float64)\n            tl.store"),
    ],
)  # fmt: skip
def test_wrong_draws_are_caught(old: str, new: str, tmp_path: Path) -> None:
    assert is_caught(mutated(sample, tmp_path, (old, new)))


def is_caught(wrong: Any) -> bool:
    """Tell whether the compiled sampler disagrees with a wrong module on rows that show each of its faults."""
    rows = [
        row(1, top_k=7),
        row(7, top_k=13),
        row(8, top_k=90),
        row(2, top_p=0.9137),
        row(3, top_k=40, top_p=0.437),
        row(4, min_p=0.0371),
        row(5, 2.0, top_k=300, top_p=0.9137, min_p=0.0371),
        row(6),
    ]
    zeros = torch.zeros(8, 300)
    zeros[:, ::2] = -0.0
    far = logits_of(8, 300, 1.0)
    far[:, 100:200] = -150.0  # without a weight in float32
    different = 2 * torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    cases = [logits_of(8, 300, 3.0), different, zeros, far, logits_of(8, 2500, 0.25) + 9.0, torch.zeros(8, 2500)]
    return any(disagreement(wrong, logits, rows) for logits in cases)
