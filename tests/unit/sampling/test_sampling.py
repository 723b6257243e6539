"""The sampler against its definition: distributions, filters, penalties, seeds, log-probabilities."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rollout.core.errors import BadRequest
from rollout.core.grammar import Grammar
from rollout.core.sampling_params import SamplingParams, sampling_params_from_dict
from rollout.kernels.build import load_kernels
from rollout.sampling.base import SampledTokens, Sampler
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler, select_sampler
from rollout.sampling.torch_sampler import TorchSampler, apply_edits, filtered_candidates, uniform

VOCAB = 50


@pytest.fixture(params=["native", "torch"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    if request.param == "torch":
        return TorchSampler()
    status = load_kernels()
    assert status.available, status.reason
    return NativeSampler()


def row(seed: int = 0, output: list[int] | None = None, prompt: list[int] | None = None, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, (7,), prompt or [1], output if output is not None else [])


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]) -> SampledTokens:
    positions = torch.tensor([len(row.output_ids) for row in rows], dtype=torch.int64)
    return sampler.sample(logits.clone(), SamplingBatchInfo(rows, logits.shape[1]), positions)


def test_greedy_takes_the_best_and_reports_the_raw_logprob(sampler: Sampler) -> None:
    logits = torch.randn(3, VOCAB)
    tokens = draw(sampler, logits, [row(temperature=0.0)] * 3)
    assert torch.equal(tokens.token_ids, logits.argmax(-1))
    expected = torch.log_softmax(logits, -1).max(-1).values
    torch.testing.assert_close(tokens.logprobs, expected)


def test_random_rows_follow_the_distribution(sampler: Sampler) -> None:
    """Chi-square over 20,000 draws, 49 degrees of freedom: 100 has a probability under 1e-4."""
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    draws = 20_000
    tokens = draw(sampler, logits.expand(draws, -1), [row(seed=i, temperature=0.7) for i in range(draws)])
    counts = torch.bincount(tokens.token_ids, minlength=VOCAB).double()
    expected = torch.softmax(logits[0].double() / 0.7, -1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 100


def test_logprob_is_after_temperature_and_before_filters(sampler: Sampler) -> None:
    logits = torch.randn(1, VOCAB)
    tokens = draw(sampler, logits, [row(temperature=0.5, top_k=3, top_p=0.9)])
    expected = torch.log_softmax(logits / 0.5, -1)[0, tokens.token_ids[0]]
    torch.testing.assert_close(tokens.logprobs[0], expected)


def test_a_seed_gives_the_same_token_whatever_else_is_in_the_batch(sampler: Sampler) -> None:
    torch.manual_seed(1)
    mine = torch.randn(1, VOCAB)
    for params in ({"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}):
        for position in range(5):
            output = list(range(position))
            alone = draw(sampler, mine, [row(seed=42, output=output, **params)]).token_ids[0]
            others = [row(seed=i, temperature=0.5 + i / 9, top_p=0.7, top_k=9) for i in range(9)]
            batch = torch.cat([torch.randn(9, VOCAB), mine])
            assert draw(sampler, batch, [*others, row(seed=42, output=output, **params)]).token_ids[-1] == alone


def test_noise_depends_on_seed_and_position_and_is_uniform() -> None:
    positions = np.arange(10_000)
    a = uniform(np.full(10_000, 3, dtype=np.uint64), positions)
    b = uniform(np.full(10_000, 4, dtype=np.uint64), positions)
    assert a.min() >= 0.0 and a.max() < 1.0
    assert abs(a.mean() - 0.5) < 0.02 and abs(a.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.05


def reference_filter(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that filters leave in one row, by the definition, with a full sort."""
    order = probs.argsort(descending=True, stable=True).tolist()[:top_k]
    kept = {token: float(probs[token]) for token in order}
    total = sum(kept.values()) if top_k < len(probs) else float(probs.sum())
    chosen, mass = set(), 0.0
    for token in order:
        if mass >= top_p:
            break
        if kept[token] >= min_p * float(probs[order[0]]):
            chosen.add(token)
        mass += kept[token] / total
    return chosen


@pytest.mark.parametrize("vocab", [20, 5000])
def test_filters_keep_what_their_definition_keeps(vocab: int) -> None:
    torch.manual_seed(2)
    probs = torch.softmax(torch.randn(6, vocab) * 2, -1).double()
    top_k = torch.tensor([3, vocab, vocab, 10, 1, vocab])
    top_p = torch.tensor([1.0, 0.5, 0.999, 0.6, 1.0, 1.0], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.2], dtype=torch.float64)
    values, ids = filtered_candidates(probs, top_k, top_p, min_p)
    for i in range(6):
        kept = {int(t) for t, v in zip(ids[i], values[i]) if v > 0}
        assert kept == reference_filter(probs[i], int(top_k[i]), float(top_p[i]), float(min_p[i]))


