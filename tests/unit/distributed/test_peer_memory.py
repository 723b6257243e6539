"""The sum over ranks in memory that all of them see: the interpreted kernel, in processes with shared host memory."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from rollout.core.args.server_args import ServerArgs
from rollout.distributed import communicator, peer_memory
from rollout.distributed.communicator import Communicator
from rollout.distributed.peer_memory import PeerMemory, RoomHandle, connect_peers
from rollout.engine.worker import _may_share_memory
from rollout.kernels.ops import plain_ops
from tests.interpreted import kernels, mutated

kernel = kernels("peer_sum")
RANKS = 3
SIZES = (5, 2500, 1024, 1, 3000, 2500, 1024, 7)  # elements of each call: one block, or up to three
_DEADLINE_S = 180
Changes = tuple[tuple[str, str], ...]
ZEROS = "    total = tl.zeros([BLOCK], tl.float32)\n"
SLOW: Changes = ((ZEROS, f"{ZEROS}    time.sleep(0.05)\n"), ("import torch\n", "import time\n\nimport torch\n"))


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(RANKS, get_context("spawn")) as processes:
        yield processes


def parts(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(size, generator=generator) * 10).to(dtype) for size in SIZES]


def _rank(rank: int, folder: Path, dtype: torch.dtype, changes: Changes, late: float) -> list[torch.Tensor]:
    """Return the sums that one rank gets.  The process ends after the deadline, as a wait for a lost rank does not."""
    signal.alarm(_DEADLINE_S)
    torch.set_num_threads(1)
    (own := folder / str(rank)).mkdir()
    module = mutated(kernel, own, *changes) if changes else kernel
    size = kernel.num_bytes(RANKS)
    rooms = [
        torch.from_file(str(folder / f"room{other}"), shared=True, size=size, dtype=torch.uint8)
        for other in range(RANKS)
    ]
    peers, sums = PeerMemory(rooms, rank, module.fits, module.peer_sum), []
    for part in parts(rank, dtype):
        time.sleep(late * (rank == 1))
        sums.append(peers.sum(part))
    signal.alarm(0)
    return sums


def summed(
    pool: ProcessPoolExecutor,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    changes: Changes = (),
    of_rank_1: Changes = (),
    late: float = 0.0,
) -> list[list[torch.Tensor]]:
    """Return the sums of each rank.  `changes`: to the kernel; rank 1 begins each of its sums `late` seconds."""
    for rank in range(RANKS):
        (folder / f"room{rank}").write_bytes(bytes(kernel.num_bytes(RANKS)))
    ranks = [
        pool.submit(_rank, rank, folder, dtype, (*changes, *(of_rank_1 if rank == 1 else ())), late)
        for rank in range(RANKS)
    ]
    return [rank.result(2 * _DEADLINE_S) for rank in ranks]


def expected(dtype: torch.dtype) -> list[torch.Tensor]:
    of_ranks = [parts(rank, dtype) for rank in range(RANKS)]
    return [plain_ops().sum_in_order(torch.stack(one)) for one in zip(*of_ranks)]


def agree(results: list[list[torch.Tensor]], dtype: torch.dtype = torch.float32) -> bool:
    return all(torch.equal(got, want) for one in results for got, want in zip(one, expected(dtype), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_all_ranks_get_the_sum_in_rank_order(pool: ProcessPoolExecutor, tmp_path: Path, dtype: torch.dtype) -> None:
    assert agree(summed(pool, tmp_path, dtype), dtype)


def test_a_rank_may_come_late_to_each_sum(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    assert agree(summed(pool, tmp_path, late=0.05))


def test_a_rank_may_read_late(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    assert agree(summed(pool, tmp_path, of_rank_1=SLOW))


def test_a_kernel_that_does_not_wait_is_found(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    assert not agree(summed(pool, tmp_path, changes=((" - use < 0:", " - use < -1000:"),), late=0.05))


def test_a_kernel_with_one_place_for_each_block_is_found(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    change = ("((use & 1) * BLOCKS + block)", "((use & 0) * BLOCKS + block)")
    assert not agree(summed(pool, tmp_path, changes=(change,), of_rank_1=SLOW))


def test_a_kernel_that_adds_in_another_order_is_found(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    change = ("part = (tl.load(rooms + rank) + place)", "part = (tl.load(rooms + (rank + RANK) % N) + place)")
    assert not agree(summed(pool, tmp_path, changes=(change,)))


def test_a_count_passes_its_largest_value() -> None:
    rooms = [torch.zeros(kernel.num_bytes(1), dtype=torch.uint8)]
    words = rooms[0].view(torch.int32)
    words[: 2 * kernel.MAX_BLOCKS] = 2**31 - 1
    peers = PeerMemory(rooms, 0, kernel.fits, kernel.peer_sum)
    for _ in range(3):
        assert torch.equal(peers.sum(torch.tensor([1.0, -0.0])), torch.tensor([1.0, -0.0]))


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((64, 4096), torch.bfloat16, True),
        ((64, 4097), torch.bfloat16, False),
        ((0, 8), torch.float32, True),
        ((8,), torch.float64, False),
        ((8,), torch.int32, False),
    ],
)
def test_size_and_dtype_decide(shape: tuple[int, ...], dtype: torch.dtype, taken: bool) -> None:
    assert kernel.fits(torch.zeros(shape, dtype=dtype)) == taken


def test_a_communicator_sums_small_tensors_of_the_device_by_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "is_on_device", lambda _: True)
    group = Communicator("tp", 0, 2, host=SimpleNamespace(), device=SimpleNamespace())  # type: ignore[arg-type]
    rooms = [torch.zeros(kernel.num_bytes(1), dtype=torch.uint8)]
    group.peers = PeerMemory(rooms, 0, kernel.fits, kernel.peer_sum)
    assert torch.equal(group.all_reduce(torch.ones(3)), torch.ones(3))
    assert group.counts["all_reduce"].calls == 1 and group.counts["all_reduce"].num_bytes == 12


def no_triton(_: str) -> SimpleNamespace:
    raise ModuleNotFoundError("No module named 'triton'")


def no_memory(_: str) -> SimpleNamespace:
    return SimpleNamespace(num_bytes=lambda ranks: 1 << 60)


@pytest.mark.parametrize(("found", "reason"), [(no_triton, "No module named 'triton'"), (no_memory, "alloc")])
def test_a_rank_without_a_room_tells_the_others_and_sums_by_nccl(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Callable[[str], SimpleNamespace],
    reason: str,
) -> None:
    told, votes = [], []

    class Group(SimpleNamespace):
        def gather_bytes(self, data: bytes) -> list[bytes]:
            told.append(msgspec.msgpack.decode(data, type=RoomHandle))
            return [data, msgspec.msgpack.encode(RoomHandle(handle=b"h", nbytes=8))]

        def all_agree(self, mine: bool) -> bool:
            votes.append(mine)
            return mine

    monkeypatch.setattr(peer_memory, "import_module", found)
    assert connect_peers(Group(name="tp", rank=0, size=2), torch.device("cpu")) is None  # type: ignore[arg-type]
    assert reason in told[0].error and votes == [False]
    said = capsys.readouterr().err
    assert "small sums go over NCCL" in said and reason in said


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({}, True),
        ({"disable_custom_all_reduce": True}, False),
        ({"disable_native_kernels": True}, False),
        ({"nnodes": 2}, False),
    ],
)
def test_settings_decide_whether_ranks_share_memory(settings: dict[str, Any], shared: bool) -> None:
    args = ServerArgs(model_path="m", tp_size=2, **settings)
    assert _may_share_memory(args, torch.device("cuda", 0)) == shared
    assert not _may_share_memory(args, torch.device("cpu"))
