"""The DeepEP dispatcher against the stand-in of its package, and dispatchers that forgot a promise of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher
from rollout.layers.moe.dispatchers.deep_ep_modes import (
    DeepEpMode,
    ElasticMode,
    FixedElasticMode,
    LowLatencyMode,
    NormalMode,
)
from tests.deepep_contract import (
    APIS,
    HIDDEN,
    MAX_LOW_LATENCY_TOKENS,
    MAX_TOKENS,
    NUM_EXPERTS,
    batches,
    expected,
    experts_of_rank,
    forward,
    random_batch,
    with_dispatcher,
    wrong_cases,
)
from tests.tiers import examples

pytestmark = pytest.mark.full

# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("api", APIS)
def test_results_are_those_of_one_rank(api: str, num_ranks: int) -> None:
    assert wrong_cases(api, num_ranks) == []


@given(
    api=st.sampled_from(APIS),
    steps=st.lists(st.tuples(*[st.integers(0, MAX_TOKENS)] * 2, st.integers(0, 99)), min_size=1, max_size=5),
)
@settings(max_examples=examples(25), deadline=None)
def test_any_history_of_steps_gives_what_one_rank_gives(api: str, steps: list[tuple[int, int, int]]) -> None:
    made = [
        [
            random_batch(count, HIDDEN[api], 2, case, torch.Generator().manual_seed(seed))
            for count, case in zip(counts, ("some choose nothing", "even"), strict=True)
        ]
        for *counts, seed in steps
    ]

    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> list[bool]:
        rank, right = parallel.tp.rank, []
        for pair in made:
            dispatcher.plan_step([len(batch.hidden_TD) for batch in pair])
            right.append(torch.equal(forward(dispatcher, rank, pair[rank]), expected(pair[rank])))
        return right

    assert all(map(all, with_dispatcher(api, 2, work)))


@pytest.mark.parametrize("api", APIS)
def test_sums_are_rounded_no_more_often_than_documented(api: str) -> None:
    """Each weighted output is rounded three times at most on its way: by its expert, by its rank, by its token."""
    generator = torch.Generator().manual_seed(5)
    matrices = torch.randn(NUM_EXPERTS, HIDDEN[api], generator=generator).bfloat16()
    made = batches("ragged", 4, HIDDEN[api])
    for batch in made:
        batch.hidden_TD = torch.randn(batch.hidden_TD.shape, generator=generator).bfloat16()
        batch.weights_TK = torch.rand(batch.weights_TK.shape, generator=generator).bfloat16()

    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> torch.Tensor:
        batch, first = made[parallel.tp.rank], parallel.tp.rank * dispatcher.shape.slots_per_rank
        dispatcher.plan_step([len(other.hidden_TD) for other in made])
        sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
        ids_RS = sent.ids_RS
        out_RSD = sent.hidden_RD.float().unsqueeze(1) * matrices[(ids_RS + first).clamp(min=0)].float()
        if sent.weights_RS is not None:
            out_RSD = (out_RSD * sent.weights_RS.float().masked_fill(ids_RS < 0, 0).unsqueeze(2)).sum(1)
        return dispatcher.combine(out_RSD.bfloat16(), sent.handle)

    for batch, out in zip(made, with_dispatcher(api, 4, work), strict=True):
        terms_TKD = batch.hidden_TD.double().unsqueeze(1) * matrices[batch.ids_TK].double()
        terms_TKD *= batch.weights_TK.double().unsqueeze(2)
        assert ((out.double() - terms_TKD.sum(1)).abs() <= 3 * 2**-8 * terms_TKD.abs().sum(1) + 1e-12).all()


@pytest.mark.parametrize(
    ("api", "few", "many"), [("low_latency", LowLatencyMode, NormalMode), ("elastic", FixedElasticMode, ElasticMode)]
)
def test_steps_alternate_between_modes_by_the_largest_rank(
    api: str, few: type[DeepEpMode], many: type[DeepEpMode]
) -> None:
    """A rank with three tokens follows one with thirty, and back; the buffer is cleaned after normal mode."""
    sizes = [(3, 30), (3, 5), (20, 0), (21, 0), (0, 1), (40, 40), (1, 20)]
    hidden_size = HIDDEN[api]
    rows = [batches("even", 2, hidden_size)[0].hidden_TD[:1].repeat(40, 1)] * 2

    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> list[tuple[type, bool, bool]]:
        rank, found = parallel.tp.rank, []
        for pair in sizes:
            dispatcher.plan_step(pair)
            batch = batches("even", 2, hidden_size)[rank]
            batch.hidden_TD = rows[rank][: pair[rank]]
            batch.ids_TK, batch.weights_TK = (t[:1].repeat(pair[rank], 1) for t in (batch.ids_TK, batch.weights_TK))
            sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
            out = forward(dispatcher, rank, batch)
            found.append(
                (type(sent.handle[0]), dispatcher.capture_obstacle(pair) is None, torch.equal(out, expected(batch)))
            )
        return found

    for found in with_dispatcher(api, 2, work):
        fits = [max(pair) <= MAX_LOW_LATENCY_TOKENS for pair in sizes]
        assert found == [(few if small else many, small, True) for small in fits]


@pytest.mark.parametrize(
    ("api", "mode"),
    [
        ("normal", NormalMode),
        ("low_latency", NormalMode),
        ("low_latency alone", LowLatencyMode),
        ("elastic", ElasticMode),
        ("elastic fixed", FixedElasticMode),
    ],
)
def test_without_a_plan_ranks_use_the_mode_that_takes_every_batch(api: str, mode: type[DeepEpMode]) -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> type:
        batch = batches("ragged", 2, HIDDEN[api])[parallel.tp.rank]
        sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
        return type(sent.handle[0])

    assert with_dispatcher(api, 2, work) == [mode, mode]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("api", ["low_latency", "low_latency alone", "elastic", "elastic fixed"])
def test_shapes_of_steps_that_can_be_captured_do_not_depend_on_routes(api: str, num_ranks: int) -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> set[tuple[int, ...]]:
        shapes = set()
        for case in ("even", "expert 5 gets every token", "some choose nothing", "one rank gets all"):
            made = batches(case, num_ranks, HIDDEN[api])
            batch = made[parallel.tp.rank]
            dispatcher.plan_step([len(other.hidden_TD) for other in made])
            assert dispatcher.capture_obstacle([len(other.hidden_TD) for other in made]) is None
            sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
            shapes |= {tuple(sent.hidden_RD.shape), tuple(sent.ids_RS.shape)}
            dispatcher.combine(experts_of_rank(sent, parallel.tp.rank * dispatcher.shape.slots_per_rank), sent.handle)
        return shapes

    assert all(len(shapes) == 2 for shapes in with_dispatcher(api, num_ranks, work))


@pytest.mark.parametrize("api", ["elastic", "elastic fixed"])
def test_elastic_rows_come_by_source_and_token(api: str) -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> list[int]:
        tokens = torch.arange(1, 13, dtype=torch.bfloat16) + 100 * parallel.tp.rank
        ids = torch.tensor([[0, 1, 4, 5]]).repeat(12, 1)
        dispatcher.plan_step([12, 12])
        hidden = tokens.unsqueeze(1).repeat(1, HIDDEN[api])
        sent = dispatcher.dispatch(hidden, ids, torch.ones(12, 4))
        return sent.hidden_RD[:24, 0].int().tolist()

    everyone = [*range(1, 13), *range(101, 113)]
    assert with_dispatcher(api, 2, work) == [everyone, everyone]


@pytest.mark.parametrize(
    ("api", "alone", "replicas"),
    [
        ("normal", None, "rank by rank"),
        ("elastic", None, "rank by rank"),
        ("elastic fixed", None, "rank by rank"),
        ("low_latency alone", None, None),
        ("low_latency", "size of a step", "size of a step"),
    ],
)
def test_what_the_order_of_sums_depends_on(api: str, alone: str | None, replicas: str | None) -> None:
    for found in with_dispatcher(api, 2, lambda dispatcher, _: [dispatcher.order_of_sums(x) for x in (False, True)]):
        for reason, wanted in zip(found, (alone, replicas), strict=True):
            assert reason is None if wanted is None else wanted in reason


def test_a_rank_never_brings_more_than_the_step_was_planned_for() -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> None:
        dispatcher.plan_step([2, 2])
        forward(dispatcher, parallel.tp.rank, batches("even", 2, HIDDEN["normal"])[parallel.tp.rank])

    with pytest.raises(AssertionError, match="more tokens than the step was planned for"):
        with_dispatcher("normal", 2, work)


# --- dispatchers that forgot something ------------------------------------------------------------------------------


class OneExpertARow(NormalMode):
    """A wrong mode: it expects a row for each (token, expert)."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        assert work.weights_RS is not None
        slot = (work.ids_RS >= 0).int().argmax(1, keepdim=True)
        ids, weights = work.ids_RS.gather(1, slot), work.weights_RS.gather(1, slot)
        return DispatchOutput(work.hidden_RD, ids, weights, work.handle, has_holes=True)


