"""The delta codec: exact for every dtype and all bit patterns, its own undo, small, and closed to nonsense."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.delta_models import DriftingMasters, applied, bits, same_bits
from tests.plane_tables import read_planes, size_table, write_planes
from tests.tiers import examples
from weight_sync.delta import encoder as encoder_module
from weight_sync.delta.changes import Changes, apply_changes, find_changes
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.frame import read_frame, write_frame
from weight_sync.delta.planes import (
    SizeTable,
    invert_planes,
    read_all_planes,
    read_sizes,
    write_sizes,
)
from weight_sync.delta.tensor_list import TensorList
from weight_sync.errors import (
    BaseMismatchError,
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    TransactionStateError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.tensor_meta import DTYPES, TensorMeta

torch.set_num_threads(1)

LIMIT = 1 << 30
SHAPES = {"a": (300, 70), "b": (64,), "empty": (0, 4), "scalar": (), "c": (5000,)}


def random_bits(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return content.view(dtype)


def changed(base: torch.Tensor, seed: int, share: float, step: int) -> torch.Tensor:
    """Return `base` with a share of its words moved by up to `step` in either direction."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[base.dtype.itemsize]
    generator = torch.Generator().manual_seed(seed)
    words = base.view(-1).view(signed).clone()
    mask = torch.rand(words.shape, generator=generator) < share
    steps = torch.randint(-step, step + 1, words.shape, generator=generator)
    words[mask] += steps[mask].to(signed)
    return words.view(base.dtype).view(base.shape)


@settings(max_examples=examples(150), deadline=None)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    numel=st.sampled_from([0, 1, 2, 7, 8, 9, 255, 256, 257, 1000, 4097]),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]),
    step=st.sampled_from([1, 2, 100, 257, 1 << 20, 1 << 40]),
    seed=st.integers(0, 1000),
)
def test_planes_lead_there_and_back(dtype: str, numel: int, share: float, step: int, seed: int) -> None:
    base = random_bits(seed, numel, DTYPES[dtype])
    new = changed(base, seed + 1, share, step)
    found = find_changes(base, new)
    sizes, planes = write_planes(found, numel, base.dtype.itemsize)
    assert sizes.counts.tolist() == [[plane.size for plane in planes]]
    assert sizes.counts.sum() <= base.nbytes or not base.nbytes
    there = read_planes(sizes, planes, numel, base.dtype.itemsize)
    result, value = apply_changes(base, there, fingerprint(base))
    assert bits(result) == bits(new)
    assert value == fingerprint(new)
    back = read_planes(sizes, invert_planes(sizes, planes, base.dtype.itemsize), numel, base.dtype.itemsize)
    restored, value = apply_changes(result, back, value)
    assert bits(restored) == bits(base)
    assert value == fingerprint(base)


def test_every_pair_of_bfloat16_neighbours_and_extremes() -> None:
    """Each of 65536 words becomes its neighbours, the other sign, zero: NaN, infinities and both zeros included."""
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    base = words.view(torch.bfloat16)
    for target in (words + 1, words - 1, words ^ -(1 << 15), torch.zeros_like(words), words.flip(0)):
        new = target.to(torch.int16).view(torch.bfloat16)
        found = find_changes(base, new)
        sizes, planes = write_planes(found, base.numel(), 2)
        result, _ = apply_changes(base, read_planes(sizes, planes, base.numel(), 2), fingerprint(base))
        assert bits(result) == bits(new)
        assert bits(apply_changes(result, Changes(found.positions_N, -found.steps_N), fingerprint(result))[0]) == bits(
            base
        )


def test_positions_far_apart_survive_the_codec() -> None:
    positions = np.array([0, 1, 255, 256, 257, 511, 512, 70_000, 9_999_999], dtype=np.int64)
    steps = np.array([1, -1, 1, 2, -257, 258, 32768, -32768, 1], dtype=np.int64)
    sizes, planes = write_planes(Changes(positions, steps), 10_000_000, 2)
    read = read_planes(sizes, planes, 10_000_000, 2)
    assert (read.positions_N == positions).all()
    assert (read.steps_N == steps).all()


