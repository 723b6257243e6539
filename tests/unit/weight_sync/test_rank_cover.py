"""The parts of tensors that ranks keep, and fingerprints that are put together from the parts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from weight_sync.content import TensorTable
from weight_sync.errors import (
    ContentError,
    CopiesDifferError,
    CoverageError,
    TransactionStateError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import fingerprint
from weight_sync.ledger import PlannedBoxes
from weight_sync.manifest import Stated
from weight_sync.rank_boxes import RankBoxes
from weight_sync.rank_cover import Kept, RankCover, RankShares
from weight_sync.rank_parts import Exchange, share_of
from weight_sync.receivers.distributed import RankShare
from weight_sync.spans import DTYPE_CODES
from weight_sync.tensor_meta import Part, Piece, Region, TensorMeta

T = TypeVar("T")
NORM, QKV, OUT, FIRST, SECOND = "norm", "qkv", "out", "experts.0", "experts.1"
SHAPES = {NORM: (4,), QKV: (12, 4), OUT: (4, 8), FIRST: (2, 4), SECOND: (2, 4)}
TENSORS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in SHAPES.items()}
METAS = {name: TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}
TABLE = TensorTable(METAS)
SECTIONS = (8, 2, 2)
"""Queries, keys and values in one matrix: each rank keeps half of each."""
KEPT: list[dict[str, Kept]] = [
    {NORM: None, QKV: Region(0, 0, 6, SECTIONS), OUT: Region(1, 0, 4), FIRST: None, SECOND: "nothing"},
    {NORM: None, QKV: Region(0, 6, 6, SECTIONS), OUT: Region(1, 4, 4), FIRST: "nothing", SECOND: None},
]


def on_ranks(work: Callable[[int, Exchange], T], count: int = 2) -> list[T]:
    """Run `work(rank, exchange)` on ranks that exchange among themselves; return the results by rank."""
    barrier, slots = threading.Barrier(count, timeout=20), [b""] * count

    def one(rank: int) -> T:
        def exchange(mine: bytes) -> list[bytes]:
            slots[rank] = mine
            barrier.wait()
            found = list(slots)
            barrier.wait()
            return found

        return work(rank, exchange)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def gathered(kept: Sequence[dict[str, Kept]] = KEPT) -> list[RankCover]:
    return on_ranks(lambda rank, exchange: RankCover.gather(TABLE, kept[rank].values(), rank, exchange), len(kept))


@pytest.fixture(scope="module")
def covers() -> list[RankCover]:
    return gathered()


def shares_of(
    rank: int, tensors: dict[str, torch.Tensor] = TENSORS, names: Sequence[str] = tuple(SHAPES)
) -> RankShares:
    """Return what rank `rank` finds when it is sent what it keeps of some tensors."""
    rows: list[tuple[Any, ...]] = []
    for name in names:
        region = KEPT[rank][name]
        if region != "nothing":
            part = Part(region, tensors[name] if region is None else region.of(tensors[name]))
            share = share_of(METAS[name], part)
            rows.append((TABLE.number_of[name], region is None, DTYPE_CODES[torch.float32], share, share))
    kinds = (np.int64, np.bool_, np.uint8, np.uint64, np.uint64)
    return RankShares(*(np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)))


def joined(covers: list[RankCover], shares: Sequence[RankShares]) -> list[RankShares]:
    return on_ranks(lambda rank, exchange: covers[rank].join(shares[rank], TABLE, exchange))


def test_ranks_know_what_all_of_them_keep(covers: list[RankCover]) -> None:
    for rank, cover in enumerate(covers):
        assert cover.num_ranks == 2
        assert cover.kept.tolist() == [part != "nothing" for part in KEPT[rank].values()]
        for number, name in enumerate(SHAPES):
            parts = cover.parts_under(int(cover.patterns[number]))
            assert parts == [kept[name] or "all" for kept in KEPT]


def test_shares_of_all_ranks_are_the_fingerprints(covers: list[RankCover]) -> None:
    for found in joined(covers, [shares_of(0), shares_of(1)]):
        assert found.numbers.tolist() == list(range(len(SHAPES)))
        expected = [fingerprint(tensor) for tensor in TENSORS.values()]
        assert found.sent.tolist() == found.held.tolist() == expected


def test_a_share_that_is_off_is_not_the_stated_fingerprint(covers: list[RankCover]) -> None:
    stated = Stated(TABLE)
    numbers = np.arange(len(TABLE))
    stated.put_all(numbers, np.array([fingerprint(tensor) for tensor in TENSORS.values()], np.uint64))
    stated.require(numbers, joined(covers, [shares_of(0), shares_of(1)])[0].sent)
    wrong = shares_of(1)
    wrong.sent[wrong.numbers == TABLE.number_of[OUT]] += np.uint64(1)
    for found in joined(covers, [shares_of(0), wrong]):
        with pytest.raises(ContentError, match=OUT):
            stated.require(found.numbers, found.sent)


def test_a_neighbours_content_is_not_the_stated_fingerprint(covers: list[RankCover]) -> None:
    """Rank 1 is sent rank 0's columns as its own."""
    swapped = TENSORS | {OUT: TENSORS[OUT].roll(4, 1)}
    for found in joined(covers, [shares_of(0), shares_of(1, swapped)]):
        at = TABLE.number_of[OUT]
        assert found.sent[at] != fingerprint(TENSORS[OUT])