class LeavesWeightsToCombine(NormalMode):
    """A wrong mode: it leaves the weights to the combine, as low-latency mode does."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        work.weights_RS = None
        return work

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        return super().combine(expert_out.sum(1), handle)


class MultipliesTwice(NormalMode):
    """A wrong mode: weights count twice, as if the states were sent weighted."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        assert work.weights_RS is not None
        work.weights_RS = work.weights_RS * work.weights_RS
        return work


class TrustsTheExperts(LowLatencyMode):
    """A wrong mode: it assumes that the rows are weighted already."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        return super().dispatch(hidden_TD, ids_TK, torch.ones_like(weights_TK))


def places_of(work: DispatchOutput) -> torch.Tensor:
    """Return the indices of the real rows."""
    return (work.ids_RS >= 0).squeeze(1).nonzero().squeeze(1)


class PacksWithoutPlaces(LowLatencyMode):
    """A wrong mode: it assumes that the rows of one expert follow the rows of the expert before."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        work.handle = work.handle, places_of(work)
        return work

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        packed = torch.zeros_like(expert_out)
        packed[: len(handle[1])] = expert_out[handle[1]]
        return super().combine(packed, handle[0])


class SortsBySource(LowLatencyMode):
    """A wrong mode: it returns the rows of an expert in the order of their tokens."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        work.handle = work.handle, places_of(work), work.ids_RS.flatten()
        return work

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        inner, rows, experts = handle
        keys = experts[rows] * 10_000 + inner[0][0].flatten()[rows]
        expert_out[rows] = expert_out[rows[keys.argsort()]]
        return super().combine(expert_out, inner)


class LeavesElasticWeightsToCombine(ElasticMode):
    """A wrong mode: it leaves the weights to the combine, as low-latency mode does."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        work.weights_RS = None
        return work

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        return super().combine(expert_out.sum(1), handle)