def test_a_filtered_token_is_never_drawn(sampler: Sampler) -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB).expand(500, -1)
    tokens = draw(sampler, logits, [row(seed=i, top_k=2) for i in range(500)])
    assert set(tokens.token_ids.tolist()) == set(logits[0].topk(2).indices.tolist())


def test_bias_penalties_and_minimum_length() -> None:
    logits = torch.zeros(4, VOCAB)
    rows = [
        row(temperature=0.0, logit_bias={9: 5.0}),
        row(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25, output=[3, 3, 4]),
        row(temperature=0.0, repetition_penalty=2.0, prompt=[5], output=[6]),
        row(temperature=0.0, min_new_tokens=2, output=[1]),
    ]
    logits[2, 5], logits[2, 6] = 4.0, -4.0
    info = SamplingBatchInfo(rows, VOCAB)
    positions = torch.tensor([len(row.output_ids) for row in rows])
    changed = apply_edits(logits.clone(), info, positions)
    assert changed[0, 9] == 5.0 and changed[0].sum() == 5.0
    assert changed[1, 3] == -1.25 and changed[1, 4] == -0.75 and changed[1].count_nonzero() == 2
    assert changed[2, 5] == 2.0 and changed[2, 6] == -8.0
    assert changed[3, 7] == -torch.inf
    assert apply_edits(logits.clone(), info, positions + 1)[3, 7] == 0.0


def test_top_and_chosen_logprobs_where_asked_for(sampler: Sampler) -> None:
    torch.manual_seed(4)
    logits = torch.randn(4, VOCAB)
    reference = torch.log_softmax(logits, -1)
    rows = [row(temperature=0.0) for _ in range(4)]
    rows[0] = dataclasses.replace(rows[0], top_logprobs=5, chosen_ids=(4, 0))
    rows[2] = dataclasses.replace(rows[2], top_logprobs=2, wants_logprob=False)
    rows[3] = dataclasses.replace(rows[3], chosen_ids=(9,))
    tokens = draw(sampler, logits, rows)
    torch.testing.assert_close(tokens.top_logprobs[0], reference[0].topk(5).values)
    assert torch.equal(tokens.top_ids[0], reference[0].topk(5).indices)
    torch.testing.assert_close(tokens.top_logprobs[2, :2], reference[2].topk(2).values)
    assert (tokens.top_ids[[1, 3]] == -1).all() and tokens.top_ids[2, 2:].tolist() == [-1] * 3
    assert tokens.top_logprobs[[1, 3]].isnan().all() and tokens.top_logprobs[2, 2:].isnan().all()
    assert tokens.logprobs.isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(tokens.chosen_logprobs, reference[[0, 0, 3], [4, 0, 9]])