def test_copies_must_be_equal(covers: list[RankCover]) -> None:
    other = TENSORS | {NORM: TENSORS[NORM] + 1}
    with pytest.raises(CopiesDifferError, match="norm: two ranks were sent different content"):
        joined(covers, [shares_of(0), shares_of(1, other)])


def test_copies_of_a_region_must_be_equal() -> None:
    """Four ranks, of which two keep the same half."""
    covers = gathered([*KEPT, *KEPT])
    shares = [shares_of(0), shares_of(1), shares_of(0), shares_of(1)]
    work = lambda rank, exchange: covers[rank].join(shares[rank], TABLE, exchange)  # noqa: E731
    for found in on_ranks(work, 4):
        assert found.sent.tolist() == [fingerprint(tensor) for tensor in TENSORS.values()]
    shares[3] = shares_of(1, TENSORS | {QKV: TENSORS[QKV] * 2})
    with pytest.raises(CopiesDifferError, match="qkv: ranks 1 and 3"):
        on_ranks(work, 4)


def test_regions_must_come_in_one_dtype(covers: list[RankCover]) -> None:
    other = shares_of(1)
    other.codes[other.numbers == TABLE.number_of[OUT]] = DTYPE_CODES[torch.bfloat16]
    with pytest.raises(CopiesDifferError, match="out: two ranks were sent it in different dtypes"):
        joined(covers, [shares_of(0), other])


def test_a_tensor_must_come_on_all_ranks_that_keep_it(covers: list[RankCover]) -> None:
    for name in (NORM, OUT):
        rest = [each for each in SHAPES if each != name]
        with pytest.raises(CoverageError, match=f"{name}.*|not on all"):
            joined(covers, [shares_of(0), shares_of(1, names=rest)])
    some = [each for each in SHAPES if each != OUT]
    for found in joined(covers, [shares_of(0, names=some), shares_of(1, names=some)]):
        assert TABLE.number_of[OUT] not in found.numbers


def test_a_part_does_not_come_beside_the_whole(covers: list[RankCover]) -> None:
    whole = shares_of(0)._replace(is_whole=np.ones(4, np.bool_))
    with pytest.raises(CoverageError, match="one rank was sent all of it, and another a part"):
        joined(covers, [whole, shares_of(1)])


def test_a_rank_that_cannot_verify_ends_it_for_all(covers: list[RankCover]) -> None:
    with pytest.raises(TransactionStateError, match="another rank could not verify"):
        covers[0].join(shares_of(0), TABLE, lambda mine: [mine, b"no"])


@pytest.mark.parametrize("kept", ["nothing", Region(1, 5, 3)])
def test_what_no_rank_keeps_is_an_error(kept: Kept) -> None:
    with pytest.raises(WeightSyncError, match=OUT):
        gathered([KEPT[0], KEPT[1] | {OUT: kept}])


def test_what_one_rank_takes_whole_goes_whole_to_all_that_keep_it() -> None:
    cover = gathered([KEPT[0] | {OUT: None}, KEPT[1]])[1]
    assert cover.parts_under(int(cover.patterns[TABLE.number_of[OUT]])) == ["all", "all"]


# --- boxes ----------------------------------------------------------------------------------------------------------