class ComputesWhatCameFirst(FixedElasticMode):
    """A wrong mode: it assumes that all rows past the first ones are empty."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        work.ids_RS[hidden_TD.shape[0] :] = -1
        return work


class TakesEveryRow(FixedElasticMode):
    """A wrong mode: it does not read how many rows are real."""

    has_fixed_rows = False

    @property
    def _max_tokens(self) -> int:
        return self.shape.low_latency_tokens

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        dispatch = self.buffer.dispatch
        self.buffer.dispatch = lambda **settings: dispatch(**settings | {"do_cpu_sync": False})
        try:
            return super().dispatch(hidden_TD, ids_TK, weights_TK)
        finally:
            self.buffer.dispatch = dispatch


class SendsFloat8(LowLatencyMode):
    """A mode that forgets that low-latency mode casts unless a flag forbids it."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        shape = self.shape
        packed, _, handle, *_ = self.buffer.low_latency_dispatch(
            hidden_TD, ids_TK, shape.low_latency_tokens, shape.num_physical_experts
        )
        return DispatchOutput(packed.flatten(0, 1), ids_TK, None, handle)


def variant(kind: type[DeepEpMode]) -> type[DeepEpDispatcher]:
    """Return a dispatcher with `kind` in place of the mode that it derives from."""
    right = kind.__bases__[0]
    modes = {
        api: tuple(kind if mode is right else mode for mode in pair) for api, pair in DeepEpDispatcher.modes.items()
    }
    return type("Variant", (DeepEpDispatcher,), {"modes": modes})


