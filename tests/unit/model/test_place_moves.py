"""`Place.moves`: a table of moves puts a tensor where `write` does, for every place of every family and layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from rollout.distributed.communicator import Communicator
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.distributed.transport import Transport
from rollout.kernels.held_places import W8Place
from rollout.kernels.ops import Ops, PackedHeld, compiled_ops, plain_ops
from rollout.kernels.places import (
    InnerPlace,
    PackedPlace,
    Place,
    ReorderedPlace,
    ShardPlace,
    ViewPlace,
)
from rollout.model.decoder import DecoderForCausalLM
from tests.family_zoo import FAMILIES, SEEING, family_config
from tests.kernels import native_ops
from tests.model_zoo import trivial_placement
from weight_sync.fingerprint import fingerprint
from weight_sync.fingerprint_words import signed
from weight_sync.int8_blocks import held_values
from weight_sync.moves import Move, MoveKind, lead_of, matrix_of, two_strides
from weight_sync.spans import DTYPE_CODES, INT8_BLOCKS_CODE, TENSOR_COLUMNS, SpanMove, SpanTensor
from weight_sync.take_spans import take_spans
from weight_sync.tensor_meta import Region

Tensors = dict[str, torch.Tensor]
LAYOUTS = {
    "1": ParallelLayout(),
    "2": ParallelLayout(tp_size=2),
    "2, EP": ParallelLayout(tp_size=2, ep_size=2),
    "2, DP": ParallelLayout(tp_size=2, dp_size=2, enable_dp_attention=True),
}
STORAGES = {
    "row-major": (plain_ops, torch.float32),
    "packed": (compiled_ops, torch.float32),
    "packed bfloat16": (compiled_ops, torch.bfloat16),
    "w8": (lambda: compiled_ops(PackedHeld("w8")), torch.bfloat16),
}
BLOCKS_ARE_CUT = {("2", "w8"), ("2, DP", "w8")}  # the engine refuses to split blocks of 32 over ranks
CASES = [pair for pair in itertools.product(LAYOUTS, STORAGES) if pair not in BLOCKS_ARE_CUT]


def view_of(layout: ParallelLayout, rank: int) -> Parallel:
    """Return one rank's view of a layout whose ranks do not talk."""
    here = layout.position(rank)
    silent: Transport = object()  # type: ignore[assignment]

    def group(name: str, place: int, size: int) -> Communicator:
        return Communicator(name, place, size, silent if size > 1 else None)

    return Parallel(
        layout,
        here,
        tp=group("tp", here.tp_rank, layout.tp_size),
        attn_tp=group("attn_tp", here.attn_tp_rank, layout.attn_tp_size),
        attn_dp=group("attn_dp", here.attn_dp_rank, layout.attn_dp_size),
    )


def model_of(family: str, ops: Ops, dtype: torch.dtype, parallel: Parallel) -> DecoderForCausalLM:
    config = family_config(family)
    return DecoderForCausalLM(config, dtype, "cpu", trivial_placement(config, parallel), ops, parallel)


def storages_of(places: list[Place]) -> dict[int, torch.Tensor]:
    """Return the bytes of every storage behind the places, by its address."""
    found = {}
    for place in places:
        untyped = place.storage.untyped_storage()
        found[untyped.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(untyped)
    return found


def cast_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def take(sent: Tensors, places: dict[str, list[Place]], held: dict[str, torch.dtype]) -> dict[str, int]:
    """Take all tensors by one table; return their fingerprints as held.  Places that have no moves are left alone."""
    storages = storages_of([place for some in places.values() for place in some])
    index_of = {address: index for index, address in enumerate(storages)}
    source, tensors, moves, named = [], [], [], []
    for name, tensor in sent.items():
        lists = [place.moves(tensor.shape) for place in places[name]]
        if None in lists:
            continue
        leads = {lead_of(place.region.dim if place.region else None) for place in places[name]}
        assert len(leads) <= 1, "all places of a tensor read it as one matrix"
        rows, columns = matrix_of(tensor.shape, *leads)
        in_blocks = any(move.kind == MoveKind.PACKED_W8 for some in lists for move in some or ())
        codes = DTYPE_CODES[tensor.dtype], INT8_BLOCKS_CODE if in_blocks else DTYPE_CODES[held[name]]
        begin = sum(part.numel() for part in source)
        tensors.append(SpanTensor.whole(begin, *codes, rows, columns, columns, 1))
        source.append(tensor.reshape(-1).view(torch.uint8))
        for move in (move for some in lists for move in some or ()):
            key = index_of[move.storage.untyped_storage().data_ptr()]
            moves.append(SpanMove.of(move, len(named), key))
        named.append(name)
    tables = torch.tensor(tensors).view(-1, TENSOR_COLUMNS), torch.tensor(moves).view(-1, 11)
    values, infinite = take_spans(torch.cat(source), *tables, list(storages.values()))
    assert not infinite.any()
    return {name: int(value) for name, value in zip(named, values[:, 1], strict=True)}


def by_write_and_by_moves(sent: Tensors, places: dict[str, list[Place]], held: dict[str, torch.dtype]) -> set[str]:
    """Compare every byte of every storage after either way; return the names that have no moves."""
    storages = storages_of([place for some in places.values() for place in some])
    for storage in storages.values():
        storage.fill_(0x55)
    without = {name for name in sent if any(place.moves(sent[name].shape) is None for place in places[name])}
    for name in sent.keys() - without:
        for place in places[name]:
            place.write(sent[name])
    written = {address: storage.clone() for address, storage in storages.items()}
    for storage in storages.values():
        storage.fill_(0x55)
    fingerprints = take(sent, places, held)
    for address, storage in storages.items():
        assert torch.equal(storage, written[address])
    for name, value in fingerprints.items():
        values = sent[name].to(held[name])
        in_blocks = any(W8Place in kinds_of(place) for place in places[name])
        assert value == signed(fingerprint(held_values(values) if in_blocks else values))
    return without


def kinds_of(place: Place) -> Iterator[type]:
    yield type(place)
    if isinstance(place, InnerPlace):
        yield from kinds_of(place._inner)


@pytest.mark.parametrize(("layout", "storage"), CASES)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SEEING])
def test_moves_write_what_write_writes(family: str, layout: str, storage: str) -> None:
    """In the dtype of the model and in another one, which is cast."""
    native_ops()
    make_ops, dtype = STORAGES[storage]
    for rank in range(LAYOUTS[layout].world_size):
        model = model_of(family, make_ops(), dtype, view_of(LAYOUTS[layout], rank))
        metas = model.weights.metas()
        places = {name: list(model.weights.places(name)) for name in metas}
        held = {name: meta.dtype for name, meta in metas.items()}
        for dtypes in (held, dict.fromkeys(held, torch.float64)):
            sent = {name: cast_of(seed, meta.shape, dtypes[name]) for seed, (name, meta) in enumerate(metas.items())}
            assert not by_write_and_by_moves(sent, places, held)


