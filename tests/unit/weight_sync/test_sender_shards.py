"""The shares of ranks: boxes against `torch.chunk`, pieces and runs of the flat tensor against indices."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from weight_sync.boxes import flat_offset, size_of
from weight_sync.errors import WeightRequestError
from weight_sync.picks import box_among, picks_of, source_index
from weight_sync.sender.shards import _order_of_cuts, shard_box
from weight_sync.tensor_meta import Piece

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Draw a shape, and (dimension, number of chunks) of up to two mesh dimensions."""
    shape = draw(shapes)
    cuts = st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 5))
    return shape, draw(st.lists(cuts, max_size=2))


def flat_indices(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@given(cut_tensors())
def test_boxes_are_what_torch_chunk_gives_and_tile_the_tensor(
    cut: tuple[tuple[int, ...], list[tuple[int, int]]],
) -> None:
    shape, cuts = cut
    whole = flat_indices(shape)
    seen: list[int] = []
    for positions in product(*(range(parts) for _, parts in cuts)):
        expected: torch.Tensor | None = whole
        for (dim, parts), at in zip(cuts, positions):
            chunks = expected.chunk(parts, dim)
            expected = chunks[at] if at < len(chunks) else chunks[0].narrow(dim, 0, 0)
        box = shard_box(shape, [(dim, at, parts) for (dim, parts), at in zip(cuts, positions)])
        assert size_of(box) == tuple(expected.shape)
        held = whole[tuple(slice(*span) for span in box)]
        assert torch.equal(held, expected)
        seen += held.flatten().tolist()
    assert sorted(seen) == whole.flatten().tolist()


@given(st.data())
def test_splits_are_undone_in_the_order_in_which_they_were_made(data: st.DataObject) -> None:
    """Cut a dimension by mesh dimensions in any order: placements that state the parts before give the same boxes."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(sizes))))
    placements: list[Placement] = []
    for at in range(len(sizes)):
        parts = math.prod(sizes[before] for before in order[: order.index(at)] if before > at)
        placements.append(Shard(0) if parts == 1 else _StridedShard(0, split_factor=parts))
    cuts = _order_of_cuts("w", placements, sizes)
    rows = torch.arange(data.draw(st.integers(0, 30)))
    for coordinate in product(*map(range, sizes)):
        expected = rows
        for at in order:
            chunks = expected.chunk(sizes[at])
            expected = chunks[coordinate[at]] if coordinate[at] < len(chunks) else expected[:0]
        ((start, stop),) = shard_box((len(rows),), [(dim, coordinate[at], sizes[at]) for dim, at in cuts])
        assert torch.equal(rows[start:stop], expected)


def test_each_dimension_has_an_order_of_its_own() -> None:
    """The mesh is [dp, ep, tp]: experts are split by ep and then by dp, their rows by tp."""
    placements = [_StridedShard(0, split_factor=4), Shard(0), Shard(1)]
    assert _order_of_cuts("w", placements, [2, 4, 3]) == [(1, 2), (0, 1), (0, 0)]
    assert _order_of_cuts("w", [Replicate(), Shard(1), Replicate()], [2, 4, 3]) == [(1, 1)]


@pytest.mark.parametrize("placement", [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=4), Partial()])
def test_placements_that_name_no_order_are_refused(placement: Placement) -> None:
    with pytest.raises(WeightRequestError, match=r"^w: placement .* cannot be sent; redistribute to Shard or "):
        _order_of_cuts("w", [placement, Shard(0)], [2, 4])


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(tuple(sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))))) for n in shape)  # type: ignore[misc]


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    """Draw a piece by integers and slices of any step, with at least one element."""
    index: list[int | slice] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, size - 1))
        stop, step = draw(st.integers(start + 1, size)), draw(st.integers(1, 3))
        index.append(draw(st.sampled_from([start, slice(start, stop, step), slice(start, None, step), slice(None)])))
    return Piece("w", tuple(index))


@given(st.data())
def test_what_of_a_piece_lies_in_a_box_against_indices(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    whole = flat_indices(shape)
    held = data.draw(boxes(shape).filter(lambda box: all(a < b for a, b in box)))
    piece = data.draw(pieces(shape))
    picks = picks_of(piece, shape)
    local = whole[tuple(slice(*span) for span in held)]  # the part of the source that the holder has
    common = {*local.flatten().tolist()} & {*piece.of(whole).flatten().tolist()}
    box = box_among(picks, held)
    assert (box is not None) == bool(common)
    if box is None:
        return
    assert {*local[source_index(picks, box, held)].flatten().tolist()} == common
    sizes = tuple(len(picked) for picked in picks)
    assert torch.Size(sizes).numel() == piece.of(whole).numel()
    spans = tuple(slice(*span) for span in box)
    assert torch.equal(local[source_index(picks, box, held)], piece.of(whole).view(sizes)[spans])
    picked = flat_indices(sizes)[spans].flatten().tolist()
    offset = flat_offset(box, sizes)
    assert (offset is not None) == (picked == list(range(picked[0], picked[0] + len(picked))))
    assert offset in (None, picked[0])


def test_the_picks_of_a_piece() -> None:
    assert picks_of(Piece("up", (1, slice(1, None, 2))), (3, 4, 5)) == (range(1, 2), range(1, 4, 2), range(5))
    assert picks_of(Piece("s"), ()) == ()
    assert box_among((), ()) == ()
