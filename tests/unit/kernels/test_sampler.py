"""The compiled sampler: against float64, in distribution, and the same bits in every batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.core.sampling_params import SamplingParams
from rollout.kernels.build import load_kernels
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler
from tests.kernels import rows_are_independent
from tests.sampler_reference import complaints, kept_tokens, scaled_logits
from tests.tiers import examples

SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 1000, 4097]
END_ID = 0
EXAMPLES = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def native() -> NativeSampler:
    status = load_kernels()
    assert status.available, status.reason
    return NativeSampler()


def draw(native: NativeSampler, logits: torch.Tensor, rows: list[SamplingRow]) -> SampledTokens:
    positions = torch.tensor([len(row.output_ids) for row in rows], dtype=torch.int64)
    return native.sample(logits, SamplingBatchInfo(rows, logits.shape[1]), positions)


@st.composite
def sampling_rows(draw: st.DrawFn, vocab: int) -> SamplingRow:
    """Draw a row with any mix of features.

    Edited logits are exact in float32, and no mass of few equal weights hits a filter's limit.
    """
    token = st.integers(0, vocab - 1)
    quarters = st.sampled_from([0.0, 0.0, -1.25, 0.25, 1.5])
    return SamplingRow(
        params=SamplingParams(
            max_new_tokens=64,
            temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.9137, 0.437, 0.0213])),
            top_k=draw(st.sampled_from([-1, -1, 1, 2, 7, 50, 300, 5000])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.0371, 0.71])),
            frequency_penalty=draw(quarters),
            presence_penalty=draw(quarters),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
            min_new_tokens=draw(st.sampled_from([0, 0, 3])) if vocab > 2 else 0,
            logit_bias=draw(st.dictionaries(token, st.sampled_from([-8.0, 0.25, 3.5]), max_size=4)),
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
        end_ids=(END_ID,),
        prompt_ids=draw(st.lists(token, min_size=1, max_size=9)),
        output_ids=draw(st.lists(token, max_size=9)),
        wants_logprob=draw(st.booleans()),
        top_logprobs=draw(st.sampled_from([0, 0, 1, 5, 300])),
        chosen_ids=draw(st.lists(token, max_size=4)),
        wants_mask=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[SamplingRow]]:
    """Draw rows and their logits in eighths: with many ties or few, spread or flat, some of them masked."""
    vocab = draw(st.sampled_from(SIZES))
    rows = draw(st.lists(sampling_rows(vocab), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.25, 2.0, 8.0]))
    logits = (torch.randn(len(rows), vocab, generator=generator) * spread * 8).round() / 8
    if draw(st.booleans()):
        hidden = torch.rand(len(rows), vocab, generator=generator) < 0.5
        hidden[:, -1] = False
        logits[hidden] = -torch.inf
    return logits, rows


@EXAMPLES
@given(batch=batches())
def test_every_feature_against_float64(native: NativeSampler, batch: tuple[torch.Tensor, list[SamplingRow]]) -> None:
    logits, rows = batch
    tokens = draw(native, logits, rows)
    assert not complaints(logits, rows, tokens)
    half = draw(native, logits.bfloat16(), rows)
    assert not complaints(logits.bfloat16().float(), rows, half)


@pytest.mark.mutant
@pytest.mark.parametrize("vocab", [300, 4097])
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("token ", lambda tokens: {"token_ids": (tokens.token_ids + 1) % 300}),
        ("log-probability", lambda tokens: {"logprobs": tokens.logprobs + 2e-5}),
        ("best tokens", lambda tokens: {"top_ids": tokens.top_ids.flip(1)}),
        ("of the best", lambda tokens: {"top_logprobs": tokens.top_logprobs + 2e-5}),
        ("not of ", lambda tokens: _without_an_id(tokens)),
        ("of the mask", lambda tokens: {"kept_logprobs": tokens.kept_logprobs + 2e-5}),
        ("not asked for", lambda tokens: {"kept_counts": tokens.kept_counts + 1}),
        ("chosen", lambda tokens: {"chosen_logprobs": tokens.chosen_logprobs.roll(1)}),
    ],
)
def test_a_wrong_answer_is_noticed(native: NativeSampler, vocab: int, part: str, wrong) -> None:
    rows, logits = _mixed_rows(12, vocab), _logits(12, vocab)
    tokens = draw(native, logits, rows)
    assert not complaints(logits, rows, tokens)
    assert any(part in text for text in complaints(logits, rows, dataclasses.replace(tokens, **wrong(tokens))))


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.93), ("top_k", 3), ("top_p", 0.5), ("min_p", 0.4), ("frequency_penalty", 0.3)],
)
def test_a_parameter_that_is_ignored_or_invented_is_noticed(native: NativeSampler, field: str, value: float) -> None:
    logits = _logits(64, 200)
    rows = [SamplingRow(SamplingParams(**{field: value}), i, (), [1], [i % 5, 3]) for i in range(64)]
    plain = [SamplingRow(SamplingParams(), i, (), [1], [i % 5, 3]) for i in range(64)]
    assert not complaints(logits, rows, draw(native, logits, rows))
    assert complaints(logits, plain, draw(native, logits, rows)) and complaints(
        logits, rows, draw(native, logits, plain)
    )


def _chi_square(drawn: torch.Tensor, expected_probs: torch.Tensor) -> float:
    """Return chi-square of tokens against a distribution [V], in standard deviations above the mean; infinite if a
    token of probability 0 is among them."""
    counts = torch.bincount(drawn, minlength=len(expected_probs)).double()
    possible = expected_probs > 0
    if counts[~possible].sum() > 0:
        return float("inf")
    expected = expected_probs[possible] * len(drawn)
    freedom = int(possible.sum()) - 1
    return float((((counts[possible] - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


# With 30 degrees of freedom or more, chi-square is 6 standard deviations above its mean with a probability under 1e-5.
UNLIKELY = 6.0
DRAWS = 20_000


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.01}, {"top_k": 60, "top_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution(native: NativeSampler, params: dict) -> None:
    logits = torch.randn(120, generator=torch.Generator().manual_seed(0))
    row = SamplingRow(SamplingParams(temperature=0.8, **params), 0, (), [1], [])
    rows = [dataclasses.replace(row, seed=i) for i in range(DRAWS)]
    drawn = draw(native, logits.expand(DRAWS, -1).contiguous(), rows).token_ids
    scaled = scaled_logits(logits, row)
    kept = kept_tokens(scaled, row, row.params.top_p, row.params.min_p)
    assert len(kept) > 30

    def probabilities(temperature: float, tokens: set[int]) -> torch.Tensor:
        weights = torch.zeros(120, dtype=torch.float64)
        weights[list(tokens)] = torch.softmax(torch.from_numpy(scaled)[list(tokens)] / temperature, 0)
        return weights

    assert _chi_square(drawn, probabilities(1.0, kept)) < UNLIKELY
    worst = min(kept, key=lambda token: scaled[token])
    for wrong in (probabilities(1.1, kept), probabilities(1.0, kept - {worst})):
        assert _chi_square(drawn, wrong) > UNLIKELY
    dropped = sorted(set(range(120)) - kept, key=lambda token: -scaled[token])
    assert not dropped or _chi_square(drawn, probabilities(1.0, kept.union(dropped[:5]))) > UNLIKELY


def _logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)


def _without_an_id(tokens: SampledTokens) -> dict[str, torch.Tensor]:
    """Drop an id from the mask of the row with most ids: the first, or the second if the first was sampled."""
    row = int(tokens.kept_counts.argmax())
    at = int(tokens.kept_counts[:row].sum())
    at += int(tokens.kept_ids[at] == tokens.token_ids[row])
    counts = tokens.kept_counts.clone()
    counts[row] -= 1
    return {
        "kept_counts": counts,
        "kept_ids": torch.cat((tokens.kept_ids[:at], tokens.kept_ids[at + 1 :])),
        "kept_logprobs": torch.cat((tokens.kept_logprobs[:at], tokens.kept_logprobs[at + 1 :])),
    }


def _mixed_rows(count: int, vocab: int) -> list[SamplingRow]:
    mixes: list[dict] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.95},
        {"min_p": 0.02, "temperature": 1.5},
        {"top_k": 700, "repetition_penalty": 1.1},
        {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.1},
        {"logit_bias": {vocab // 2: 4.0}, "min_new_tokens": 9},
        {"top_p": 0.999},
    ]
    return [
        SamplingRow(
            SamplingParams(**mixes[i % len(mixes)]),
            seed=(i * 2**57 + 7) % 2**64,
            end_ids=(0,),
            prompt_ids=[i % vocab, 0],
            output_ids=[(7 * j + i) % vocab for j in range(i % 5)],
            top_logprobs=(0, 4, 0, 20)[i % 4],
            chosen_ids=((), (), (0, vocab - 1))[i % 3],
            wants_mask=i % 7 < 3,
        )
        for i in range(count)
    ]


def _bits(tokens: SampledTokens, rows: list[SamplingRow]) -> torch.Tensor:
    """Return all outputs for each row as integers [N, ...], in which NaN is equal to itself."""
    chosen = torch.zeros(len(rows), 2)
    pairs = [i for i, row in enumerate(rows) if row.chosen_ids]
    chosen[pairs] = tokens.chosen_logprobs.view(-1, 2)
    width = 20 - tokens.top_ids.shape[1]
    top_ids = torch.nn.functional.pad(tokens.top_ids, (0, width), value=-1)
    top_logprobs = torch.nn.functional.pad(tokens.top_logprobs, (0, width), value=torch.nan)
    floats = torch.cat((tokens.logprobs[:, None], top_logprobs, chosen), 1)
    mask_bits = torch.stack((tokens.kept_ids, tokens.kept_logprobs.view(torch.int32)), 1).long()
    masks = torch.stack(
        [
            (part * torch.arange(1, len(part) + 1)[:, None]).sum(0)
            for part in mask_bits.split(tokens.kept_counts.tolist())
        ]
    )
    columns = (tokens.token_ids[:, None], tokens.kept_counts[:, None], masks, top_ids, floats.view(torch.int32).long())
    return torch.cat(columns, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [17, 4097, 20000])
def test_a_row_has_the_same_bits_in_every_batch(native: NativeSampler, vocab: int, dtype: torch.dtype) -> None:
    count = 256 if vocab < 10000 else 40
    logits, rows = _logits(count, vocab, dtype), _mixed_rows(count, vocab)

    def compute(picked: torch.Tensor) -> torch.Tensor:
        some = [rows[i] for i in picked.tolist()]
        return _bits(draw(native, logits[picked], some), some)

    assert rows_are_independent(compute, count)
    assert torch.equal(_bits(draw(native, logits.float(), rows), rows), compute(torch.arange(count)))


@pytest.mark.mutant
def test_the_independence_check_notices_noise_of_the_batch(native: NativeSampler) -> None:
    logits, rows = _logits(40, 50), [SamplingRow(SamplingParams(), 3, (), [1], []) for _ in range(40)]

    def compute(picked: torch.Tensor) -> torch.Tensor:
        some = [dataclasses.replace(rows[i], seed=place) for place, i in enumerate(picked.tolist())]
        return draw(native, logits[picked], some).token_ids

    assert not rows_are_independent(compute, 40)


def test_scores_have_the_bits_of_samples(native: NativeSampler) -> None:
    """A token sampled at some temperature is scored again among other rows at that temperature."""
    logits = _logits(50, 3000)
    for temperature in (0.0, 1.0, 0.7):
        params = SamplingParams(temperature=temperature, top_p=0.9)
        rows = [SamplingRow(params, i, (), [1], [], top_logprobs=3) for i in range(50)]
        tokens = draw(native, logits, rows)
        scores = native.score(logits.flip(0), tokens.token_ids.flip(0), params.effective_temperature, [5, 7], 3)
        assert torch.equal(scores.logprobs.flip(0), tokens.logprobs)
        assert torch.equal(scores.top_logprobs.flip(0), tokens.top_logprobs)
        assert torch.equal(scores.top_ids.flip(0), tokens.top_ids)
        again = native.score(logits, torch.full((50,), 7), params.effective_temperature, [], 0)
        assert torch.equal(scores.chosen_logprobs[:, 1].flip(0), again.logprobs)


def test_ties_go_to_the_lowest_id(native: NativeSampler) -> None:
    for vocab in SIZES:
        logits = torch.zeros(100, vocab)
        logits[:, vocab // 3] = -0.0
        greedy = [SamplingRow(SamplingParams(temperature=0.0), i, (), [1], [], top_logprobs=vocab) for i in range(100)]
        tokens = draw(native, logits, greedy)
        assert (tokens.token_ids == 0).all()
        assert torch.equal(tokens.top_ids, torch.arange(vocab).expand(100, -1))
        few = [SamplingRow(SamplingParams(top_k=min(3, vocab) if vocab > 1 else 2), i, (), [1], []) for i in range(100)]
        assert set(draw(native, logits, few).token_ids.tolist()) == set(range(min(3, vocab)))
        half = [SamplingRow(SamplingParams(top_p=0.4999), i, (), [1], []) for i in range(100)]
        assert max(draw(native, logits, half).token_ids.tolist()) <= vocab // 2


def test_nothing_is_computed_again_for_a_batch_that_stays(native: NativeSampler) -> None:
    rows = _mixed_rows(5, 300)
    info = SamplingBatchInfo(rows, 300)
    before = info.operands
    rows[0].output_ids.append(3)
    info.update_histories()
    assert info.operands is before


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("contiguous", {0: torch.zeros(30, 2).T}),
        ("vocabulary of 0", {0: torch.zeros(2, 0)}),
        ("bfloat16 and float32", {0: torch.zeros(2, 30).double()}),
        ("positions must have 2 entries", {1: torch.zeros(3, dtype=torch.int64)}),
        ("positions must be a vector of int64", {1: torch.zeros(2)}),
        ("settings must be", {2: torch.zeros(2, 21, dtype=torch.int64)}),
        ("allowed must be int32", {8: torch.zeros(0, 2, dtype=torch.int32)}),
        ("outside the list", {3: torch.zeros(0, dtype=torch.int64)}),
        ("chosen_ids: ids must be in 0..29", {3: torch.tensor([30])}),
        ("bias_ids: ids must be in 0..29", {4: torch.tensor([-1, 3])}),
        ("as many as bias_ids", {5: torch.zeros(3)}),
        ("end_ids: ids must be in 0..29", {6: torch.tensor([2**40])}),
        ("histories: ids must be in 0..29", {7: torch.full((100,), 77)}),
        ("asks for more than top_n", {9: 1}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(native: NativeSampler, message: str, change: dict) -> None:
    params = SamplingParams(logit_bias={3: 1.0}, min_new_tokens=3, frequency_penalty=0.5)
    rows = [
        SamplingRow(params, 0, (2,), [1], [4, 4], top_logprobs=2, chosen_ids=(5,)),
        SamplingRow(params, 1, (), [], []),
    ]
    info = SamplingBatchInfo(rows, 30)
    arguments = [torch.zeros(2, 30), torch.zeros(2, dtype=torch.int64), *info.operands]
    torch.ops.lockstep.sample_rows(*arguments)
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.lockstep.sample_rows(*arguments)


def test_effects_are_those_that_the_schemas_say(native: NativeSampler) -> None:
    logits = _logits(5, 40)
    info = SamplingBatchInfo(_mixed_rows(5, 40), 40)
    cases = [
        (torch.ops.lockstep.sample_rows, (logits, torch.arange(5), *info.operands)),
        (torch.ops.lockstep.score_rows, (logits, torch.arange(5), 0.7, torch.tensor([3, 4]), 6)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema",))