@pytest.mark.mutant
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("api", "kind"),
    [
        ("normal", OneExpertARow),
        ("normal", LeavesWeightsToCombine),
        ("normal", MultipliesTwice),
        ("low_latency", TrustsTheExperts),
        ("low_latency alone", PacksWithoutPlaces),
        ("low_latency", SortsBySource),
        ("elastic fixed", ComputesWhatCameFirst),
    ],
)
def test_a_wrong_mode_gives_other_results(api: str, kind: type[DeepEpMode], num_ranks: int) -> None:
    wrong = wrong_cases(api, num_ranks, variant(kind))
    assert "ragged" in wrong and "no token" not in wrong


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("api", "kind", "error"),
    [("low_latency", SendsFloat8, AttributeError), ("elastic fixed", TakesEveryRow, IndexError)],
)
def test_a_mode_that_takes_what_it_did_not_ask_for_fails_at_once(
    api: str, kind: type[DeepEpMode], error: type[Exception]
) -> None:
    with pytest.raises(error):
        wrong_cases(api, 2, variant(kind), ("even",))


@pytest.mark.mutant
def test_weights_that_nobody_applies_are_noticed() -> None:
    """Steps of many tokens, for which an elastic buffer waits."""
    made = [random_batch(MAX_TOKENS, HIDDEN["elastic"], 2, "even", torch.Generator().manual_seed(r)) for r in (0, 1)]

    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> bool:
        dispatcher.plan_step([MAX_TOKENS] * 2)
        rank = parallel.tp.rank
        return torch.equal(forward(dispatcher, rank, made[rank]), expected(made[rank]))

    assert with_dispatcher("elastic", 2, work) == [True, True]
    assert with_dispatcher("elastic", 2, work, variant(LeavesElasticWeightsToCombine)) == [False, False]


class ForgetsItsMode(DeepEpDispatcher):
    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        return self._mode.combine(expert_out, handle[1])


@pytest.mark.mutant
def test_a_dispatcher_that_combines_in_another_mode_is_caught() -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> None:
        batch = batches("even", 2, HIDDEN["low_latency"])[parallel.tp.rank]
        dispatcher.plan_step([6, 30])
        sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
        out = experts_of_rank(sent, parallel.tp.rank * dispatcher.shape.slots_per_rank)
        dispatcher.plan_step([6, 6])
        dispatcher.combine(out, sent.handle)

    with_dispatcher("low_latency", 2, work)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        with_dispatcher("low_latency", 2, work, ForgetsItsMode)


class NeverCleans(DeepEpDispatcher):
    def _clean(self) -> None:
        pass


class ChoosesByItsOwnTokens(DeepEpDispatcher):
    def plan_step(self, tokens_by_rank: Sequence[int]) -> None:
        pass

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        super().plan_step([hidden_TD.shape[0]])
        return super().dispatch(hidden_TD, ids_TK, weights_TK)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("wrong", "message"), [(NeverCleans, "clean_low_latency_buffer"), (ChoosesByItsOwnTokens, "different calls")]
)
def test_a_dispatcher_that_mixes_modes_is_caught(wrong: type[DeepEpDispatcher], message: str) -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> None:
        rank, batch = parallel.tp.rank, batches("even", 2, HIDDEN["low_latency"])[parallel.tp.rank]
        repeated = batch.ids_TK[:1].repeat(25, 1), batch.weights_TK[:1].repeat(25, 1)
        dispatcher.plan_step([25, 6])
        if rank == 0:
            dispatcher.dispatch(batch.hidden_TD[:1].repeat(25, 1), *repeated)
        else:
            dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
        dispatcher.plan_step([6, 6])
        dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)

    with pytest.raises(AssertionError, match=message):
        with_dispatcher("low_latency", 2, work, wrong)
