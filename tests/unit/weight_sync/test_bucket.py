"""Flattened buckets, and what a control call may state about tensors."""

from __future__ import annotations

import random

import pytest
import torch

from tests.logical_weights_fake import bits
from weight_sync import bucket
from weight_sync.bucket import PackPlan, end_to_end, pack, plan_buckets
from weight_sync.errors import WeightRequestError
from weight_sync.manifest import parse_manifest
from weight_sync.tensor_meta import DTYPES, TensorMeta, dtype_name, parse_dtype, parse_meta, parse_metas


def metas_of(named: list[tuple[str, torch.Tensor]]) -> list[TensorMeta]:
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]


def mixed_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("bytes", torch.arange(5, dtype=torch.uint8)),
        ("half", torch.randn(3, 3).to(torch.bfloat16)),
        ("wide", torch.randn(2, 2, dtype=torch.float64)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 4)),
        ("transposed", torch.randn(3, 2).t()),
    ]


def test_a_bucket_has_the_bits_of_its_tensors() -> None:
    tensors = dict(mixed_tensors())
    (planned,) = plan_buckets(metas_of(mixed_tensors()), 1 << 20)
    packed = pack([(meta.name, tensors[meta.name]) for meta in planned])
    assert packed.dtype == torch.uint8
    assert packed.numel() == sum(meta.nbytes for meta in planned)
    parts = packed.split([meta.nbytes for meta in planned])
    for meta, part in zip(planned, parts, strict=True):
        assert bits(part) == bits(tensors[meta.name])


def test_layout_is_bytes_end_to_end() -> None:
    packed = pack([("a", torch.tensor([1.0])), ("b", torch.tensor([2.0, 3.0], dtype=torch.bfloat16))])
    assert bytes(packed.tolist()) == bytes([0, 0, 128, 63, 0, 64, 64, 64])


def neighbours() -> list[torch.Tensor]:
    whole = torch.arange(40, dtype=torch.bfloat16)
    return [whole[4:12].view(2, 4), whole[12:13], whole[13:13], whole[13:40].view(3, 9)]


def test_tensors_that_lie_end_to_end_are_one_view() -> None:
    tensors = neighbours()
    found = end_to_end(tensors, torch.bfloat16, torch.device("cpu"))
    assert found is not None and found.dtype == torch.uint8
    assert found.data_ptr() == tensors[0].data_ptr() and bits(found) == b"".join(bits(tensor) for tensor in tensors)


def _other_storage(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[0], tensors[1].clone(), *tensors[2:]]


def _other_order(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[1], tensors[0], *tensors[2:]]


def _gap(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[0], *tensors[3:]]


def _transposed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[0].t(), *tensors[1:]]


def _empty(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[2]]


@pytest.mark.parametrize("changed", [_other_storage, _other_order, _gap, _transposed, _empty])
def test_tensors_that_do_not_lie_end_to_end_are_told(changed) -> None:
    assert end_to_end(changed(neighbours()), torch.bfloat16, torch.device("cpu")) is None


def test_tensors_of_another_dtype_or_device_are_to_be_copied() -> None:
    assert end_to_end(neighbours(), torch.float32, torch.device("cpu")) is None
    assert end_to_end(neighbours(), torch.bfloat16, torch.device("meta")) is None


