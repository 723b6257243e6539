"""The DeepEP dispatcher against the stand-in of its package, and dispatchers that forgot a promise of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher, ElasticMode, LowLatencyMode, NormalMode
from rollout.layers.moe.dispatchers.deep_ep_library import (
    NEEDS,
    DeepEpApi,
    DeepEpShape,
    _BufferComm,
    choose_api,
    load_deep_ep,
    require_deep_ep,
)
from tests.deepep_contract import (
    APIS,
    HIDDEN,
    MAX_LOW_LATENCY_TOKENS,
    MAX_TOKENS,
    NUM_EXPERTS,
    batches,
    expected,
    forward,
    random_batch,
    with_dispatcher,
    wrong_cases,
)
from tests.deepep_stand_in import stand_in
from tests.ranks import run_ranks

# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("api", APIS)
def test_results_are_those_of_one_rank(api: str, num_ranks: int) -> None:
    assert wrong_cases(api, num_ranks) == []


@given(
    api=st.sampled_from(APIS),
    steps=st.lists(st.tuples(*[st.integers(0, MAX_TOKENS)] * 2, st.integers(0, 99)), min_size=1, max_size=5),
)
@settings(max_examples=25, deadline=None)
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
def test_sums_are_rounded_no_more_often_than_told(api: str) -> None:
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
        ids_RS = sent.local_physical_ids_RS
        out_RSD = sent.hidden_RD.float().unsqueeze(1) * matrices[(ids_RS + first).clamp(min=0)].float()
        if sent.weights_RS is not None:
            out_RSD = (out_RSD * sent.weights_RS.float().masked_fill(ids_RS < 0, 0).unsqueeze(2)).sum(1)
        return dispatcher.combine(out_RSD.bfloat16(), sent.handle)

    for batch, out in zip(made, with_dispatcher(api, 4, work), strict=True):
        terms_TKD = batch.hidden_TD.double().unsqueeze(1) * matrices[batch.ids_TK].double()
        terms_TKD *= batch.weights_TK.double().unsqueeze(2)
        assert ((out.double() - terms_TKD.sum(1)).abs() <= 3 * 2**-8 * terms_TKD.abs().sum(1) + 1e-12).all()


def test_elastic_works_with_three_ranks_that_divide_and_refuses_others() -> None:
    shape = DeepEpShape(256, 9, 2, torch.bfloat16, 3, MAX_TOKENS)
    library = SimpleNamespace(Buffer=object, ElasticBuffer=object)
    assert choose_api(library, shape, has_device_group=True, has_rdma=False)[0] is DeepEpApi.ELASTIC
    with pytest.raises(StartupError, match="2, 4 or 8 ranks of a node, not 3"):
        choose_api(library, shape, has_device_group=False, has_rdma=True)


def test_steps_alternate_between_modes_by_the_largest_rank() -> None:
    """A rank with three tokens follows one with thirty, and back; what normal mode left behind is cleaned."""
    sizes = [(3, 30), (3, 5), (20, 0), (21, 0), (0, 1), (40, 40), (1, 20)]
    hidden_size = HIDDEN["low_latency"]
    rows = [batches("even", 2, hidden_size)[0].hidden_TD[:1].repeat(40, 1)] * 2

    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> list[tuple[type, bool]]:
        rank, found = parallel.tp.rank, []
        for pair in sizes:
            dispatcher.plan_step(pair)
            batch = batches("even", 2, hidden_size)[rank]
            batch.hidden_TD = rows[rank][: pair[rank]]
            batch.ids_TK, batch.weights_TK = (t[:1].repeat(pair[rank], 1) for t in (batch.ids_TK, batch.weights_TK))
            sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
            out = forward(dispatcher, rank, batch)
            found.append((type(sent.handle[0]), torch.equal(out, expected(batch))))
        return found

    for found in with_dispatcher("low_latency", 2, work):
        modes = [LowLatencyMode if max(pair) <= MAX_LOW_LATENCY_TOKENS else NormalMode for pair in sizes]
        assert found == [(mode, True) for mode in modes]


def test_without_a_plan_ranks_use_the_mode_that_takes_every_batch() -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> type:
        batch = batches("ragged", 2, HIDDEN["low_latency"])[parallel.tp.rank]
        sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
        return type(sent.handle[0])

    assert with_dispatcher("low_latency", 2, work) == [NormalMode, NormalMode]


def test_a_rank_never_brings_more_than_the_step_was_planned_for() -> None:
    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> None:
        dispatcher.plan_step([2, 2])
        forward(dispatcher, parallel.tp.rank, batches("even", 2, HIDDEN["normal"])[parallel.tp.rank])

    with pytest.raises(AssertionError, match="more tokens than the step was planned for"):
        with_dispatcher("normal", 2, work)


# --- dispatchers that forgot something ------------------------------------------------------------------------------


class IgnoresMinusOne(ElasticMode):
    """Takes another rank's choice for local expert 0, with the weight that came along."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        shape = self.shape
        received, ids, weights, handle, _ = self.buffer.dispatch(
            x=hidden_TD, topk_idx=ids_TK, topk_weights=weights_TK, num_experts=shape.num_physical_experts
        )
        return DispatchOutput(received, ids.clamp(min=0), weights.to(received.dtype), handle)