def several(dtype: torch.dtype, seed: int) -> list[tuple[int, Changes, SizeTable, list[np.ndarray]]]:
    """Return size, changes and planes of many tensors: empty, unchanged, sparse and dense ones."""
    found = []
    for number, numel in enumerate([0, 1, 7, 300, 300, 4097, 0, 255, 256, 1000, 2, 5000]):
        base = random_bits(seed + number, numel, dtype)
        share, step = [(0.0, 1), (0.01, 1), (0.03, 300), (1.0, 1 << 12)][(number + seed) % 4]
        changes = find_changes(base, changed(base, seed, share, step))
        found.append((numel, changes, *write_planes(changes, numel, dtype.itemsize)))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_many_tensors_are_read_as_each_by_itself(dtype: torch.dtype, seed: int) -> None:
    numels, changes, sizes, planes = zip(*several(dtype, seed), strict=True)
    columns = [np.concatenate(column) for column in zip(*planes, strict=True)]
    read = read_all_planes(SizeTable.join(sizes), columns, np.array(numels), dtype.itemsize)
    assert (read.positions_N == np.concatenate([each.positions_N for each in changes])).all()
    assert (read.steps_N == np.concatenate([each.steps_N for each in changes])).all()


@pytest.mark.parametrize(("plane", "num_bytes"), [(0, 1), (2, 1), (4, 2)])
def test_bytes_that_go_over_to_the_next_tensor_are_noticed(plane: int, num_bytes: int) -> None:
    """Each tensor's part of a plane is its own: the two together would fit."""
    changes = Changes(np.array([0, 300, 301, 900]), np.array([1, 300, -400, 2]))
    sizes, planes = write_planes(changes, 5000, 2)
    moved = [
        dataclasses.replace(sizes, counts=sizes.counts + by * (np.arange(len(planes)) == plane))
        for by in (-num_bytes, num_bytes)
    ]
    columns = [np.concatenate([each, each]) for each in planes]
    numels = np.array([5000, 5000])
    read = read_all_planes(SizeTable.join([sizes, sizes]), columns, numels, 2)
    assert (read.steps_N == np.tile(changes.steps_N, 2)).all()
    with pytest.raises(ContentError):
        read_all_planes(SizeTable.join(moved), columns, numels, 2)