def one_place(place: Place, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> set[str]:
    return by_write_and_by_moves({"w": cast_of(0, shape, dtype)}, {"w": [place]}, {"w": dtype})


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((24, 6), Region(0, 6, 6, (8, 4, 12))),
        ((4, 6), Region(1, 3, 3, (4, 2))),
        ((3, 8, 5), Region(1, 2, 4)),
        ((3, 8, 5), Region(0, 1, 1)),
        ((2, 3, 8), Region(2, 4, 4, (2, 6))),
        ((7,), Region(0, 2, 3)),
    ],
)
def test_a_region_is_moved_as_boxes(shape: tuple[int, ...], region: Region) -> None:
    native_ops()
    content = region.of(cast_of(0, shape, torch.bfloat16))
    for storage in (content.clone(), torch.zeros(*content.shape, 3, dtype=content.dtype)[..., 1]):
        place = ShardPlace(ViewPlace(storage), region.dim, region.start, region.length, region.sections)
        assert not one_place(place, shape)


def test_packed_rows_of_a_region_are_moved() -> None:
    native_ops()
    packed = torch.ops.lockstep.empty_packed([2], 80, 32, torch.bfloat16)
    place = PackedPlace(packed[1], range(16, 28), 32)
    assert not one_place(ShardPlace(place, 0, 6, 12, (4, 8, 12)), (24, 32))
    assert not one_place(ShardPlace(place, 1, 32, 32), (12, 96))
    assert ShardPlace(place, 1, 32, 32, (48, 48)).moves((12, 96)) is None, "a packed row is written whole"


def test_rows_in_another_order_are_moved_in_runs() -> None:
    native_ops()
    order = torch.arange(48).view(4, 2, 6).transpose(0, 1).flatten()
    for inner in (
        ViewPlace(torch.zeros(48, 32, dtype=torch.bfloat16)),
        PackedPlace(torch.ops.lockstep.empty_packed([], 80, 32, torch.bfloat16), range(8, 56), 32),
        ReorderedPlace(ViewPlace(torch.zeros(48, 32, dtype=torch.bfloat16)), order),
    ):
        assert not one_place(ReorderedPlace(inner, order), (48, 32))
        assert not one_place(ShardPlace(ReorderedPlace(inner, order), 0, 48, 48), (96, 32))
    many = torch.arange(130).flip(0)
    assert ReorderedPlace(ViewPlace(torch.zeros(130, 2)), many).moves((130, 2)) is None


def test_a_view_of_more_than_two_strides_has_no_moves() -> None:
    native_ops()
    storage = torch.zeros(4, 5, 6, dtype=torch.bfloat16)
    assert ViewPlace(storage[:, :, :3]).moves((4, 5, 3)) is None
    for view in (storage, storage[1:3], storage[:, 2:3, :4], storage[:, :, 1:2], storage.permute(1, 0, 2)[0]):
        assert not one_place(ViewPlace(view), tuple(view.shape))
    assert two_strides((4, 5, 3), (30, 6, 1), 2) == (6, 1)


def test_a_move_is_cut_to_rows_and_columns() -> None:
    move = Move(MoveKind.BOX, torch.zeros(1, dtype=torch.bfloat16), 10, 2, 6, 1, 4, 100, 3)
    assert move.cut(range(4, 99), range(2, 3)) == move._replace(
        first_row=4, num_rows=4, first_column=2, num_columns=1, offset=10 + 2 * (2 * 100 + 3)
    )
    cut = move.cut(range(2), range(9))
    assert cut is not None and cut.num_elements == 0
    packed = move._replace(kind=MoveKind.PACKED)
    assert packed.cut(range(9), range(2, 9)) is None
    assert packed.cut(range(3, 4), range(9)) == packed._replace(first_row=3, num_rows=1, a=101)