class AssumesArrivalOrder(ElasticMode):
    """Knows ids and weights of its rows from elsewhere, by source rank and token, and takes rows to come so."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        order = work.handle.recv_src_metadata[:, 0].argsort()
        assert work.weights_RS is not None
        work.local_physical_ids_RS, work.weights_RS = work.local_physical_ids_RS[order], work.weights_RS[order]
        return work


class OneExpertARow(NormalMode):
    """Expects a row for each (token, expert)."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        assert work.weights_RS is not None
        slot = (work.local_physical_ids_RS >= 0).int().argmax(1, keepdim=True)
        ids, weights = work.local_physical_ids_RS.gather(1, slot), work.weights_RS.gather(1, slot)
        return DispatchOutput(work.hidden_RD, ids, weights, work.handle, has_holes=True)


class LeavesWeightsToCombine(NormalMode):
    """As in low-latency mode."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        work.weights_RS = None
        return work

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        return super().combine(expert_out.sum(1), handle)


class MultipliesTwice(NormalMode):
    """Sends weighted states and weights."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        assert work.weights_RS is not None
        work.weights_RS = work.weights_RS * work.weights_RS
        return work


class TrustsTheExperts(LowLatencyMode):
    """Takes the weights to be in the rows already."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        return super().dispatch(hidden_TD, ids_TK, torch.ones_like(weights_TK))


class PacksWithoutPlaces(LowLatencyMode):
    """Takes the rows of one expert to follow those of the one before."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        work = super().dispatch(hidden_TD, ids_TK, weights_TK)
        handle, ids, weights, rows, places = work.handle
        return DispatchOutput(
            work.hidden_RD, work.local_physical_ids_RS, None, (handle, ids, weights, torch.arange(len(rows)), places)
        )


class SortsBySource(LowLatencyMode):
    """Gives the rows of an expert back in the order of their tokens."""

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        packed_handle, *_, rows, places = handle
        keys = rows // places * 10_000 + packed_handle[0].flatten()[rows]
        return super().combine(expert_out[keys.argsort()], handle)