def test_neighbours_in_memory_of_several_storages_are_to_be_copied() -> None:
    """A trainer's allocator may put one tensor right behind another; one view over both would leave its storage."""
    memory = bytearray(64)
    parts = [torch.frombuffer(memory, dtype=torch.bfloat16, count=8, offset=16 * i) for i in range(3)]
    assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [0, 16, 32]
    assert end_to_end(parts, torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.parametrize("seed", range(40))
def test_a_pack_plan_puts_tensors_end_to_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes around the limits, runs of equal shapes, and casts; the same plan again for other content."""
    monkeypatch.setattr(bucket, "_ONE_THREAD", 50)
    monkeypatch.setattr(bucket, "_SMALL", 120)
    rng = random.Random(seed)
    source = rng.choice([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.bool])
    target = rng.choice([source, torch.bfloat16]) if source == torch.float32 else source
    shapes: list[tuple[int, ...]] = []
    while len(shapes) < rng.choice([1, 5, 60]):
        size = rng.choice([0, 1, 7, 49, 50, 51, 120, 121, 300])
        shapes += [rng.choice([(size,), (1, size), (size, 1), (2, size), ()])] * rng.choice([1, 1, 2, 7, 8, 9])
    cpu = torch.device("cpu")
    plan = PackPlan(shapes, source, target, (cpu, cpu))
    for _ in range(2):
        tensors = [torch.randint(0, 2, shape).to(source) for shape in shapes]
        room = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=target)
        plan.pack(tensors, room)
        assert bits(room) == b"".join(bits(tensor.to(target)) for tensor in tensors)


def test_many_small_tensors_are_packed_by_a_few_calls() -> None:
    """Calls go with bytes, not with tensors; equal shapes are joined apart, which torch does for half the price."""
    cpu = torch.device("cpu")
    assert len(PackPlan([(64,)] * 10_000, torch.float32, torch.float32, (cpu, cpu))._copies) == 1
    mixed = PackPlan(
        [(5,), (6,)] * 1000 + [(8, 8)] * 1000 + [(5,), (6,)] * 1000, torch.float32, torch.float32, (cpu, cpu)
    )
    assert [copy.last - copy.first for copy in mixed._copies] == [2000, 1000, 2000]
    assert len(PackPlan([(64,)] * 5120, torch.float32, torch.bfloat16, (cpu, cpu))._copies) == 11


def test_an_empty_bucket_holds_nothing() -> None:
    assert pack([]).numel() == 0
    assert plan_buckets([], 10) == []


def test_refuses_a_bucket_that_is_not_aligned() -> None:
    named = [("small", torch.zeros(3, dtype=torch.uint8)), ("large", torch.zeros(1))]
    with pytest.raises(WeightRequestError, match=r"not aligned: large .* byte 3"):
        pack(named)


def test_plan_fills_buckets_in_order() -> None:
    metas = [TensorMeta(str(i), torch.bfloat16, (size,)) for i, size in enumerate([5, 5, 5, 100, 1, 1])]
    metas.append(TensorMeta("wide", torch.float32, (2,)))
    plan = [[meta.name for meta in bucket] for bucket in plan_buckets(metas, 30)]
    assert plan == [["wide", "0", "1"], ["2"], ["3"], ["4", "5"]]
    with pytest.raises(WeightRequestError):
        plan_buckets(metas, 0)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_parsed_by_their_names(name: str) -> None:
    assert parse_dtype(name) == parse_dtype(f"torch.{name}") == DTYPES[name]
    assert dtype_name(DTYPES[name]) == name


@pytest.mark.parametrize("name", ["complex64", "", "float", "torch.torch.float32", None, 3])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(WeightRequestError, match="unknown dtype"):
        parse_dtype(name)


@pytest.mark.parametrize("shape", [[-1], [2, -3], [1.5], [True], ["2"], [2**30, 2**30], [1] * 9])
def test_an_impossible_shape_is_refused(shape: list[int]) -> None:
    with pytest.raises(WeightRequestError, match="w: "):
        parse_meta("w", "float32", shape)


def test_lists_must_be_equally_long() -> None:
    assert parse_metas(["a"], ["float32"], [[2, 3]]) == [TensorMeta("a", torch.float32, (2, 3))]
    with pytest.raises(WeightRequestError, match="got 2, 1 and 1"):
        parse_metas(["a", "b"], ["float32"], [[1]])
    with pytest.raises(WeightRequestError, match="name"):
        parse_metas([""], ["float32"], [[1]])


def test_manifest_entries_are_parsed_or_refused() -> None:
    meta = TensorMeta("a", torch.bfloat16, (2,))
    assert parse_manifest([("a", "bfloat16", [2], "00000000000000ff")]) == [(meta, 255)]
    assert parse_manifest([("a", "bfloat16", [2], None), ("b", "bfloat16", [2], None)])[1][0].name == "b"
    for bad in (
        ("a", "bfloat16", [2], "ff"),
        ("a", "int4", [2], None),
        ("a", "bfloat16", [-2], None),
        ("a", "bfloat16", [2.5], None),
        ("", "bfloat16", [2], None),
        ("a" * 513, "bfloat16", [2], None),
    ):
        with pytest.raises(WeightRequestError):
            parse_manifest([bad])
