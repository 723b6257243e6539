"""The sampler against its definition: distributions, filters, penalties, seeds, log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.core.errors import BadRequest
from rollout.core.sampling_params import SamplingParams, sampling_params_from_dict
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.filters import filtered_candidates
from rollout.sampling.noise import uniform
from rollout.sampling.sampler import chosen_logprobs, sample, top_logprobs

VOCAB = 50


def row(seed: int = 0, output: list[int] | None = None, prompt: list[int] | None = None, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, (7,), prompt or [1], output if output is not None else [])


def draw(logits: torch.Tensor, rows: list[SamplingRow]):
    positions = torch.tensor([len(row.output_ids) for row in rows])
    return sample(logits.clone(), SamplingBatchInfo(rows, logits.shape[1]), positions)


def test_greedy_takes_the_best_and_reports_the_raw_logprob() -> None:
    logits = torch.randn(3, VOCAB)
    tokens = draw(logits, [row(temperature=0.0)] * 3)
    assert torch.equal(tokens.token_ids, logits.argmax(-1))
    expected = torch.log_softmax(logits, -1).max(-1).values
    torch.testing.assert_close(tokens.logprobs(), expected)


def test_random_rows_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws, 49 degrees of freedom: 100 has a probability under 1e-4."""
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    draws = 20_000
    tokens = draw(logits.expand(draws, -1), [row(seed=i, temperature=0.7) for i in range(draws)])
    counts = torch.bincount(tokens.token_ids, minlength=VOCAB).double()
    expected = torch.softmax(logits[0].double() / 0.7, -1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 100


def test_logprob_is_after_temperature_and_before_filters() -> None:
    logits = torch.randn(1, VOCAB)
    tokens = draw(logits, [row(temperature=0.5, top_k=3, top_p=0.9)])
    expected = torch.log_softmax(logits / 0.5, -1)[0, tokens.token_ids[0]]
    torch.testing.assert_close(tokens.logprobs()[0], expected)


def test_a_seed_gives_the_same_token_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(1)
    mine = torch.randn(1, VOCAB)
    for params in ({"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}):
        for position in range(5):
            output = list(range(position))
            alone = draw(mine, [row(seed=42, output=output, **params)]).token_ids[0]
            others = [row(seed=i, temperature=0.5 + i / 9, top_p=0.7, top_k=9) for i in range(9)]
            batch = torch.cat([torch.randn(9, VOCAB), mine])
            assert draw(batch, [*others, row(seed=42, output=output, **params)]).token_ids[-1] == alone


def test_noise_depends_on_seed_and_position_and_is_uniform() -> None:
    positions = np.arange(10_000)
    a = uniform(np.full(10_000, 3, dtype=np.uint64), positions)
    b = uniform(np.full(10_000, 4, dtype=np.uint64), positions)
    assert a.min() >= 0.0 and a.max() < 1.0
    assert abs(a.mean() - 0.5) < 0.02 and abs(a.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.05


def reference_filter(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, one row, by a full sort."""
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


def test_a_filtered_token_is_never_drawn() -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB).expand(500, -1)
    tokens = draw(logits, [row(seed=i, top_k=2) for i in range(500)])
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
    changed = info.apply(logits.clone())
    assert changed[0, 9] == 5.0 and changed[0].sum() == 5.0
    assert changed[1, 3] == -1.25 and changed[1, 4] == -0.75 and changed[1].count_nonzero() == 2
    assert changed[2, 5] == 2.0 and changed[2, 6] == -8.0
    assert changed[3, 7] == -torch.inf
    rows[3].output_ids.append(2)
    assert info.apply(logits.clone())[3, 7] == 0.0


def test_top_and_chosen_logprobs() -> None:
    logits = torch.randn(2, VOCAB)
    reference = torch.log_softmax(logits, -1)
    values, ids = top_logprobs(logits, 5)
    torch.testing.assert_close(values, reference.topk(5).values)
    assert torch.equal(ids, reference.topk(5).indices)
    torch.testing.assert_close(chosen_logprobs(logits, [4, 0]), reference[:, [4, 0]])


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
        {"stop": "end", "top_k": 0, "logit_bias": {"3": 1}, "seed": 5, "temperature": None, "regex": "x"}
    )
    assert (params.stop, params.top_k, params.logit_bias, params.sampling_seed) == (["end"], -1, {3: 1.0}, 5)
    assert params.temperature == 1.0 and unknown == ["regex"]