class SendsFloat8(LowLatencyMode):
    """Forgets that low-latency mode casts unless told not to."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        shape = self.shape
        packed, _, handle, *_ = self.buffer.low_latency_dispatch(
            hidden_TD, ids_TK, shape.low_latency_tokens, shape.num_physical_experts
        )
        return DispatchOutput(packed.flatten(0, 1), ids_TK, None, handle)


def variant(**modes: Any) -> type[DeepEpDispatcher]:
    return type("Variant", (DeepEpDispatcher,), modes)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("api", "modes"),
    [
        ("elastic", {"elastic_mode": IgnoresMinusOne}),
        ("elastic", {"elastic_mode": AssumesArrivalOrder}),
        ("normal", {"normal_mode": OneExpertARow}),
        ("normal", {"normal_mode": LeavesWeightsToCombine}),
        ("normal", {"normal_mode": MultipliesTwice}),
        ("low_latency", {"low_latency_mode": TrustsTheExperts}),
        ("low_latency", {"low_latency_mode": PacksWithoutPlaces}),
        ("low_latency", {"low_latency_mode": SortsBySource}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else value,
)
def test_a_wrong_mode_gives_other_results(api: str, modes: dict[str, Any], num_ranks: int) -> None:
    wrong = wrong_cases(api, num_ranks, variant(**modes))
    assert "ragged" in wrong and "no token" not in wrong


def test_a_dispatcher_that_lets_states_be_cast_fails_at_once() -> None:
    with pytest.raises(AttributeError):
        wrong_cases("low_latency", 2, variant(low_latency_mode=SendsFloat8), ("even",))


class NeverCleans(DeepEpDispatcher):
    def _clean(self) -> None:
        pass


class ChoosesByItsOwnTokens(DeepEpDispatcher):
    def plan_step(self, tokens_by_rank: Sequence[int]) -> None:
        pass

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        super().plan_step([hidden_TD.shape[0]])
        return super().dispatch(hidden_TD, ids_TK, weights_TK)


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


# --- which API ------------------------------------------------------------------------------------------------------

NORMAL_ONLY = SimpleNamespace(Buffer=SimpleNamespace())
RELEASE_1 = SimpleNamespace(Buffer=SimpleNamespace(low_latency_dispatch=None))
RELEASE_2 = SimpleNamespace(Buffer=RELEASE_1.Buffer, ElasticBuffer=None)
ELASTIC_ONLY = SimpleNamespace(ElasticBuffer=None)


def a_shape(**changes: Any) -> DeepEpShape:
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "num_physical_experts": 128,
        "top_k": 8,
        "dtype": torch.bfloat16,
        "num_ranks": 4,
        "max_tokens_per_rank": 4096,
    }
    return DeepEpShape(**(sizes | changes))


@pytest.mark.parametrize(
    ("library", "changes", "device_group", "rdma", "api", "because"),
    [
        (RELEASE_2, {}, True, True, DeepEpApi.ELASTIC, ""),
        (RELEASE_2, {}, True, False, DeepEpApi.ELASTIC, ""),
        (RELEASE_2, {}, False, True, DeepEpApi.NORMAL_AND_LOW_LATENCY, "NCCL"),
        (RELEASE_2, {"hidden_size": 2064}, True, True, DeepEpApi.NORMAL, "256 divides"),
        (ELASTIC_ONLY, {"num_ranks": 1}, True, False, DeepEpApi.ELASTIC, ""),
        (RELEASE_1, {}, True, True, DeepEpApi.NORMAL_AND_LOW_LATENCY, "no ElasticBuffer"),
        (RELEASE_1, {}, True, False, DeepEpApi.NORMAL, "RDMA"),
        (RELEASE_1, {"hidden_size": 1024}, True, True, DeepEpApi.NORMAL, "hidden size of 1024"),
        (RELEASE_1, {"top_k": 12}, True, True, DeepEpApi.NORMAL, "11 experts"),
        (RELEASE_1, {"max_low_latency_tokens": 600}, True, True, DeepEpApi.NORMAL, "511 tokens"),
        (NORMAL_ONLY, {}, True, True, DeepEpApi.NORMAL, "no low-latency"),
    ],
)
def test_the_best_api_that_fits_is_used(
    library: Any, changes: dict[str, Any], device_group: bool, rdma: bool, api: DeepEpApi, because: str
) -> None:
    chosen, passed_over = choose_api(library, a_shape(**changes), has_device_group=device_group, has_rdma=rdma)
    assert chosen is api
    assert because in "; ".join(passed_over) and bool(because) == bool(passed_over)


@pytest.mark.parametrize(
    ("library", "changes", "message"),
    [
        (RELEASE_2, {"dtype": torch.float32}, "sends bfloat16, not float32"),
        (RELEASE_2, {"num_physical_experts": 130}, "4 ranks do not divide 130 physical experts"),
        (RELEASE_2, {"top_k": 33}, "at most 32 experts, not 33"),
        (RELEASE_1, {"num_ranks": 1}, "2, 4 or 8 ranks of a node, not 1"),
        (RELEASE_1, {"hidden_size": 8192}, "below 8184 that 16 divides, not 8192"),
        (RELEASE_1, {"num_physical_experts": 1024}, "at most 128 physical experts a rank, not 256"),
        (ELASTIC_ONLY, {"hidden_size": 320}, "256 divides, not 320; this deep_ep has no Buffer"),
    ],
)
def test_what_deep_ep_cannot_carry_is_one_line_at_start(library: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match="--moe-a2a-backend deepep cannot carry") as raised:
        choose_api(library, a_shape(**changes), has_device_group=True, has_rdma=True)
    assert message in str(raised.value) and "all_to_all" in str(raised.value) and "\n" not in str(raised.value)


def test_low_latency_places_are_a_multiple_of_four_and_not_more_than_needed() -> None:
    assert [a_shape(max_tokens_per_rank=n).low_latency_tokens for n in (1, 4, 30, 4096)] == [4, 4, 32, 128]


def test_a_buffer_that_cannot_be_set_up_is_a_startup_error() -> None:
    class Broken:
        def __init__(self, **settings: Any) -> None:
            raise RuntimeError("no GIN\nlong trace")

    library = SimpleNamespace(ElasticBuffer=Broken)
    with pytest.raises(StartupError, match="cannot set up ElasticBuffer: no GIN; all_to_all") as raised:
        DeepEpDispatcher(library, Communicator("tp", 0, 1), a_shape(num_ranks=1), device_group=object())  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_low_latency_mode_is_for_ranks_that_all_have_rdma() -> None:
    def work(parallel: Parallel) -> DeepEpApi:
        library, rank = stand_in(parallel.tp, "1.2"), parallel.tp.rank
        return DeepEpDispatcher(library, parallel.tp, a_shape(num_ranks=2), has_rdma=rank == 0).api

    assert run_ranks(ParallelLayout(tp_size=2), work, 20.0) == [DeepEpApi.NORMAL, DeepEpApi.NORMAL]


def test_ranks_with_different_releases_do_not_start() -> None:
    def work(parallel: Parallel) -> None:
        library = stand_in(parallel.tp, ("normal", "1.2")[parallel.tp.rank])
        with pytest.raises(StartupError, match="same release"):
            DeepEpDispatcher(library, parallel.tp, a_shape(num_ranks=2), has_rdma=True)

    run_ranks(ParallelLayout(tp_size=2), work, 20.0)


# --- package and device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_the_error_names_the_way_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError) as raised:
        require_deep_ep(device)
    assert (
        str(raised.value)
        == NEEDS
        == ("--moe-a2a-backend deepep needs the deep_ep package and a GPU; all_to_all does the same on this machine")
    )


@pytest.mark.parametrize(
    "body", ["import a_module_that_is_missing", "assert False, 'two libnccl\\nfound'", "raise OSError('libnvshmem')"]
)
def test_a_package_that_cannot_be_loaded_is_the_same_line_and_the_reason(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartupError) as raised:
        load_deep_ep()
    assert str(raised.value).startswith(NEEDS + " (") and "\n" not in str(raised.value)


def test_a_package_that_loads_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_ep.py").write_text("Buffer = 7")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert load_deep_ep().Buffer == 7
    finally:
        sys.modules.pop("deep_ep", None)


def test_set_up_values_cross_ranks_without_pickle() -> None:
    values: list[Any] = [None, 3, bytearray(b"\x00n\xff"), bytearray()]

    def work(parallel: Parallel) -> list[Any]:
        comm = _BufferComm(parallel.tp)
        return comm.allgather(values[comm.Get_rank()])

    for gathered in run_ranks(ParallelLayout(tp_size=4), work, 20.0):
        assert gathered == values
        assert [type(value) for value in gathered] == [type(None), int, bytearray, bytearray]
    with pytest.raises(AssertionError, match="exchanges dict"):
        _BufferComm(Communicator("tp", 0, 1)).allgather({})  # type: ignore[arg-type]


def test_releases_of_the_stand_in_offer_what_the_package_offers() -> None:
    alone = Communicator("tp", 0, 1)
    assert not hasattr(stand_in(alone, "normal").Buffer, "low_latency_dispatch")
    assert not hasattr(stand_in(alone, "1.2"), "ElasticBuffer")
    assert hasattr(stand_in(alone, "2.1"), "topk_idx_t")
