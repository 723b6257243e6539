"""`change_spans`, compiled: tensors are read from any place, and changed as the plain reader of planes changes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollout.kernels.places import AbsorbedPlace, LatentSizes, PackedPlace, ViewPlace
from tests import kernels
from tests.plane_tables import write_planes
from tests.unit.weight_sync.test_delta_codec import changed, random_bits
from weight_sync.delta.change_spans import SpanChange, is_compiled
from weight_sync.delta.changes import find_changes
from weight_sync.delta.frame_part import PartTables
from weight_sync.delta.planes import SizeTable, read_all_planes
from weight_sync.errors import ContentError
from weight_sync.fingerprint_words import SIGNED
from weight_sync.homes import bytes_of
from weight_sync.tensor_meta import Place, TensorMeta

NUMELS = [0, 1, 7, 300, 300, 4097, 0, 255, 256, 1000, 2, 5000]
DTYPES = [torch.int8, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def loaded() -> None:
    kernels.native_ops()
    assert is_compiled()


class Case:
    """Tensors of many sizes, and their planes: unchanged, sparse and dense ones."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        bases = [random_bits(seed + number, numel, dtype) for number, numel in enumerate(NUMELS)]
        kinds = [(0.0, 1), (0.01, 1), (0.03, 300), (1.0, 1 << 12), (0.2, 1 << 40)]
        news = [changed(base, seed, *kinds[(at + seed) % len(kinds)]) for at, base in enumerate(bases)]
        found = [
            write_planes(find_changes(base, new), base.numel(), dtype.itemsize)
            for base, new in zip(bases, news, strict=True)
        ]
        self.itemsize = dtype.itemsize
        self.sizes = SizeTable.join([sizes for sizes, _ in found])
        self.planes = [np.concatenate(column) for column in zip(*(planes for _, planes in found), strict=True)]
        self.metas = [TensorMeta(str(at), dtype, (numel,)) for at, numel in enumerate(NUMELS)]
        self.base, self.new = (torch.cat(tensors).view(torch.uint8) for tensors in (bases, news))

    def compiled(self, planes: Sequence[np.ndarray]) -> torch.Tensor | None:
        """Return the changed content; None where the kernel refuses."""
        content = self.base.clone()
        change = SpanChange(content, PartTables.of(self.metas).tables.tensors, self.sizes, planes)
        return content if change.apply() else None

    def plain(self, planes: Sequence[np.ndarray]) -> torch.Tensor | None:
        """Return the same by the plain reader."""
        try:
            found = read_all_planes(self.sizes, planes, np.array(NUMELS), self.itemsize)
        except ContentError:
            return None
        content = self.base.clone()
        words, starts = content.view(SIGNED[self.itemsize]), np.cumsum([0, *NUMELS[:-1]])
        at = torch.from_numpy(found.positions_N + np.repeat(starts, self.sizes.num_changes))
        words[at] += torch.from_numpy(found.steps_N).to(words.dtype)
        return content


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_change_as_they_were_encoded(dtype: torch.dtype, seed: int) -> None:
    case = Case(dtype, seed)
    found = case.compiled(case.planes)
    assert found is not None and torch.equal(found, case.new)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("dtype", DTYPES)
def test_damaged_planes_are_refused_as_the_plain_reader_refuses_them(dtype: torch.dtype, seed: int) -> None:
    """Bytes that both take lead to the same content."""
    case, rng = Case(dtype, seed % 5), np.random.default_rng(seed)
    planes = [plane.copy() for plane in case.planes]
    for plane in planes:
        if plane.size and rng.random() < 0.5:
            plane[rng.integers(plane.size)] = rng.choice([0, 1, 254, 255, rng.integers(256)])
    found, expected = case.compiled(planes), case.plain(planes)
    assert (found is None) == (expected is None)
    assert found is None or (expected is not None and torch.equal(found, expected))


@pytest.mark.mutant
def test_sizes_of_another_tensor_are_noticed() -> None:
    """A wrong variant: two tensors of one size get each other's part of the planes."""
    case = Case(torch.bfloat16, 1)
    order = np.arange(len(NUMELS))
    order[[3, 4]] = [4, 3]
    case.sizes = case.sizes.some(order)
    found = case.compiled(case.planes)
    assert found is None or not torch.equal(found, case.new)


@pytest.mark.parametrize("plane", range(5))
def test_sizes_beyond_a_plane_do_not_fit(plane: int) -> None:
    case = Case(torch.bfloat16, 0)
    case.planes[plane] = case.planes[plane][:-1]
    with pytest.raises(RuntimeError, match=r"more bytes of a plane|do not fit"):
        case.compiled(case.planes)


def packed(rows: int, columns: int, dtype: torch.dtype, lead: Sequence[int] = ()) -> torch.Tensor:
    empty: torch.Tensor = torch.ops.lockstep.empty_packed(list(lead), rows, columns, dtype)
    return empty


def places_of(dtype: torch.dtype) -> list[tuple[Place, tuple[int, ...]]]:
    """Return places of each kind, and the shapes of their tensors."""
    sizes = LatentSizes(nope=24, value=40, rank=33)
    heads = torch.stack([torch.cat([packed(33, 24, dtype).view(-1), packed(40, 33, dtype).view(-1)]) for _ in range(2)])
    pair = packed(70, 50, dtype)
    return [
        (ViewPlace(torch.zeros(30, 20, dtype=dtype)), (30, 20)),
        (ViewPlace(torch.zeros(20, 30, dtype=dtype).T[3:, 2:]), (27, 18)),
        (ViewPlace(torch.zeros(3, 4, 5, dtype=dtype)), (3, 4, 5)),
        (PackedPlace(packed(48, 64, dtype), range(48), 64), (48, 64)),
        (PackedPlace(packed(48, 37, dtype), range(5, 40), 37), (35, 37)),
        (PackedPlace(pair, range(35), 50, 2, 0), (35, 50)),
        (PackedPlace(pair, range(35), 50, 2, 1), (35, 50)),
        (AbsorbedPlace(heads, sizes), (2 * 64, 33)),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_read_from_where_they_live(dtype: torch.dtype) -> None:
    places = {f"t{at}": each for at, each in enumerate(places_of(dtype))}
    contents = [
        random_bits(at, int(np.prod(shape)), dtype).view(shape) for at, (_, shape) in enumerate(places.values())
    ]
    for (place, _), content in zip(places.values(), contents, strict=True):
        place.write(content)
    metas = [TensorMeta(name, dtype, shape) for name, (_, shape) in places.items()]
    part = PartTables.of(metas, lambda name: places[name][0].moves(places[name][1]) or ())
    none = np.zeros(len(metas), dtype=np.int64)
    sizes = SizeTable(none, none.astype(np.bool_), np.zeros((len(metas), 5), dtype=np.int64))
    found = torch.full((part.layout.num_bytes,), 0xAA, dtype=torch.uint8)
    change = SpanChange(found, part.tables.tensors, sizes, [np.empty(0, dtype=np.uint8)] * 5)
    change.read(part.moves, list(map(bytes_of, part.storages)))
    assert torch.equal(found, torch.cat([content.reshape(-1).view(torch.uint8) for content in contents]))
    part.moves[0, 3] += 1 << 30
    with pytest.raises(RuntimeError, match=r"outside of its storage|between two elements"):
        change.read(part.moves, list(map(bytes_of, part.storages)))
