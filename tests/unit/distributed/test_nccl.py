"""Tensors on devices: which transport they take, when the host must wait, and how a lost rank is noticed.

The transport is the real one, over a stand-in of torch's backend (`tests/nccl_stand_in.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator, RankLostError, share_sizes
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.nccl import NcclTransport, connect, nccl_transport
from rollout.distributed.parallel import MakeTransport, Parallel
from rollout.distributed.transport import Parcel
from tests.nccl_stand_in import Backend, Event, OnDevice, devices, memory_of, on_device, stand_in_transport
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    with devices():
        yield


def on_ranks(size: int, work: Any, timeout_s: float = 20.0, make: MakeTransport = stand_in_transport) -> list[Any]:
    return run_ranks(ParallelLayout(tp_size=size), work, timeout_s, make)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the value of the tensor after all work that its stream waits for."""
    return memory_of(tensor.clone())


def exercise(tp: Communicator, placed: Any) -> dict[str, torch.Tensor]:
    """Run every collective at least once on tensors that `placed` places, and return the results."""
    rank, size = tp.rank, tp.size
    random = torch.Generator().manual_seed(rank)
    rows = placed(torch.randn(5, 700, generator=random).bfloat16())
    long_rows = placed(torch.randn(70, 999, generator=random).bfloat16())
    counts = share_sizes(5, size)
    mine = placed(torch.full((counts[rank] * (rank % 2), 3), rank, dtype=torch.int16))
    uneven = [[(to + 2 * source) % 3 for to in range(size)] for source in range(size)]
    sent = placed(torch.arange(sum(uneven[rank]) * 2.0).view(-1, 2) + 100 * rank)
    peer_in, peer_out = (rank - 1) % size, (rank + 1) % size
    got, nothing = placed(torch.zeros(9)), placed(torch.zeros(0))
    tp.send_receive(
        [(placed(torch.full((9,), float(rank))), peer_out), (nothing, peer_out)], [(got, peer_in), (nothing, peer_in)]
    )
    float8 = placed(torch.arange(4.0).to(torch.float8_e4m3fn))
    ids = placed(torch.arange(15).view(5, 3) + 100 * rank)
    parts = tp.all_gather_parts([rows, ids], [5] * size)
    ragged = tp.all_gather_parts([rows[: rank % 2], ids[: rank % 2]], [peer % 2 for peer in range(size)])
    return {
        "parts, rows": parts[0],
        "parts, ids": parts[1],
        "ragged parts, rows": ragged[0],
        "ragged parts, ids": ragged[1],
        "sum": tp.all_reduce(rows),
        "long sum": tp.all_reduce(long_rows),
        "share": tp.reduce_scatter_rows(rows, counts),
        "gathered": tp.all_gather(rows),
        "float8": tp.all_gather(float8).view(torch.uint8),
        "ragged rows": tp.all_gather_rows(mine, [counts[peer] * (peer % 2) for peer in range(size)]),
        "no rows": tp.all_gather_rows(mine[:0], [0] * size),
        "even": tp.all_to_all(rows[:size].contiguous(), [1] * size, [1] * size),
        "uneven": tp.all_to_all(sent, uneven[rank], [row[rank] for row in uneven]),
        "none at all": tp.all_to_all(sent[:0], [0] * size, [0] * size),
        "root": tp.broadcast(placed(torch.full((3, 2), rank)), root=1),
        "flags": tp.broadcast(placed(torch.tensor([rank == 0, True]))),
        "peer": got,
    }