def test_find_changes_refuses_what_does_not_match() -> None:
    base = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(DtypeMismatchError):
        find_changes(base, base.to(torch.float16))
    with pytest.raises(ShapeMismatchError):
        find_changes(base, base.view(2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_frames_lead_there_and_back(dtype: torch.dtype) -> None:
    masters = DriftingMasters(SHAPES)
    old = masters.tensors(dtype)
    masters.step(1e-5)
    new = masters.tensors(dtype)
    encoder = DeltaEncoder(old.items(), frame_bytes=20_000)
    delta = encoder.encode(new.items())
    assert len(delta.frames) > 1
    assert delta.num_changes > 0
    there: dict[str, torch.Tensor] = {}
    back: dict[str, torch.Tensor] = {}
    for payload in delta.payloads():
        frame = read_frame(payload, LIMIT)
        assert (frame.base_digest, frame.digest) == (delta.base_digest, delta.digest)
        there |= applied(frame, old)
        inverse = read_frame(write_frame(frame.invert()), LIMIT)
        assert (inverse.base_digest, inverse.digest) == (delta.digest, delta.base_digest)
        back |= applied(inverse, there)
    assert same_bits(there, new)
    assert same_bits(back, old)
    metas = {name: TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in new.items()}
    assert delta.digest == digest((metas[name], fingerprint(tensor)) for name, tensor in new.items())


def mixed(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes in turn, two of them transposed, empty and scalar ones among them."""
    dtypes = [torch.bfloat16, torch.float32, torch.float32, torch.int8, torch.bfloat16, torch.float64]
    shapes = [(30, 20), (), (0, 4), (700,), (8, 9), (5000,)]
    found = {}
    for number, (dtype, shape) in enumerate(zip(dtypes * 2, shapes * 2, strict=True)):
        tensor = random_bits(seed + number, math.prod(shape), dtype).view(shape)
        found[f"t{number}"] = tensor.T if number in (0, 10) else tensor
    return found


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_runs_of_many_dtypes_are_encoded_together(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(encoder_module, "_RUN_BYTES", 6000)
    old = mixed(1)
    encoder = DeltaEncoder(old.items(), frame_bytes=30_000)
    for step in (1, 1000):
        new = {name: changed(tensor.contiguous(), step, share, step) for name, tensor in old.items()}
        delta = encoder.encode(new.items())
        assert len(delta.frames) > 1
        there: dict[str, torch.Tensor] = {}
        for payload in delta.payloads():
            there |= applied(read_frame(payload, LIMIT), old)
        assert same_bits(there, new)
        encoder.advance(delta)
        metas = {name: TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in new.items()}
        assert encoder.digest == digest((metas[name], fingerprint(tensor)) for name, tensor in new.items())
        old = new


def test_a_version_that_the_engine_never_took_does_not_move_the_base() -> None:
    masters = DriftingMasters(SHAPES)
    first = masters.tensors()
    encoder = DeltaEncoder(first.items())
    masters.step(1e-4)
    encoder.encode(masters.tensors().items())
    masters.step(1e-4)
    third = masters.tensors()
    delta = encoder.encode(third.items())
    frame = read_frame(delta.payloads()[0], LIMIT)
    assert same_bits(applied(frame, first), third)
    encoder.advance(delta)
    assert encoder.digest == delta.digest
    assert encoder.encode(third.items()).num_changes == 0
    with pytest.raises(TransactionStateError):
        encoder.advance(delta)


def test_the_encoder_refuses_other_tensors_than_its_base() -> None:
    old = DriftingMasters(SHAPES).tensors()
    encoder = DeltaEncoder(old.items())
    with pytest.raises(CoverageError, match="'c'"):
        encoder.encode((name, tensor) for name, tensor in old.items() if name != "c")
    with pytest.raises(WeightRequestError, match="twice"):
        DeltaEncoder([*old.items(), ("a", old["a"])])


def test_another_base_is_refused_before_anything_is_applied() -> None:
    masters = DriftingMasters(SHAPES)
    old = masters.tensors()
    encoder = DeltaEncoder(old.items())
    masters.step(1e-5)
    frame = encoder.encode(masters.tensors().items()).frames[0]
    other = {name: tensor.clone() for name, tensor in old.items()}
    other["c"][17] = 3.0
    with pytest.raises(BaseMismatchError, match="c: the delta starts from"):
        applied(frame, other)
    with pytest.raises(BaseMismatchError, match="the delta holds"):
        applied(frame, {name: tensor.to(torch.float32) for name, tensor in old.items()})


def test_small_steps_of_a_bfloat16_model_are_35_times_smaller() -> None:
    """Synthetic drift of about 1e-6 a step; `benchmarks.delta` measures real optimiser steps."""
    masters = DriftingMasters({f"layer.{number}": (256, 1024) for number in range(4)})
    encoder = DeltaEncoder(masters.tensors().items())
    masters.step(1e-6)
    delta = encoder.encode(masters.tensors().items())
    assert delta.full_bytes / sum(map(len, delta.payloads())) >= 35


def test_where_everything_changes_the_frame_is_no_larger_than_the_tensors() -> None:
    old = {"a": random_bits(0, 100_000, torch.float32)}
    new = {"a": random_bits(1, 100_000, torch.float32)}
    payload = DeltaEncoder(old.items()).encode(new.items()).payloads()[0]
    assert len(payload) < 400_000 * 1.01 + 1000
    assert same_bits(applied(read_frame(payload, LIMIT), old), new)


def valid_frame() -> tuple[bytes, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    masters = DriftingMasters({"a": (40, 30), "b": (700,)})
    old = masters.tensors()
    masters.step(1e-4)
    new = masters.tensors()
    return DeltaEncoder(old.items()).encode(new.items()).payloads()[0], old, new


def decoded(payload: bytes, old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return applied(read_frame(payload, LIMIT), old)


def test_a_frame_of_a_version_before_is_refused_with_advice() -> None:
    payload, _, _ = valid_frame()
    with pytest.raises(ContentError, match=r"form of release 0\.2\.0; install this engine's package"):
        read_frame(b"LKSDELT1" + payload[8:], LIMIT)


def test_a_list_of_tensors_is_read_once() -> None:
    payload, old, new = valid_frame()
    known: dict[bytes, TensorList] = {}

    def keep(key: bytes, read: Callable[[], TensorList]) -> TensorList:
        if key not in known:
            known[key] = read()
        return known[key]

    one = read_frame(payload, LIMIT, keep)
    assert read_frame(payload, LIMIT, keep).tensors is one.tensors
    other = DeltaEncoder((name, tensor.half()) for name, tensor in old.items())
    (payload,) = other.encode((name, tensor.half()) for name, tensor in new.items()).payloads()
    assert read_frame(payload, LIMIT, keep).tensors is not one.tensors
    assert len(known) == 2


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (8, 1 << 30, "cannot have an index"),  # bytes of the list
        (12, 1 << 10, "index of a delta frame"),  # unpacked
        (16, 1 << 30, "cannot have an index"),  # bytes of the sizes
        (20, 1, "lists 2 tensors and states 1"),
        (20, 1 << 30, "cannot have an index"),
        (24, 1 << 30, "states a size"),  # of a plane
    ],
)
def test_a_head_that_lies_is_refused(at: int, value: int, reason: str) -> None:
    payload = bytearray(valid_frame()[0])
    payload[at : at + 4] = value.to_bytes(4, "little")
    with pytest.raises(ContentError, match=reason):
        read_frame(bytes(payload), LIMIT)


def test_sizes_that_are_neither_dense_nor_sparse_are_refused() -> None:
    sizes = size_table((3, True, (0, 0, 0, 0, 8)), (1, False, (1, 1, 0, 0, 0)))
    written = bytearray(write_sizes(sizes))
    found = read_sizes(bytes(written), 2)
    for one, other in zip(vars(found).values(), vars(sizes).values(), strict=True):
        assert np.array_equal(one, other)
    written[1] = 2
    with pytest.raises(ContentError, match="malformed"):
        read_sizes(bytes(written), 2)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_a_damaged_frame_is_refused_or_harmless(data: st.DataObject) -> None:
    """Bytes flipped, cut, repeated or inserted anywhere: a typed error, or exactly the right content."""
    payload, old, new = valid_frame()
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if kind == "flip":
            damaged[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del damaged[at : at + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        else:
            damaged[at:at] = damaged[at : at + 16]
        if not damaged:
            break
    try:
        result = decoded(bytes(damaged), old)
    except WeightSyncError:
        return
    except KeyError:
        return  # a name that this model does not have: the receiver checks names before it reads
    assert same_bits(result, new)


@pytest.mark.mutant
def test_the_fuzzer_would_notice_a_codec_without_fences() -> None:
    """A changed step decodes well once its fingerprints say so: the fingerprints are what refuses it."""
    payload, old, _ = valid_frame()
    frame = read_frame(payload, LIMIT)
    delta = next(frame.deltas())
    wrong = delta.changes()
    wrong.steps_N[0] *= -1
    result, value = apply_changes(old["a"], wrong, delta.entry.base_fingerprint)
    assert value != delta.entry.result_fingerprint
    assert bits(result) != bits(delta.apply(old["a"]))


def test_caps_hold_before_memory_is_taken() -> None:
    payload, _, _ = valid_frame()
    with pytest.raises(WeightRequestError, match="at most 1000"):
        read_frame(payload, 1000)
    bomb = bytearray(payload)
    bomb[12:16] = (1 << 31).to_bytes(4, "little")  # of the list, unpacked
    with pytest.raises(ContentError, match="cannot have an index"):
        read_frame(bytes(bomb), LIMIT)
    with pytest.raises(ContentError, match="not a delta frame"):
        read_frame(b"", LIMIT)


def test_w10_planes_are_no_larger_than_their_tensor() -> None:
    """Larger planes are refused, as the encoder would have written such a tensor densely."""
    right, wrong = (90, False, (90, 12, 0, 0, 0)), (90, False, (90, 12, 90, 90, 180))
    size_table(right).check(["x"], np.array([100]), np.array([2]))
    with pytest.raises(ContentError, match="y: a delta of 90 changes in 100 elements"):
        size_table(right, wrong).check(["x", "y"], np.array([100, 100]), np.array([2, 2]))
