"""Quantised weights by tables: the bits and fingerprints of single tensors, and never by a plan of something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from rollout.kernels.held_places import HELD_FORMS
from rollout.kernels.places import PackedPlace, ShardPlace, ViewPlace
from tests import kernels
from tests.fp8_reference import Named, dequantise, quantise, quantised
from tests.held_reference import int4_values
from tests.logical_weights_fake import GATE_UP, NORM, D, E, FakeWeights, I, bits, expert_name, version
from tests.loopback_updater import LoopbackSource, LoopbackUpdater, layout_of, new_updater, packed
from tests.pair_forms import FP8_FORM, int4_parts
from tests.unit.weight_sync.test_plans import MovableWeights
from weight_sync import int4_groups
from weight_sync.assembly import PairedTensors
from weight_sync.content import TensorTable
from weight_sync.errors import ContentError, CoverageError
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.held_format import FP8_BLOCKS, HeldFormat
from weight_sync.homes import Homes
from weight_sync.pair_plan import Wires
from weight_sync.plan import BucketPlan, plan_bucket
from weight_sync.shadow import ShadowStaging
from weight_sync.take_pairs import PairTables
from weight_sync.tensor_meta import BucketLayout, LogicalWeights, Pair, Piece, Place, TensorMeta
from weight_sync.transaction import WeightTransaction

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"
PACKED_FORMS = ("fp8", "int4", "int4-128", "w8")


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    kernels.native_ops()


class OneMatrix:
    """A model of one matrix, held at `place`."""

    def __init__(self, meta: TensorMeta, place: Place) -> None:
        self._metas, self._place = {meta.name: meta}, place

    def metas(self) -> dict[str, TensorMeta]:
        return self._metas

    def split(self, wire: TensorMeta) -> list[Piece]:
        return [Piece(wire.name)]

    def places(self, name: str) -> Sequence[Place]:
        return [self._place]


class Sent(NamedTuple):
    """The tensors of one weight, as they came, and the values that they mean; `pair`: what has them."""

    tensors: Named
    values: torch.Tensor
    pair: Pair | None = None


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, columns, generator=generator).exp()
    x[rows // 2 :, columns // 3 : columns // 3 + 40] = 0
    return x


def odd(scale: torch.Tensor) -> torch.Tensor:
    """Return scales that no rule gives, so that nothing but a copy has them."""
    return (scale * torch.linspace(1, 1.7, scale.numel()).view_as(scale)).to(scale.dtype)


def sent_as(form: str, x: torch.Tensor, dtype: torch.dtype) -> Sent:
    kind, _, detail = form.partition(" ")
    if kind == "fp8":
        weight, scale = quantise(x)
        scale = odd(scale).to(getattr(torch, detail))
        values = dequantise(weight, scale.float(), dtype)
        return Sent({NAME: weight, f"{NAME}_scale_inv": scale}, values, Pair(weight, scale))
    if kind == "int4":
        group = int(detail)
        pair = int4_groups.quantise(x, group)
        scales = odd(pair.scale)
        values = int4_values(pair.weight, scales, group, torch.bfloat16).to(dtype)
        tensors = int4_parts(NAME, pair.weight, scales)
        tensors[f"{NAME}_shape"] = tensors[f"{NAME}_shape"].to(torch.int64 if group == 32 else torch.int32)
        return Sent(tensors, values, Pair(pair.weight, scales, (1, group)))
    x = x.to(getattr(torch, detail))
    return Sent({NAME: x}, x.to(dtype))


def place_of(held: str, rows: int, columns: int) -> Place:
    """Return a place for a matrix behind another one, in memory with other content."""
    if held in HELD_FORMS:
        form = HELD_FORMS[held]
        storage = form.empty([], 2 * rows + 32, columns)
        return form.place(storage, range(-(-rows // 16) * 16, -(-rows // 16) * 16 + rows), columns, 1, 0)
    if held == "packed":
        storage = torch.ops.lockstep.empty_packed([], rows + 32, columns, torch.bfloat16)
        return PackedPlace(storage, range(32, 32 + rows), columns)
    return ViewPlace(torch.zeros(rows, columns + 3, dtype=getattr(torch, held))[:, 1 : columns + 1])


def format_of(held: str) -> HeldFormat | None:
    return HELD_FORMS[held].held if held in HELD_FORMS else None


def in_a_bucket(tensors: Named, gap: int) -> tuple[BucketLayout, torch.Tensor]:
    """Return a bucket that begins with `gap` bytes of something else, with the tensors at any address."""
    metas = [TensorMeta(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
    offsets = list(accumulate((meta.nbytes for meta in metas), initial=gap))
    content = torch.full((offsets[-1],), 0x7F, dtype=torch.uint8)
    for x, start in zip(tensors.values(), offsets):
        content[start : start + x.nbytes] = x.contiguous().view(-1).view(torch.uint8)
    return BucketLayout(metas, offsets[:-1], offsets[-1]), content


def planned(weights: LogicalWeights, layout: BucketLayout, formats: dict[str, HeldFormat]) -> BucketPlan:
    wires = Wires.of(weights, layout.metas, cast=True)
    return plan_bucket(layout, wires, Homes(weights), TensorTable(weights.metas()), formats)


def expected(sent: Sent, held_format: HeldFormat | None) -> tuple[torch.Tensor, torch.Tensor | Pair]:
    """Return the values that are held of a weight, and what its place takes."""
    values, pair = sent.values, sent.pair
    if held_format is None or (pair is not None and not held_format.of_pairs):
        return values, values
    if held_format.keeps(pair):
        assert pair is not None
        return values, pair if pair.block == held_format.block else int4_groups.regrouped(pair, held_format.block[1])
    if held_format.pairs is None:
        values = held_format.values(values)
        return values, values
    made = held_format.pairs.quantise(values)
    return held_format.pairs.values(made, values.dtype), made


CASES = [
    *((sent, held) for sent in ("fp8 float32", "int4 32") for held in PACKED_FORMS),
    *(("values bfloat16", held) for held in ("fp8", "int4", "int4-128")),
    *((sent, "packed") for sent in ("fp8 bfloat16", "int4 128")),
    *(("int4 128", held) for held in ("int4", "int4-128")),
    *(("fp8 float16", held) for held in ("bfloat16", "float32", "float16")),
    *(("int4 32", held) for held in ("float32", "float16")),
    *(("values float32", held) for held in ("fp8", "int4")),
]


SHAPES = [(33, 128), (640, 224), (400, 384)]  # of one item, and of bands; with blocks that are cut
FITTING = [
    (form, held, shape)
    for form, held in CASES
    if (form, held) != ("int4 32", "int4-128")
    for shape in SHAPES
    if form != "int4 128" or shape[1] % 128 == 0
]


def whole_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class Case:
    """One weight as it came, in a bucket, and a model that holds it in some form."""

    def __init__(self, form: str, held: str, shape: tuple[int, int], seed: int = 0) -> None:
        dtype = torch.bfloat16 if held in HELD_FORMS or held == "packed" else getattr(torch, held)
        self.sent = sent_as(form, matrix(*shape, seed), dtype)
        self.format, self.place = format_of(held), place_of(held, *shape)
        self.weights = OneMatrix(TensorMeta(NAME, dtype, shape), self.place)
        self.layout, self.content = in_a_bucket(self.sent.tensors, gap=4 if self.sent.pair is None else shape[0] % 5)

    def plan(self) -> BucketPlan:
        return planned(self.weights, self.layout, {} if self.format is None else {NAME: self.format})


@pytest.mark.parametrize(("form", "held", "shape"), FITTING)
def test_a_table_leaves_what_a_single_tensor_leaves(form: str, held: str, shape: tuple[int, int]) -> None:
    case = Case(form, held, shape)
    plan, live = case.plan(), whole_bytes(case.place.storage)
    assert plan.pairs is not None and not plan.rest
    area, before = live.clone(), live.clone()
    _, found = plan.take(case.content, [area], writes=False)
    assert torch.equal(area, before)
    plan.take(case.content, [area], checks=False)
    values, stored = expected(case.sent, case.format)
    case.place.write(stored)
    assert torch.equal(area, live) and not torch.equal(area, before)
    assert found is not None and found.wrong.tolist() == [0]
    sums = [fingerprint(part) for part in case.sent.tensors.values()]
    assert found.sums[0].tolist() == [*sums, *[0] * (3 - len(sums)), fingerprint(values)]


def changed(case: Case, name: str, change: Callable[[torch.Tensor], None]) -> int:
    """Change a part in the bucket; return what is found wrong."""
    plan = case.plan()
    (at,) = (at for at, meta in enumerate(case.layout.metas) if meta.name == NAME + name)
    part, start = case.sent.tensors[NAME + name].clone(), case.layout.offsets[at]
    change(part)
    case.content[start : start + part.nbytes] = part.view(-1).view(torch.uint8)
    assert plan.pairs is not None
    _, found = plan.take(case.content, [whole_bytes(case.place.storage)])
    assert found is not None
    return int(found.wrong[0])


@pytest.mark.parametrize(
    ("form", "held", "name", "value", "wrong"),
    [
        ("values bfloat16", "fp8", "", float("nan"), 1),
        ("values float32", "int4", "", 3.4e38, 1),
        ("fp8 float32", "fp8", "_scale_inv", -1.0, 2),
        ("fp8 float32", "bfloat16", "_scale_inv", float("inf"), 3),
        ("fp8 float32", "fp8", "_scale_inv", 2.0**120, 9),
        ("fp8 bfloat16", "packed", "_scale_inv", 2.0**120, 1),
        ("int4 32", "int4", "_scale", 0.0, 2),
        ("int4 32", "w8", "_scale", float("nan"), 3),
        ("int4 32", "int4", "_scale", 2.0**120, 8),
        ("int4 32", "fp8", "_shape", 7, 4),
        ("int4 128", "int4", "_shape", 7, 4),
    ],
)
def test_what_is_wrong_is_found(form: str, held: str, name: str, value: float, wrong: int) -> None:
    case = Case(form, held, (400, 384))
    assert changed(case, name, lambda part: part.view(-1)[-1:].fill_(value)) == wrong


@pytest.mark.parametrize("held", [*PACKED_FORMS, "packed"])
@pytest.mark.parametrize("row", [0, 399])
def test_an_element_that_is_no_number_is_found(held: str, row: int) -> None:
    """A tensor of integers has none, also where it is made of one that is NaN."""
    case = Case("fp8 float32", held, (400, 384))
    assert changed(case, "", lambda part: part.view(torch.uint8)[row, 383:].fill_(0x7F)) == 1


WRONG_ROWS = {
    "begins too late": {0: 1 << 20},
    "an unknown form as sent": {1: 3},
    "a shape of another dtype": {2: 2},
    "scales outside": {3: 1 << 20},
    "a shape outside": {4: 1 << 20},
    "no group": {5: 0},
    "groups of 64": {5: 64},
    "too many rows": {6: 44},
    "too many columns": {7: 288},
    "sizes whose product overflows": {6: 1 << 40, 7: 1 << 40},
    "values of an integer": {8: 7},
    "an unknown form as held": {9: 4},
    "groups that are not held": {10: 64},
    "a number below zero": {0: -1},
}
WRONG_MOVES = {
    "no such pair": {0: 1},
    "a kind of another form": {1: 4},
    "an unknown kind": {1: 6},
    "no such storage": {2: 1},
    "behind the end": {3: 1 << 20},
    "rows behind the last": {4: 1},
    "columns behind the last": {6: 32},
    "a group that is cut": {6: 16, 7: 224},
    "too many packed rows": {8: 1 << 12},
    "no step": {9: 0},
    "an offset that is not below its step": {10: 1},
}


@pytest.mark.parametrize(
    ("table", "change"),
    [*(("_pairs", change) for change in WRONG_ROWS.values()), *(("_moves", change) for change in WRONG_MOVES.values())],
    ids=[*WRONG_ROWS, *WRONG_MOVES],
)
def test_a_table_that_points_outside_is_refused(table: str, change: dict[int, int]) -> None:
    case = Case("int4 32", "int4", (40, 256))
    plan = case.plan()
    assert plan.pairs is not None
    for column, number in change.items():
        getattr(plan.pairs.tables, table)[0, column] = number
    live = whole_bytes(case.place.storage)
    before = live.clone()
    with pytest.raises(RuntimeError, match=r"^(pair|move) 0 (has|is|lies|packs|begins)"):
        plan.take(case.content, [live])
    assert torch.equal(live, before)


def test_what_tables_cannot_express_goes_tensor_by_tensor() -> None:
    """Parts in two buckets, a part twice, boxes, groups that are not held, and places that only `write` can fill."""
    case = Case("int4 32", "int4-128", (40, 256))
    assert list(case.plan().rest) == [0, 1, 2]
    case = Case("fp8 float32", "fp8", (160, 256))
    metas, offsets = list(case.layout.metas), list(case.layout.offsets)
    for some in (slice(0, 1), slice(1, 2)):
        layout = BucketLayout(metas[some], offsets[some], case.layout.num_bytes)
        assert list(planned(case.weights, layout, {NAME: FP8_BLOCKS}).rest) == [0]
    twice = BucketLayout([*metas, metas[1]], [*offsets, offsets[1]], case.layout.num_bytes)
    assert list(planned(case.weights, twice, {}).rest) == [0, 1, 2]
    case.weights._place = ShardPlace(place_of("fp8", 64, 256), 0, 64, 64)  # wrong: a start refuses such a shard
    assert list(case.plan().rest) == [0, 1]
    with mock.patch("weight_sync.plan.is_compiled", lambda device: False):
        assert list(Case("fp8 float32", "fp8", (160, 256)).plan().rest) == [0, 1]


# --- a refresh --------------------------------------------------------------------------------------------------------


def in_fp8(seed: int) -> Named:
    """Return a version of the fake model whose experts are in FP8."""
    return quantised(version(seed), lambda name, _: ".experts." in name)


def values_in(tensors: Named) -> Named:
    return FP8_FORM.values_of(tensors, torch.bfloat16) | {n: x for n, x in tensors.items() if ".experts." not in n}


@pytest.fixture
def weights() -> MovableWeights:
    return MovableWeights()


@pytest.fixture
def updater(weights: MovableWeights) -> LoopbackUpdater:
    return new_updater(weights)


def digest_of(tensors: Named) -> str:
    return digest((TensorMeta(n, x.dtype, tuple(x.shape)), fingerprint(x)) for n, x in tensors.items())


def refresh(updater: LoopbackUpdater, tensors: Named, *buckets: Sequence[str]) -> None:
    updater.begin("v")
    for names in buckets or [list(tensors)]:
        updater.receive(LoopbackSource([(name, tensors[name]) for name in names]))
    updater.verify()
    updater.commit()


def require_content(weights: FakeWeights, tensors: Named) -> None:
    for name, tensor in tensors.items():
        assert {bits(place.read()) for place in weights.places(name)} == {bits(tensor)}, name


def test_a_replay_writes_no_single_tensor(updater: LoopbackUpdater, weights: MovableWeights) -> None:
    with mock.patch.object(ShadowStaging, "write", side_effect=AssertionError("a tensor came by itself")):
        for seed in (1, 2, 3):
            refresh(updater, in_fp8(seed))
            require_content(weights, values_in(in_fp8(seed)))


@pytest.mark.parametrize("first", ["scales", "weights", "cut"])
def test_parts_in_two_buckets_go_by_tables(updater: LoopbackUpdater, weights: MovableWeights, first: str) -> None:
    names = list(in_fp8(1))
    cut = names.index(f"{expert_name(1, 'gate_proj')}_scale_inv")
    if first != "cut":
        names.sort(key=lambda name: name.endswith("_scale_inv") == (first == "weights"))
        cut = sum(name.endswith("_scale_inv") == (first == "scales") for name in names)
    made = mock.patch("weight_sync.plan.plan_bucket", wraps=plan_bucket)
    counts = []
    for seed in (1, 2, 3):
        tensors = in_fp8(seed)
        single = mock.patch.object(ShadowStaging, "write", side_effect=AssertionError("a tensor came by itself"))
        with single, made as counted:
            refresh(updater, tensors, names[:cut], names[cut:])
        counts.append(counted.call_count)
        require_content(weights, values_in(tensors))
        assert updater.model.content.digests.sent == digest_of(tensors)
    assert counts[0] > 0 and counts[1:] == [0, 0]


def test_a_plan_ends_when_experts_move(updater: LoopbackUpdater, weights: MovableWeights) -> None:
    refresh(updater, in_fp8(1))
    weights.slots = (2, 0, 1, 0)
    refresh(updater, in_fp8(2))
    require_content(weights, values_in(in_fp8(2)))


def test_a_plan_that_outlives_a_move_is_noticed(updater: LoopbackUpdater, weights: MovableWeights) -> None:
    """A wrong variant: the key of the places stays where they move."""
    with mock.patch.object(MovableWeights, "places_key", lambda self: None):
        refresh(updater, in_fp8(1))
        weights.slots = (2, 0, 1, 0)
        refresh(updater, in_fp8(2))
    with pytest.raises(AssertionError, match="experts"):
        require_content(weights, values_in(in_fp8(2)))


@pytest.mark.parametrize("suffix", ["", "_scale_inv"])
def test_a_replay_checks_each_part(updater: LoopbackUpdater, weights: MovableWeights, suffix: str) -> None:
    """The layout is the same, and a part has other bytes than the manifest states."""
    refresh(updater, in_fp8(1))
    before, sent, name = weights.snapshot(), in_fp8(2), expert_name(2, "down_proj") + suffix
    stated = [(TensorMeta(n, x.dtype, tuple(x.shape)), fingerprint(x)) for n, x in sent.items()]
    sent[name] = in_fp8(3)[name]
    updater.begin("v", manifest=stated)
    with pytest.raises(ContentError, match=f"{name}: fingerprint"):
        updater.receive(LoopbackSource(list(sent.items())))
    updater.abort()
    assert weights.snapshot() == before


def test_a_part_of_a_planned_weight_comes_once(updater: LoopbackUpdater) -> None:
    tensors, scale = in_fp8(1), f"{expert_name(0, 'up_proj')}_scale_inv"
    for again in (scale, scale.removesuffix("_scale_inv")):
        updater.begin("v", coverage="partial")
        updater.receive(LoopbackSource(list(tensors.items())))
        with pytest.raises(CoverageError, match=f"{again} came twice"):
            updater.receive(LoopbackSource([(again, tensors[again])]))
        updater.drop("twice")


def test_all_wrong_weights_of_one_tensor_are_named(weights: MovableWeights) -> None:
    """Each is a piece of it, and it is looked at again once."""
    formats = {name: FP8_BLOCKS for name in weights.metas() if ".experts." in name}
    content = torch.ones(E, 2 * I, D, dtype=torch.bfloat16)
    content[0, 0, 0] = content[2, I, 0] = float("nan")
    layout = layout_of([TensorMeta(GATE_UP, torch.bfloat16, (E, 2 * I, D))])
    transaction = WeightTransaction(weights, coverage="partial", quantised=formats)
    wrong = f"values that are not finite in {expert_name(0, 'gate_proj')}, {expert_name(2, 'up_proj')}"
    with pytest.raises(ContentError, match=wrong):
        transaction.receive(packed(layout, [(GATE_UP, content)]))


def test_a_weight_comes_in_parts_or_in_a_box(updater: LoopbackUpdater, weights: MovableWeights) -> None:
    """It does not count for a tensor that is missing."""
    name, before = expert_name(0, "gate_proj"), weights.snapshot()
    named = [(n, x) for n, x in in_fp8(1).items() if n != NORM and not n.startswith(expert_name(0, "up_proj"))]
    metas = [TensorMeta(n, x.dtype, tuple(x.shape)) for n, x in named]
    box = TensorMeta(GATE_UP, torch.bfloat16, (E, 2 * I, D), ((0, 1), (0, 2 * I), (0, D)))
    updater.begin("v")
    with pytest.raises(CoverageError, match=f"{name} came whole, as {name}, while boxes of it come"):
        updater.receive(LoopbackSource([*named, (GATE_UP, torch.ones(1, 2 * I, D))], metas=[*metas, box]))
    updater.drop("twice")
    assert weights.snapshot() == before


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["no sums of scales", "values without scales", "no note of what came"])
def test_a_wrong_operator_is_noticed(updater: LoopbackUpdater, weights: MovableWeights, wrong: str) -> None:
    original = PairTables.take

    def take(tables: PairTables, source: torch.Tensor, *args: object, **named: object) -> object:
        if wrong == "values without scales":
            source = torch.full_like(source, 0x38)
        found = original(tables, source, *args, **named)  # type: ignore[arg-type]
        if wrong == "no sums of scales":
            found.sums[:, 1] = 0
        return found

    with mock.patch.object(PairTables, "take", take):
        if wrong == "no note of what came":
            with (
                mock.patch.object(PairedTensors, "note", lambda self, names: None),
                pytest.raises(pytest.fail.Exception),
            ):
                test_a_part_of_a_planned_weight_comes_once(updater)
        elif wrong == "no sums of scales":
            stated = [(TensorMeta(n, x.dtype, tuple(x.shape)), fingerprint(x)) for n, x in in_fp8(1).items()]
            updater.begin("v", manifest=stated)
            with pytest.raises(ContentError, match="fingerprint"):
                updater.receive(LoopbackSource(list(in_fp8(1).items())))
        else:
            refresh(updater, in_fp8(1))
            with pytest.raises(AssertionError):
                require_content(weights, values_in(in_fp8(1)))
