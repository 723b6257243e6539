"""Which rank holds what: boxes against `torch.chunk`, and runs of the flat tensor against its indices."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.sender.plan import Part
from weight_sync.sender.shards import box_of_part, flat_offset, index_in, intersection, shard_box, size_of
from weight_sync.tensor_meta import TensorMeta

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """A shape, and (dimension, number of chunks) of up to two mesh dimensions."""
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


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(tuple(sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))))) for n in shape)  # type: ignore[misc]


@given(st.data())
def test_runs_and_intersections_against_indices(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    whole = flat_indices(shape)
    outer = data.draw(boxes(shape).filter(lambda box: all(a < b for a, b in box)))
    inner = data.draw(boxes(shape).filter(lambda box: all(a < b for a, b in box)))
    met = intersection(outer, inner)
    common = {*whole[tuple(slice(*s) for s in outer)].flatten().tolist()} & {
        *whole[tuple(slice(*s) for s in inner)].flatten().tolist()
    }
    assert (met is not None) == bool(common)
    if met is None:
        return
    assert {*whole[tuple(slice(*s) for s in met)].flatten().tolist()} == common
    local = flat_indices(size_of(outer))  # flat indices inside a tensor that holds `outer`
    picked = local[index_in(met, outer)].flatten().tolist()
    is_run = picked == list(range(picked[0], picked[0] + len(picked)))
    offset = flat_offset(met, outer)
    assert (offset is not None) == is_run
    if offset is not None:
        assert offset == picked[0]


def test_box_of_a_part() -> None:
    part = Part(TensorMeta("up", torch.float32, (2, 5)), "gate_up", (1, slice(2, 4)))
    assert box_of_part(part, (3, 4, 5)) == ((1, 2), (2, 4), (0, 5))
    whole = Part(TensorMeta("w", torch.float32, (3, 4)), "w")
    assert box_of_part(whole, (3, 4)) == ((0, 3), (0, 4))
    assert box_of_part(Part(TensorMeta("s", torch.float32, ()), "s"), ()) == ()
