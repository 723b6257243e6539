"""The choice of an API of `deep_ep` and refusals at start; finding the package, and setting its buffer up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher
from rollout.layers.moe.dispatchers.deep_ep_library import (
    NEEDS,
    DeepEpApi,
    DeepEpShape,
    _BufferComm,
    choose_api,
    load_deep_ep,
    require_deep_ep,
)
from tests.deepep_stand_in import stand_in
from tests.nccl_stand_in import stand_in_transport
from tests.ranks import run_ranks

pytestmark = pytest.mark.full

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
    ("library", "changes", "rdma", "api", "because"),
    [
        (RELEASE_1, {}, True, DeepEpApi.NORMAL_AND_LOW_LATENCY, []),
        (RELEASE_1, {}, False, DeepEpApi.NORMAL, ["RDMA"]),
        (RELEASE_1, {"hidden_size": 1024}, True, DeepEpApi.NORMAL, ["hidden size of 1024"]),
        (RELEASE_1, {"top_k": 12}, True, DeepEpApi.NORMAL, ["11 experts"]),
        (RELEASE_1, {"max_low_latency_tokens": 600}, True, DeepEpApi.NORMAL, ["511 tokens a rank, not 600"]),
        (RELEASE_1, {"mode": "normal"}, True, DeepEpApi.NORMAL, []),
        (RELEASE_1, {"mode": "low_latency", "max_tokens_per_rank": 64}, True, DeepEpApi.LOW_LATENCY, []),
        (NORMAL_ONLY, {}, True, DeepEpApi.NORMAL, ["no low-latency"]),
    ],
)
def test_the_best_modes_that_fit_are_used(
    library: Any, changes: dict[str, Any], rdma: bool, api: DeepEpApi, because: list[str]
) -> None:
    chosen, objections = choose_api(library, a_shape(**changes), has_rdma=rdma, has_elastic_group=rdma)
    assert chosen is api
    parts = ["no ElasticBuffer", *because]
    assert len(parts) == len(objections) and all(part in reason for part, reason in zip(parts, objections, strict=True))


@pytest.mark.parametrize("mode", ["auto", "normal", "low_latency"])
def test_elastic_buffers_come_first(mode: str) -> None:
    shape = a_shape(mode=mode)
    chosen, objections = choose_api(RELEASE_2, shape, has_rdma=False, has_elastic_group=True)
    assert (chosen, objections) == (DeepEpApi.ELASTIC, [])
    assert choose_api(ELASTIC_ONLY, shape, has_rdma=True, has_elastic_group=True)[0] is DeepEpApi.ELASTIC


def test_without_an_nccl_group_the_older_buffer_is_used() -> None:
    chosen, objections = choose_api(RELEASE_2, a_shape(), has_rdma=True, has_elastic_group=False)
    assert chosen is DeepEpApi.NORMAL_AND_LOW_LATENCY and "needs an NCCL group" in objections[0]
    chosen, objections = choose_api(RELEASE_2, a_shape(hidden_size=2064), has_rdma=True, has_elastic_group=True)
    assert chosen is DeepEpApi.NORMAL and "that 256 divides, not 2064" in objections[0]


@pytest.mark.parametrize(
    ("library", "changes", "message"),
    [
        (RELEASE_2, {"dtype": torch.float32}, "sends bfloat16, not float32"),
        (RELEASE_2, {"num_physical_experts": 130}, "4 ranks do not divide 130 physical experts"),
        (RELEASE_2, {"top_k": 33}, "at most 32 experts, not 33"),
        (RELEASE_1, {"num_ranks": 1}, "2, 4 or 8 ranks of a node, not 1"),
        (RELEASE_1, {"hidden_size": 8192}, "below 8184 that 16 divides, not 8192"),
        (RELEASE_1, {"num_physical_experts": 1024}, "at most 128 physical experts a rank, not 256"),
        (RELEASE_2, {"num_ranks": 3, "num_physical_experts": 9}, "2, 4 or 8 ranks of a node, not 3"),
        (ELASTIC_ONLY, {}, "this deep_ep has no Buffer"),
        (RELEASE_1, {"mode": "low_latency"}, "at most 511 tokens a rank, not 4096 (--chunked-prefill-size"),
        (NORMAL_ONLY, {"mode": "low_latency"}, "this deep_ep has no low-latency mode"),
    ],
)
def test_what_deep_ep_cannot_carry_is_one_line_at_start(library: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match="--moe-a2a-backend deepep cannot carry") as raised:
        choose_api(library, a_shape(**changes), has_rdma=True, has_elastic_group=False)
    assert message in str(raised.value) and "all_to_all" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("gin", "rdma"), [(None, False), ("1", False), (None, True)])
def test_ranks_without_rdma_need_another_way_into_the_network(
    gin: str | None, rdma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EP_DISABLE_GIN", raising=False)
    if gin is not None:
        monkeypatch.setenv("EP_DISABLE_GIN", gin)

    def work(parallel: Parallel) -> DeepEpApi:
        library = stand_in(parallel.tp, "2.1")
        return DeepEpDispatcher(library, parallel.tp, a_shape(num_ranks=2), has_rdma=rdma).api

    wanted = DeepEpApi.ELASTIC if gin or rdma else DeepEpApi.NORMAL
    assert run_ranks(ParallelLayout(tp_size=2), work, 20.0, stand_in_transport) == [wanted] * 2


def test_low_latency_places_are_a_multiple_of_four_and_not_more_than_needed() -> None:
    assert [a_shape(max_tokens_per_rank=n).low_latency_tokens for n in (1, 4, 30, 4096)] == [4, 4, 32, 128]
    fixed = [a_shape(max_tokens_per_rank=n, mode="low_latency").low_latency_tokens for n in (1, 30, 4096)]
    assert fixed == [4, 32, 4096]


def test_a_buffer_that_cannot_be_set_up_is_a_startup_error() -> None:
    class Broken:
        @staticmethod
        def get_dispatch_config(num_ranks: int) -> None:
            raise RuntimeError("no NVLink\nlong trace")

    def work(parallel: Parallel) -> None:
        with pytest.raises(StartupError, match="cannot set up Buffer, normal mode: no NVLink; all_to_all") as raised:
            DeepEpDispatcher(SimpleNamespace(Buffer=Broken), parallel.tp, a_shape(num_ranks=2), has_rdma=False)
        assert "\n" not in str(raised.value)

    run_ranks(ParallelLayout(tp_size=2), work, 20.0)


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
    assert not hasattr(stand_in(alone, "1.2"), "topk_idx_t")
    assert hasattr(stand_in(alone, "2.1"), "topk_idx_t")
