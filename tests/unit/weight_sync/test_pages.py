"""Areas and trades of pages, and a refresh whose storages change places with their shadows page by page.

Sizes are a few pages beyond what is worth a trade; edges lie inside pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout.kernels.places import ViewPlace
from weight_sync import pages
from weight_sync.errors import CommitError, StagingError
from weight_sync.pages import HUGE_PAGE, PageTrader, new_area, tradable_spans
from weight_sync.shadow import ShadowStaging
from weight_sync.tensor_meta import Piece, TensorMeta
from weight_sync.transaction import WeightTransaction

PAGE = mmap.PAGESIZE
MIN = 16 * PAGE
ROWS, COLUMNS = 300, 1024  # bfloat16: 150 pages


def area(num_bytes: int, value: int, at: int = 0) -> torch.Tensor:
    return new_area(num_bytes, at).fill_(value)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


# --- areas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 64, 4096 + 16, HUGE_PAGE - 64])
@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, 5 * PAGE + 3, 2 * HUGE_PAGE + 100])
def test_an_area_has_its_size_and_place(num_bytes: int, at: int) -> None:
    found = new_area(num_bytes, at)
    assert found.shape == (num_bytes,) and found.dtype == torch.uint8
    if num_bytes >= PAGE:
        assert (found.data_ptr() - at) % HUGE_PAGE == 0
        assert not found.any()
    found.fill_(7)
    assert bool((found == 7).all())


def test_an_area_takes_what_it_holds_and_goes_back() -> None:
    """An area has no huge page around it, and nothing is left of it after its last view."""
    num_bytes, before = 33 * HUGE_PAGE // 2 + 5 * PAGE, resident()
    found = area(num_bytes, 1, at=HUGE_PAGE - PAGE)
    view = found[100:200]
    assert 0 <= resident() - before - num_bytes < 4 * HUGE_PAGE // 2
    del found
    assert resident() - before >= num_bytes
    del view
    assert resident() - before < HUGE_PAGE


# --- trades ----------------------------------------------------------------------------------------------------------


def test_a_trade_moves_content_and_no_address() -> None:
    one, other = area(MIN, 1), area(MIN, 2)
    addresses = one.data_ptr(), other.data_ptr()
    trader = PageTrader(MIN)
    for turn in range(3):
        trader.trade(one, other)
        assert bool((one == (2, 1)[turn % 2]).all() and (other == (1, 2)[turn % 2]).all())
    assert addresses == (one.data_ptr(), other.data_ptr()) and trader.lost is None
    trader.close()


def failing_moves(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    """Let the n-th move of the process from now on fail if `fails(n)`."""
    move, count = pages._move, 0

    def wrong(source: int, target: int, num_bytes: int) -> None:
        nonlocal count
        count += 1
        if fails(count):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        move(source, target, num_bytes)

    monkeypatch.setattr(pages, "_move", wrong)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_move_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    one, other = area(MIN, 1), area(MIN, 2)
    trader = PageTrader(MIN)
    failing_moves(monkeypatch, lambda count: count == failing)
    with pytest.raises(StagingError, match=r"could not be moved: .*Cannot allocate"):
        trader.trade(one, other)
    assert bool((one == 1).all() and (other == 2).all()) and trader.lost is None
    trader.trade(one, other)
    assert bool((one == 2).all() and (other == 1).all())


@pytest.mark.parametrize("failing", [2, 3])
def test_content_that_cannot_be_moved_back_is_lost(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    one, other = area(MIN, 1), area(MIN, 2)
    trader = PageTrader(MIN)
    failing_moves(monkeypatch, lambda count: count >= failing)
    with pytest.raises(StagingError, match="nor moved back"):
        trader.trade(one, other)
    assert trader.lost is not None


# --- what can be traded ----------------------------------------------------------------------------------------------


def test_whole_pages_inside_both_can_be_traded() -> None:
    whole = area(30 * PAGE, 1)
    live = whole[100 + 4 : 100 + 4 + 25 * PAGE]
    aside = new_area(live.numel(), at=live.data_ptr())
    ((span,),) = tradable_spans([(live, aside)])
    first = -live.data_ptr() % PAGE
    assert span == range(first, first + 24 * PAGE)


def test_mappings_are_traded_one_by_one() -> None:
    """A move cannot cross from one mapping to the next, and live memory has three mappings here."""
    num_bytes = 3 * MIN
    live = area(num_bytes, 1)
    assert pages._libc().madvise(live.data_ptr() + MIN, MIN, mmap.MADV_DONTDUMP) == 0
    aside = area(num_bytes, 2, at=live.data_ptr())
    (spans,) = tradable_spans([(live, aside)])
    assert spans == [range(MIN), range(MIN, 2 * MIN), range(2 * MIN, 3 * MIN)]
    trader = PageTrader(MIN)
    for span in spans:
        trader.trade(live[span.start : span.stop], aside[span.start : span.stop])
    assert bool((live == 2).all() and (aside == 1).all())


def shared_memory(num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def file_memory(num_bytes: int, folder: Path) -> torch.Tensor:
    path = folder / "file"
    path.write_bytes(bytes(num_bytes))
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["shared", "file", "small", "other offset", "several nodes", "no moves"])
def test_what_cannot_be_traded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 2 * MIN
    live = area(num_bytes, 1)
    if kind == "shared":
        live = shared_memory(num_bytes)
    elif kind == "file":
        live = file_memory(num_bytes, tmp_path)
    elif kind == "small":
        live = live[: MIN - 1]
    elif kind == "several nodes":
        monkeypatch.setattr(pages, "_num_memory_nodes", lambda: 2)
    elif kind == "no moves":
        monkeypatch.setattr(pages, "_pages_move", pages._pages_move.__wrapped__)  # as if it were asked first
        failing_moves(monkeypatch, lambda count: True)
    aside = new_area(live.numel(), at=live.data_ptr() + (64 if kind == "other offset" else 0))
    assert tradable_spans([(live, aside)]) == [[]]


def test_only_private_anonymous_memory_can_be_moved() -> None:
    lines = [
        "00001000-00003000 rw-p 00000000 00:00 0 ",
        "00003000-00004000 r--p 00000000 00:00 0 ",
        "00004000-00005000 rw-s 00000000 00:01 71    /dev/zero (deleted)",
        "00005000-00006000 rw-p 00002000 08:01 1234  /tmp/a rw-p 0 0 0 name",
        "00006000-00007000 rw-p 00000000 00:00 0     [heap]",
        "7f00006000-7f00008000 rw-p 00000000 00:00 0     [anon:with a name]",
        "7fff00006000-7fff00008000 rw-p 00000000 00:00 0     [stack]",
    ]
    assert [found for line in lines if (found := pages._movable_mapping(line.encode())) is not None] == [
        range(0x1000, 0x3000),
        range(0x6000, 0x7000),
        range(0x7F00006000, 0x7F00008000),
    ]


def test_memory_of_the_heap_is_traded_and_the_heap_goes_on() -> None:
    """Half of a model may lie there.  In a process of its own: in one that ran long the heap may not grow any more."""
    command = f"import runpy; runpy.run_path({__file__!r})['check_heap']()"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


def check_heap() -> None:
    """Trade blocks of the heap.  The allocator's own bytes stay where they are, and the heap grows and shrinks."""
    libc, num_bytes = heap_functions(), MIN + 8 * PAGE
    blocks = [libc.malloc(num_bytes) for _ in range(64)]
    first, end = heap_of(pages.Path("/proc/self/maps").read_text())
    within = [block for block in blocks if first <= block and block + num_bytes <= end]
    assert within, "blocks of this size lie in the heap"
    held = [torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(block), dtype=torch.uint8) for block in within]
    shadows = [new_area(num_bytes, at=block) for block in within]
    for number, (live, shadow) in enumerate(zip(held, shadows, strict=True)):
        live.fill_(number)
        shadow.fill_(128 + number)
    spans = tradable_spans(list(zip(held, shadows, strict=True)))
    assert all(sum(map(len, each)) >= MIN for each in spans)
    trader = PageTrader(num_bytes)
    for number, (live, shadow, each) in enumerate(zip(held, shadows, spans, strict=True)):
        for at in each:
            trader.trade(live[at.start : at.stop], shadow[at.start : at.stop])
            assert bool((live[at.start : at.stop] == 128 + number).all())
            assert bool((shadow[at.start : at.stop] == number).all())
            rest = torch.cat([live[: at.start], live[at.stop :]])
            assert bool((rest == number).all())
    for block in blocks[::2]:
        libc.free(block)
    again = [libc.malloc(num_bytes) for _ in range(256)]
    for block in (*blocks[1::2], *again):
        ctypes.memset(block, 7, num_bytes)
        libc.free(block)
    libc.malloc_trim(0)
    last = libc.malloc(num_bytes)
    ctypes.memset(last, 9, num_bytes)
    libc.free(last)