class Names:
    """`LogicalWeights` as far as names are resolved: `fused` is split, `alias` is another name of the norm."""

    def metas(self) -> dict[str, TensorMeta]:
        return METAS

    def split(self, wire: TensorMeta) -> list[Piece]:
        if wire.name == "fused":
            return [Piece(FIRST, (0,)), Piece(SECOND, (1,))]
        return [Piece(NORM if wire.name == "alias" else wire.name)]


def boxes_of(cover: RankCover, *metas: TensorMeta) -> list[Any]:
    found = RankBoxes.of(cover, Names(), TABLE, metas)  # type: ignore[arg-type]
    assert RankBoxes.parsed(json.loads(json.dumps(vars(found))), len(metas)) == found
    return [found.patterns[number] for number in found.tensors]


def test_an_engine_states_the_boxes_of_each_rank(covers: list[RankCover]) -> None:
    for cover in covers:
        assert boxes_of(cover, *METAS.values()) == [
            [None, None],
            [
                [[[0, 4], [0, 4]], [[8, 9], [0, 4]], [[10, 11], [0, 4]]],
                [[[4, 8], [0, 4]], [[9, 10], [0, 4]], [[11, 12], [0, 4]]],
            ],
            [[[[0, 4], [0, 4]]], [[[0, 4], [4, 8]]]],
            [None, []],
            [[], None],
        ]


def test_tensors_that_are_split_or_come_twice_go_whole_to_all(covers: list[RankCover]) -> None:
    fused = TensorMeta("fused", torch.float32, (2, 2, 4))
    assert boxes_of(covers[0], fused, METAS[FIRST], METAS[QKV])[:2] == [[None, None], [None, None]]
    alias = METAS[NORM]._replace(name="alias")
    assert boxes_of(covers[0], alias, METAS[NORM]) == [[None, None], [None, None]]


def planned(name: str, box: tuple[tuple[int, int], ...]) -> PlannedBoxes:
    (rows, columns), meta = box, METAS[name]
    at = np.array([TABLE.number_of[name]])
    edges, numels = np.array([[*rows, *columns]]), np.array([meta.numel])
    return PlannedBoxes(at, [name], [name], [box], [meta.shape], edges, numels, np.zeros(1, np.int64))


def test_a_rank_takes_boxes_of_what_it_keeps_alone(covers: list[RankCover]) -> None:
    for rank, cover in enumerate(covers):
        mine, other = (((0, 4), (start, start + 4)) for start in (4 * rank, 4 - 4 * rank))
        assert cover.kept_boxes(planned(OUT, mine)).numels.tolist() == [16]
        with pytest.raises(CoverageError, match=f"rank {rank} was sent .* of out, which it does not keep"):
            cover.kept_boxes(planned(OUT, other))
        for name, box in ((OUT, ((0, 4), (3, 5))), (FIRST, ((0, 1), (0, 4))), (QKV, ((3, 5), (0, 4)))):
            with pytest.raises(CoverageError, match="which it does not keep"):
                cover.kept_boxes(planned(name, box))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"patterns": [[None]], "tensors": [0, 0]},
        {"patterns": [[None]], "tensors": [1]},
        {"patterns": [[None]], "tensors": [-1]},
        {"patterns": [[None]], "tensors": [[0]]},
        {"patterns": [[None], [None, None]], "tensors": [0]},
        {"patterns": [0], "tensors": [0]},
        {"patterns": [[7]], "tensors": [0]},
    ],
)
def test_an_answer_that_states_no_parts_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(WeightRequestError, match="does not state which parts"):
        RankBoxes.parsed(answer, 1)


@pytest.mark.parametrize("box", [[[0, 5]], [[0, 4], [0, 4]], [[2, 2]], "all", [["0", "4"]]])
def test_a_stated_box_must_lie_in_its_tensor(box: Any) -> None:
    with pytest.raises(WeightRequestError, match="box"):
        list(RankBoxes.parsed({"patterns": [[[box]]], "tensors": [0]}, 1).parsed_tensors([METAS[NORM]]))


def test_counts_of_a_call_must_fit_its_tensors_and_ranks() -> None:
    metas = list(METAS.values())
    assert RankShare(1, 2, (2, 3)).of(metas) == metas[2:]
    assert RankShare(0, 2, (0, 5)).of(metas) == []
    for counts in ((5,), (2, 2), (2, 3, 0)):
        with pytest.raises(WeightRequestError, match=r"tensors_per_rank has .* counts"):
            RankShare(0, 2, counts).of(metas)