@pytest.mark.parametrize("size", [2, 4])
def test_devices_get_the_bits_that_hosts_get(size: int) -> None:
    def work(parallel: Parallel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        on_hosts = exercise(parallel.tp, lambda tensor: tensor)
        on_devices = exercise(parallel.tp, on_device)
        assert all(isinstance(tensor, OnDevice) for tensor in on_devices.values())
        return on_hosts, {name: plain(tensor) for name, tensor in on_devices.items()}

    for on_hosts, on_devices in on_ranks(size, work):
        for name, value in on_hosts.items():
            found = on_devices[name]
            assert found.dtype == value.dtype and torch.equal(found, value), name


def test_sums_on_devices_do_not_depend_on_what_else_is_summed() -> None:
    rows = torch.randn(4, 3000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        mine = on_device(rows[parallel.tp.rank])
        return plain(parallel.tp.all_reduce(mine)), plain(parallel.tp.all_reduce(mine[1500:1501]))

    results = on_ranks(4, work)
    for many, alone in results:
        assert torch.equal(many[1500:1501], alone) and torch.equal(many, results[0][0])


def test_integers_votes_and_bytes_stay_on_the_host() -> None:
    def work(parallel: Parallel) -> int:
        tp = parallel.tp
        assert tp.gather_ints([tp.rank]) == [[0], [1]] and tp.all_agree(True) and tp.any_of(tp.rank == 1)
        assert tp.gather_bytes(b"x" * tp.rank) == [b"", b"x"]
        assert tp.broadcast(torch.tensor([5 + tp.rank])).tolist() == [5]
        assert parallel.world.device is None and parallel.weight_io.device is None  # they exchange nothing else
        return tp.device.backend.num_calls

    assert on_ranks(2, work) == [0, 0]


def test_groups_of_the_same_ranks_share_a_connection_between_devices() -> None:
    def work(parallel: Parallel) -> tuple[bool, bool, bool]:
        assert parallel.tp.host is not parallel.attn_tp.host
        tp, attn_tp, attn_dp = (group.device for group in (parallel.tp, parallel.attn_tp, parallel.attn_dp))
        return tp is attn_tp, tp is attn_dp, attn_dp is None

    assert on_ranks(2, work) == [(True, False, True)] * 2
    layout = ParallelLayout(tp_size=4, dp_size=2, enable_dp_attention=True)
    assert run_ranks(layout, work, 20.0, stand_in_transport) == [(False, False, False)] * 4


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_the_host_waits_for_the_device_with_a_deadline() -> None:
    def work(parallel: Parallel) -> list[float]:
        tp = parallel.tp
        gathered = tp.all_gather(on_device(torch.full((2,), tp.rank + 1.0)))
        parallel.wait_for(Event(tp.device.backend.stream))
        return memory_of(gathered).flatten().tolist()

    assert on_ranks(2, work) == [[1, 1, 2, 2]] * 2


def test_a_rank_alone_waits_for_its_device_without_one() -> None:
    class Recorded:
        waits = 0

        def query(self) -> bool:
            raise AssertionError("asked in a loop")

        def synchronize(self) -> None:
            self.waits += 1

    event = Recorded()
    Parallel().wait_for(event)
    assert event.waits == 1


def test_a_rank_that_never_comes_is_lost_to_all_others() -> None:
    """Rank 2 stays away.  Rank 0 waits for the device, rank 1 at the next exchange between hosts; earlier calls
    notice no fault.
    """

    def work(parallel: Parallel) -> str:
        tp = parallel.tp
        if tp.rank == 2:
            time.sleep(2.0)
            return "away"
        gathered = tp.all_gather(on_device(torch.zeros(3)))
        assert not OnDevice.ordered()[-1].ended.is_set(), "the host has waited"
        if tp.rank == 0:
            with pytest.raises(RankLostError, match="the device did not finish within 1 s"):
                parallel.wait_for(Event(tp.device.backend.stream))
            with pytest.raises(RankLostError, match="all_gather after a failure"):
                tp.all_gather(on_device(torch.zeros(3)))
        with pytest.raises(RankLostError):
            tp.gather_ints([1])
        with pytest.raises(RankLostError, match="is lost"):
            parallel.require_whole()
        with pytest.raises(AssertionError, match="never comes to its end"):
            gathered.tolist()
        return "told"

    assert on_ranks(3, work, 1.0) == ["told", "told", "away"]


def test_a_group_that_failed_takes_no_further_call() -> None:
    def work(parallel: Parallel) -> None:
        tp = parallel.tp
        tp.device.backend.stream.error = RuntimeError("remote process exited")
        with pytest.raises(RankLostError, match="all_gather failed, a rank is lost: NCCL communicator was aborted"):
            tp.all_gather(on_device(torch.zeros(3)))
        with pytest.raises(RankLostError, match="all_gather after a failure"):  # of the host's, too
            tp.gather_ints([1])

    on_ranks(2, work)


def test_connecting_devices_has_a_deadline() -> None:
    class Hangs:
        def eager_connect_single_device(self, device: torch.device) -> None:
            threading.Event().wait(5)

    class Fails:
        def eager_connect_single_device(self, device: torch.device) -> None:
            raise RuntimeError("Duplicate GPU detected")

    with pytest.raises(StartupError, match=r"cuda:1: NCCL did not reach the devices of the other ranks within 0.2 s"):
        connect(Hangs(), torch.device("cuda:1"), 0.2)
    with pytest.raises(RuntimeError, match="Duplicate GPU"):
        connect(Fails(), torch.device("cuda:1"), 5.0)


def test_devices_that_cannot_be_reached_are_one_line_at_start() -> None:
    def fails(store: dist.Store, rank: int, size: int, timeout_s: float) -> NcclTransport:
        raise RuntimeError("NCCL error: unhandled system error\nlong trace")

    with pytest.raises(StartupError, match="cannot reach the other ranks: NCCL error: unhandled system error") as found:
        on_ranks(2, lambda parallel: None, make=fails)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("mode", ["0", "2"])
def test_an_environment_in_which_ranks_go_on_without_others_is_refused(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", mode)
    with pytest.raises(StartupError, match="TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        nccl_transport(dist.HashStore(), 0, 2, 1.0, device=torch.device("cuda:0"))


# --- transports that forgot something ---------------------------------------------------------------------------------


class NeverWaits(NcclTransport):
    def _wait(self, work: Any, timeout_s: float) -> None:
        pass


class BlocksTheHost(NcclTransport):
    def _wait(self, work: Any, timeout_s: float) -> None:
        work.wait(timeout_s)


class SendsOneByOne(NcclTransport):
    def send_receive(self, sends: Sequence[Parcel], receives: Sequence[Parcel], timeout_s: float) -> None:
        for tensor, peer in sends:
            self.backend.send([tensor], peer, 0)


class ConnectsLater(NcclTransport):
    pass


def made(kind: type[NcclTransport]) -> MakeTransport:
    def make(store: dist.Store, rank: int, size: int, timeout_s: float) -> NcclTransport:
        backend = Backend(store, rank, size, timeout_s)
        if kind is not ConnectsLater:
            connect(backend, torch.device("cuda", rank), timeout_s)
        return kind(backend)

    return make


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [NeverWaits, BlocksTheHost, SendsOneByOne, ConnectsLater])
def test_a_wrong_transport_is_noticed(wrong: type[NcclTransport]) -> None:
    def work(parallel: Parallel) -> None:
        for name, value in exercise(parallel.tp, on_device).items():
            assert torch.equal(plain(value), exercise(parallel.tp, lambda tensor: tensor)[name])

    with pytest.raises((AssertionError, RankLostError)):
        on_ranks(2, work, 1.0, made(wrong))


@pytest.mark.mutant
def test_a_tensor_that_takes_the_wrong_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.distributed.communicator.is_on_device", lambda tensor: True)
    with pytest.raises(RankLostError, match="Tensors must be CUDA"):
        on_ranks(2, lambda parallel: parallel.tp.gather_ints([1]), 1.0)


@pytest.mark.mutant
def test_reading_without_a_wait_finds_garbage() -> None:
    def work(parallel: Parallel) -> None:
        gathered = parallel.tp.all_gather(on_device(torch.zeros(1000)))
        early = memory_of(gathered).clone()
        parallel.wait_for(Event(parallel.tp.device.backend.stream))
        assert torch.equal(early, memory_of(gathered))

    with pytest.raises(AssertionError):
        for _ in range(20):  # on both ranks the others' bytes may be there by then
            on_ranks(2, work)