def heap_functions() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_size_t]
    return libc


def heap_of(maps: str) -> tuple[int, int]:
    """Return where the heap begins and ends; nowhere if there is none."""
    lines = [line.split()[0].split("-") for line in maps.splitlines() if line.endswith("[heap]")]
    return (int(lines[0][0], 16), int(lines[-1][1], 16)) if lines else (1, 0)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 9])
def test_of_many_spans_the_longest_are_traded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trade takes mappings.  A commit without any left could not be undone."""
    monkeypatch.setattr(pages, "_max_spans", lambda _: most)
    sizes = [MIN, 3 * MIN, MIN, 2 * MIN]
    pairs = [(live, new_area(live.numel(), at=live.data_ptr())) for live in (area(size, 1) for size in sizes)]
    found = tradable_spans(pairs)
    traded = [number for number, spans in enumerate(found) if spans]
    assert traded == sorted([1, 3, 0, 2][:most])
    assert all(spans in ([], [range(size)]) for spans, size in zip(found, sizes, strict=True))


def test_trades_take_a_quarter_of_all_mappings_at_most() -> None:
    """A span that lies inside a mapping on both sides, and in the scratch, makes the most."""
    count, size = 20, MIN + 2 * PAGE
    lives, shadows = area(2 * count * size, 1), area(2 * count * size, 2)
    trader, before = PageTrader(MIN), num_mappings()
    for number in range(count):
        span = slice(2 * number * size + PAGE, 2 * number * size + PAGE + MIN)
        trader.trade(lives[span], shadows[span])
    trader.close()
    assert num_mappings() - before <= 4 * count + 2
    most = pages._mappings_limit()
    assert 4 * pages._max_spans(0) <= most // 4
    for taken in (most // 2, most - 100, most - 7, most, most + 5):
        assert 0 <= 4 * pages._max_spans(taken) <= max(0, most - taken) // 2


def test_there_is_one_memory_node_or_more() -> None:
    assert pages._num_memory_nodes() >= 1


# --- a refresh -------------------------------------------------------------------------------------------------------


class Matrices:
    """`LogicalWeights` of a matrix at an odd place in its pages, one whose pages are two mappings, and a small one."""

    def __init__(self, value: float) -> None:
        self._room = new_area(2 * ROWS * COLUMNS + 3 * PAGE).view(torch.bfloat16)
        start = 40
        mapped = new_area(2 * ROWS * COLUMNS)
        assert pages._libc().madvise(mapped.data_ptr(), MIN, mmap.MADV_DONTDUMP) == 0
        self.tensors = {
            "odd": self._room[start : start + ROWS * COLUMNS].view(ROWS, COLUMNS),
            "mapped": mapped.view(torch.bfloat16).view(ROWS, COLUMNS),
            "small": torch.empty(3, dtype=torch.bfloat16),
        }
        self.derived_fault: Callable[[], None] = lambda: None
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def metas(self) -> dict[str, TensorMeta]:
        return {name: TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}

    def split(self, wire: TensorMeta) -> list[Piece]:
        return [Piece(wire.name)]

    def nearest(self, name: str) -> str | None:
        return None

    def places(self, name: str) -> list[ViewPlace]:
        return [ViewPlace(self.tensors[name])]

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def recompute_derived(self) -> None:
        self.derived_fault()

    @property
    def bytes(self) -> list[bytes]:
        """Every byte, also around the tensors."""
        all_tensors = (self._room, *self.tensors.values())
        return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in all_tensors]


def content(value: float) -> dict[str, torch.Tensor]:
    sizes = {"odd": (ROWS, COLUMNS), "mapped": (ROWS, COLUMNS), "small": (3,)}
    return {name: torch.full(size, value, dtype=torch.bfloat16) for name, size in sizes.items()}


def verified(weights: Matrices, value: float) -> tuple[WeightTransaction, ShadowStaging]:
    staging = ShadowStaging(weights)  # type: ignore[arg-type]
    transaction = WeightTransaction(weights, staging=staging)  # type: ignore[arg-type]
    transaction.receive(content(value).items())
    transaction.verify()
    return transaction, staging


def test_refreshes_trade_pages_and_leave_addresses() -> None:
    weights, expected = Matrices(1), Matrices(2)
    addresses = [tensor.data_ptr() for tensor in weights.tensors.values()]
    transaction, staging = verified(weights, 2)
    traded = sum(len(live) for shadow in staging._shadows.values() for live, _ in shadow.traded)
    assert traded > 0.9 * 2 * ROWS * COLUMNS
    assert weights.bytes == Matrices(1).bytes
    for name, tensor in content(2).items():
        assert torch.equal(transaction.read_staged(name)[0].content, tensor)  # type: ignore[index]
    transaction.commit(lambda mine: mine)
    assert weights.bytes == expected.bytes
    assert addresses == [tensor.data_ptr() for tensor in weights.tensors.values()]


@pytest.mark.parametrize("leak", [None, pytest.param(MIN, marks=pytest.mark.mutant)])
def test_refreshes_leave_no_memory_and_no_mappings_behind(leak: int | None) -> None:
    """The least of some looks counts, as the allocator keeps what is free for a while."""
    weights, left, mappings, memory = Matrices(1), list[torch.Tensor](), list[int](), list[int]()
    for turn in range(50):
        transaction, _ = verified(weights, turn)
        transaction.commit(lambda mine: mine)
        left += [] if leak is None else [area(leak, turn)]
        del transaction
        ctypes.CDLL(None).malloc_trim(0)
        mappings.append(num_mappings())
        memory.append(resident())
    more_mappings, more_bytes = (min(counts[-10:]) - min(counts[2:12]) for counts in (mappings, memory))
    assert (more_mappings < 20 and more_bytes < 20 * MIN) == (leak is None), (more_mappings, more_bytes)


@pytest.mark.parametrize("fault", ["vote", "derived"])
def test_a_commit_that_fails_after_the_trades_gives_every_byte_back(fault: str) -> None:
    weights, before = Matrices(1), Matrices(1).bytes
    transaction, _ = verified(weights, 2)
    if fault == "derived":
        weights.derived_fault = failing_once()
    with pytest.raises(CommitError) as caught:
        transaction.commit(lambda mine: mine and fault != "vote")
    assert caught.value.restored and weights.bytes == before and not transaction.dirty


def failing_once() -> Callable[[], None]:
    calls = iter([True])

    def fault() -> None:
        if next(calls, False):
            raise RuntimeError("no memory for what is derived")

    return fault


@pytest.mark.parametrize("failing", range(1, 10))
def test_a_move_that_fails_in_the_commit_restores_the_old_weights(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    weights, before = Matrices(1), Matrices(1).bytes
    transaction, _ = verified(weights, 2)
    failing_moves(monkeypatch, lambda count: count == failing)
    with pytest.raises(CommitError, match="could not be moved") as caught:
        transaction.commit(lambda mine: mine)
    assert caught.value.restored and weights.bytes == before


def test_a_move_that_cannot_be_taken_back_is_torn_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Matrices(1)
    transaction, _ = verified(weights, 2)
    failing_moves(monkeypatch, lambda count: count >= 2)
    with pytest.raises(CommitError) as caught:
        transaction.commit(lambda mine: mine)
    assert not caught.value.restored and transaction.torn is not None


def test_a_trade_that_cannot_be_undone_is_torn_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trade is made, the vote is lost, and then pages cannot move any more."""
    weights = Matrices(1)
    transaction, _ = verified(weights, 2)

    def vote(mine: bool) -> bool:
        failing_moves(monkeypatch, lambda count: True)
        return False

    with pytest.raises(CommitError) as caught:
        transaction.commit(vote)
    assert not caught.value.restored and transaction.torn is not None


def test_without_moves_a_refresh_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, expected = Matrices(1), Matrices(2)
    monkeypatch.setattr(pages, "_has_pages", lambda: False)
    transaction, staging = verified(weights, 2)
    assert not any(True for shadow in staging._shadows.values() for _ in shadow.traded)
    transaction.commit(lambda mine: mine)
    assert weights.bytes == expected.bytes


def test_a_partial_refresh_fills_in_what_was_not_sent() -> None:
    weights = Matrices(1)
    transaction = WeightTransaction(weights, coverage="partial", staging=ShadowStaging(weights))  # type: ignore[arg-type]
    transaction.receive([("odd", content(2)["odd"])])
    transaction.verify()
    transaction.commit(lambda mine: mine)
    assert bool((weights.tensors["odd"] == 2).all() and (weights.tensors["mapped"] == 1).all())
    assert weights._room[:40].count_nonzero() == 0


def test_the_scratch_addresses_go_back() -> None:
    before = num_mappings()
    trader = PageTrader(64 * HUGE_PAGE)
    trader.close()
    trader.close()
    assert abs(num_mappings() - before) <= 1
