"""Expert strategies agree with the plain formula and with one another on every kind of routing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.kernels.operators.fused_experts import (
    Strategy,
    apply_experts,
    choose_strategy,
    grouped,
    has_grouped,
    looped,
    padded,
    padded_capacity,
    weighted_sum,
)
from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.ops import plain_ops
from rollout.layers.moe.dispatchers.base import LocalDispatcher
from tests.tiers import examples

EXPERTS, HIDDEN, INNER = 6, 16, 8


def _weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator, dtype=torch.float64) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator, dtype=torch.float64) / INNER**0.5
    return w13.to(dtype), w2.to(dtype)


def _plain(hidden: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*ids.shape, HIDDEN, dtype=torch.float64)
    hidden, w13, w2 = hidden.double(), w13.double(), w2.double()
    for row in range(ids.shape[0]):
        for slot, expert in enumerate(ids[row].tolist()):
            gate, up = (w13[expert] @ hidden[row]).chunk(2)
            out[row, slot] = w2[expert] @ (F.silu(gate) * up)
    return out


ROUTINGS = {
    "even": torch.arange(24).view(12, 2) % EXPERTS,
    "all to one": torch.full((9, 1), 4),
    "one gets most, some none": torch.tensor([[2, 0]] * 7 + [[2, 5]]),
    "single row": torch.tensor([[5, 1, 3]]),
    "last expert only once": torch.tensor([[0, 1], [1, 0], [5, 0]]),
    "same expert in two slots": torch.tensor([[3, 3], [1, 3]]),
    "no rows": torch.empty(0, 2, dtype=torch.int64),
}


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize(
    ("strategy", "dtype", "tolerance"),
    [
        (None, torch.float64, 1e-13),
        (padded, torch.float64, 1e-13),
        (looped, torch.float64, 1e-13),
        (None, torch.float32, 1e-5),
        (padded, torch.float32, 1e-5),
        (grouped, torch.float32, 1e-5),
        (looped, torch.float32, 1e-5),
        (None, torch.bfloat16, 0.1),
        (padded, torch.bfloat16, 0.1),
        (grouped, torch.bfloat16, 0.1),
        (looped, torch.bfloat16, 0.1),
        (grouped, torch.float16, 0.02),
        (padded, torch.float16, 0.02),
    ],
)
def test_strategies_equal_the_plain_formula(
    routing: str, strategy: Strategy | None, dtype: torch.dtype, tolerance: float
) -> None:
    ids, (w13, w2) = ROUTINGS[routing], _weights(dtype)
    hidden = torch.randn(ids.shape[0], HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = apply_experts(hidden, ids, w13, w2, strategy)
    assert out.shape == (*ids.shape, HIDDEN)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), _plain(hidden, ids, w13, w2), atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_strategies_agree_on_random_routings(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 4))
    rows = data.draw(st.integers(1, 20))
    popular = data.draw(st.integers(1, EXPERTS))
    flat = data.draw(st.lists(st.integers(0, popular - 1), min_size=rows * slots, max_size=rows * slots))
    ids, (w13, w2) = torch.tensor(flat).view(rows, slots), _weights(torch.float64)
    hidden = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    expected = _plain(hidden, ids, w13, w2)
    for strategy in (padded, looped, None):
        torch.testing.assert_close(apply_experts(hidden, ids, w13, w2, strategy), expected, atol=1e-13, rtol=1e-13)


@pytest.mark.mutant
def test_the_comparison_notices_a_wrong_expert_and_swapped_halves() -> None:
    ids, (w13, w2) = ROUTINGS["even"], _weights(torch.float64)
    hidden = torch.randn(12, HIDDEN, dtype=torch.float64)
    expected = _plain(hidden, ids, w13, w2)
    wrong_ids = ids.clone()
    wrong_ids[3, 1] = (wrong_ids[3, 1] + 1) % EXPERTS
    for wrong in (
        apply_experts(hidden, wrong_ids, w13, w2),
        apply_experts(hidden, ids, torch.cat(w13.chunk(2, dim=1)[::-1], dim=1), w2),
        apply_experts(hidden.roll(1, 0), ids, w13, w2),
    ):
        assert (wrong - expected).abs().max() > 1e-3


def test_a_row_does_not_see_its_neighbours() -> None:
    """Padding copies rows, and a row of NaN must not reach any other row."""
    ids, (w13, w2) = ROUTINGS["one gets most, some none"], _weights(torch.float32)
    hidden = torch.randn(8, HIDDEN)
    hidden[0] = float("nan")
    for strategy in (padded, grouped, looped):
        out = apply_experts(hidden, ids, w13, w2, strategy)
        assert out[0].isnan().all()
        assert out[1:].isfinite().all()


def test_the_choice_follows_load_and_what_exists() -> None:
    half = torch.empty(32, 256, 128, dtype=torch.bfloat16)
    assert choose_strategy([8] * 32, half) is padded
    assert choose_strategy([1] + [0] * 31, half) is grouped
    assert choose_strategy([1000] + [0] * 31, half) is grouped
    double = torch.empty(32, 256, 128, dtype=torch.float64)
    assert choose_strategy([1000] + [0] * 31, double) is looped
    assert not has_grouped(torch.empty(4, 16, 5))
    assert choose_strategy([1_000_000, 0, 0, 0], torch.empty(4, 16, 5)) is looped


def test_padded_capacity_wastes_little_and_has_few_values() -> None:
    for busiest in range(1, 2000):
        assert busiest <= padded_capacity(busiest) <= busiest * 1.125
    assert len({padded_capacity(n) for n in range(16, 1024)}) <= 8 * 6 + 1


def test_the_weighted_sum_is_in_slot_order() -> None:
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.0]], dtype=torch.float64)
    outputs = torch.arange(12, dtype=torch.float64).view(2, 2, 3)
    expected = torch.stack((0.5 * outputs[0, 0] + 0.25 * outputs[0, 1], outputs[1, 0]))
    assert torch.equal(weighted_sum(outputs, weights), expected)


def test_local_dispatch_leaves_the_sum_to_the_experts() -> None:
    dispatcher, (w13, w2) = LocalDispatcher(), _weights(torch.float64)
    hidden, ids = torch.randn(12, HIDDEN, dtype=torch.float64), ROUTINGS["even"]
    weights = torch.rand(12, 2, dtype=torch.float64)
    work = dispatcher.dispatch(hidden, ids, weights)
    assert work.weights_RS is not None
    out = plain_ops().fused_experts(work.hidden_RD, work.ids_RS, work.weights_RS, w13, w2, INNER)
    expected = (_plain(hidden, ids, w13, w2) * weights[..., None]).sum(1)
    torch.testing.assert_close(dispatcher.combine(out, work.handle), expected, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("normalise", [True, False])
def test_topk_weights_are_softmax_values_that_may_be_normalised(normalise: bool) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 4.0, 4.5]], dtype=torch.float64)
    weights, ids = _route(logits, normalise)
    assert ids.tolist() == [[1, 3], [0, 3]]
    expected = logits.softmax(-1).gather(1, ids)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected, atol=1e-15, rtol=0)
    assert _route(logits.bfloat16(), normalise)[0].dtype == torch.bfloat16


def _route(logits_TE: torch.Tensor, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids of the best two experts by the operator that also norms.

    All rows have one size, so the norm scales them alike, and the matrix undoes it.
    """
    size = logits_TE.shape[1]
    hidden = torch.diag_embed(torch.ones(size, dtype=logits_TE.dtype))[: logits_TE.shape[0]] * size**0.5
    norm = torch.full((size,), size**-0.5, dtype=logits_TE.dtype)
    matrix = torch.zeros(size, size, dtype=logits_TE.dtype)
    matrix[:, : logits_TE.shape[0]] = logits_TE.T
    return plain_ops().norm_route(hidden, None, norm, 0.0, matrix, RouterRule(size, 2, normalise))[1:]