def test_scores_of_given_tokens(sampler: Sampler) -> None:
    torch.manual_seed(5)
    logits, targets = torch.randn(3, VOCAB), torch.tensor([7, 0, 49])
    reference = torch.log_softmax(logits / 0.7, -1)
    scores = sampler.score(logits, targets, 0.7, [3, 3, 8], 4)
    torch.testing.assert_close(scores.logprobs, reference.gather(1, targets[:, None]).squeeze(1))
    torch.testing.assert_close(scores.top_logprobs, reference.topk(4).values)
    assert torch.equal(scores.top_ids, reference.topk(4).indices)
    torch.testing.assert_close(scores.chosen_logprobs, reference[:, [3, 3, 8]])
    nothing = sampler.score(logits, targets, 0.7, [], 0)
    assert nothing.top_ids.shape == nothing.chosen_logprobs.shape == (3, 0)
    assert sampler.score(logits, targets, 1.0, [], VOCAB + 3).top_ids.shape == (3, VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_that_is_no_distribution(sampler: Sampler, temperature: float) -> None:
    """It gets the token of the first NaN, else of the largest logit, and NaN for every log-probability."""
    logits = torch.zeros(5, VOCAB)
    logits[0, [9, 20]] = torch.nan
    logits[0, 3] = torch.inf
    logits[1, [8, 40]] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = -torch.nan
    rows = [row(temperature=temperature, top_p=0.9 if temperature else 1.0, top_k=40) for _ in range(5)]
    rows = [dataclasses.replace(r, top_logprobs=3, chosen_ids=(1, 8)) for r in rows]
    tokens = draw(sampler, logits, rows)
    assert tokens.token_ids[:4].tolist() == [9, 8, 0, 5]
    assert tokens.logprobs[:4].isnan().all() and tokens.top_logprobs[:4].isnan().all()
    assert tokens.chosen_logprobs[:8].isnan().all()
    assert tokens.top_ids[:4].tolist() == [[0, 1, 2]] * 4
    assert torch.allclose(tokens.top_logprobs[4], -torch.tensor(float(VOCAB)).log())


def test_masked_tokens_are_never_drawn(sampler: Sampler) -> None:
    logits = torch.full((200, VOCAB), -torch.inf)
    logits[:, [11, 30]] = torch.tensor([2.0, 1.0])
    for params in ({}, {"top_k": 5}, {"top_p": 0.99999}, {"min_p": 1e-9}, {"top_k": 10, "top_p": 0.9999}):
        tokens = draw(sampler, logits, [row(seed=i, **params) for i in range(200)])
        assert set(tokens.token_ids.tolist()) == {11, 30}


def test_histories_are_read_live(sampler: Sampler) -> None:
    """A batch that is kept for 300 steps gives the results of a new one at every step."""
    torch.manual_seed(6)
    rows = [
        row(temperature=0.0, prompt=[3, 3, 5], frequency_penalty=0.01, repetition_penalty=1.2),
        row(seed=8, temperature=1.0, presence_penalty=0.5, min_new_tokens=7),
        row(seed=9, temperature=1.0),
        row(seed=9, temperature=0.8, frequency_penalty=-0.01),
    ]
    kept = SamplingBatchInfo(rows, VOCAB)
    for position in range(300):
        logits = torch.randn(4, VOCAB)
        positions = torch.full((4,), position)
        tokens = sampler.sample(logits.clone(), kept, positions)
        fresh = sampler.sample(logits.clone(), SamplingBatchInfo(rows, VOCAB), positions)
        assert torch.equal(tokens.token_ids, fresh.token_ids) and torch.equal(tokens.logprobs, fresh.logprobs)
        for r, token in zip(rows, tokens.token_ids.tolist()):
            r.output_ids.append(token)


def test_numbers_outside_the_vocabulary(sampler: Sampler) -> None:
    """A top-k may have any size, and an end token may lie outside the vocabulary."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = 5.0
    rows = [row(temperature=0.0, min_new_tokens=3), row(temperature=0.0, top_k=2**80)]
    rows = [dataclasses.replace(r, end_ids=(7, VOCAB, 10**9)) for r in rows]
    assert draw(sampler, logits, rows).token_ids.tolist() == [0, 7]


def test_a_batch_without_rows_samples_nothing(sampler: Sampler) -> None:
    tokens = draw(sampler, torch.zeros(0, VOCAB), [])
    assert tokens.token_ids.shape == tokens.logprobs.shape == (0,)


def test_the_choice_of_sampler() -> None:
    load_kernels()
    for dtype in (torch.bfloat16, torch.float32):
        assert isinstance(select_sampler(dtype, "cpu", kernels_available=True), NativeSampler)
    for dtype, device, available in (
        (torch.float64, "cpu", True),
        (torch.float16, "cpu", True),
        (torch.float64, "cuda", True),
        (torch.bfloat16, "cuda", False),
        (torch.bfloat16, "cpu", False),
    ):
        assert isinstance(select_sampler(dtype, device, available), TorchSampler)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 4, "min_new_tokens": 5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2.0},
        {"frequency_penalty": 3},
        {"repetition_penalty": 0},
        {"n": 0},
        {"n": 10_000},
        {"stop": [""]},
        {"stop": ["x"] * 33},
        {"stop": [3]},
        {"stop_token_ids": "abc"},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {str(VOCAB): 1.0}},
        {"logit_bias": {"1": "high"}},
        {"logit_bias": [1]},
        {"sampling_seed": 2**64},
        {"temperature": "hot"},
        {"max_new_tokens": 1.5},
    ],
)
def test_wrong_parameters_are_refused(bad: dict) -> None:
    with pytest.raises(BadRequest, match="sampling_params"):
        sampling_params_from_dict(bad)[0].validate(VOCAB)


def test_wire_forms_are_normalised() -> None:
    params, unknown = sampling_params_from_dict(
        {"stop": "end", "top_k": 0, "logit_bias": {"3": 1}, "seed": 5, "temperature": None, "regex": "x", "regexp": "x"}
    )
    assert (params.stop, params.top_k, params.logit_bias, params.sampling_seed) == (["end"], -1, {3: 1.0}, 5)
    assert params.temperature == 1.0 and unknown == ["regexp"]
    assert params.grammar == Grammar("regex", "x")


def test_engine_20_a_temperature_beyond_float32_is_refused() -> None:
    for temperature in (1e39, 1e308, float("inf"), float("nan")):
        with pytest.raises(BadRequest, match="temperature"):
            SamplingParams(temperature=temperature).validate(320)
