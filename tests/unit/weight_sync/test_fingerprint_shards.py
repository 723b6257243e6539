"""Fingerprints of shards of any form, of deltas and of many tensors at once, and the three ways to a block's sum."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.kernels.build import load_kernels
from tests.tiers import examples
from weight_sync.block_sums import digit_block_sums, plain_block_sums, wrapping_block_sums
from weight_sync.content_check import check_content
from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.fingerprint import (
    EXPONENTS,
    combine,
    fingerprint,
    fingerprint_slice,
    fingerprint_update,
    word_factors,
)
from weight_sync.fingerprint_words import BLOCK, UNSIGNED, multipliers

BF16 = torch.bfloat16


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


# --- the sums of blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", UNSIGNED)
@pytest.mark.parametrize("num_blocks", [1, 7, 8, 67, 300])
def test_all_ways_give_the_same_sums(width: int, num_blocks: int) -> None:
    assert load_kernels().available
    words = random_tensor((num_blocks, BLOCK), UNSIGNED[width], seed=width)
    want = wrapping_block_sums(words)
    assert torch.equal(digit_block_sums(words), want)
    table = multipliers("cpu")
    assert torch.equal(plain_block_sums(words, table, 0)[0], want)
    assert torch.equal(torch.ops.lockstep.block_sums(words, table, 0)[0], want)
    assert torch.equal(torch.ops.weight_sync.block_sums(words, table, 0)[0], want)


@pytest.mark.parametrize("width", UNSIGNED)
@pytest.mark.parametrize(("first", "size"), [(0, 1), (0, 64), (5, 64), (BLOCK - 3, 3), (1, BLOCK - 1)])
@pytest.mark.parametrize("num_blocks", [3, 40])
def test_shorter_blocks_meet_the_multipliers_that_they_are_given(
    width: int, first: int, size: int, num_blocks: int
) -> None:
    words = random_tensor((num_blocks, size), UNSIGNED[width], seed=size)
    table = multipliers("cpu")[first : first + size]
    want = (words.to(torch.int64) * table).sum(1)
    for kernel in (plain_block_sums, torch.ops.lockstep.block_sums):
        assert torch.equal(kernel(words, table, 0)[0], want)
    assert torch.equal(digit_block_sums(words, first), want)
    others = table.clone()  # not a part of the fixed ones, for which there are no digits
    others[0] += 2
    assert torch.equal(plain_block_sums(words, others, 0)[0], (words.to(torch.int64) * others).sum(1))


def test_the_engine_brings_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels().available
    monkeypatch.setattr("weight_sync.block_sums.wrapping_block_sums", None)
    words, table = random_tensor((1, BLOCK), torch.uint16), multipliers("cpu")
    torch.ops.weight_sync.block_sums(words, table, 0)
    with pytest.raises(TypeError):
        plain_block_sums(words, table, 0)


@pytest.mark.parametrize("width", UNSIGNED)
@pytest.mark.parametrize("byte", [0, 0x7F, 0x80, 0xFF])
def test_digits_are_exact_at_the_extremes(width: int, byte: int) -> None:
    """The largest sums that an int8 product can meet: nothing saturates on the way."""
    words = torch.full((8, BLOCK * width), byte, dtype=torch.uint8).view(UNSIGNED[width])
    assert torch.equal(digit_block_sums(words), wrapping_block_sums(words))


def test_a_digit_that_is_off_by_one_shows() -> None:
    """The comparison above can fail."""
    words = random_tensor((9, BLOCK), torch.uint16)
    wrong = words.clone()
    wrong.view(torch.int16)[4, 17] ^= 1
    assert not torch.equal(digit_block_sums(words), wrapping_block_sums(wrong))


# --- many tensors -------------------------------------------------------------------------------------------------


def bucket_of(numels: list[int], dtypes: list[torch.dtype]) -> list[tuple[str, torch.Tensor]]:
    """Return tensors with finite values end to end in one area, as in a bucket."""
    sizes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes)]
    area = torch.randint(0, 60, (sum(sizes),), dtype=torch.uint8)
    parts = area.split(sizes)
    return [(f"t{i}", part.view(dtype)) for i, (part, dtype) in enumerate(zip(parts, dtypes))]


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from((0, 1, 5, BLOCK, 3 * BLOCK, BLOCK + 8)), st.booleans()), min_size=1, max_size=9
    )
)
@settings(max_examples=examples(60), deadline=None)
def test_many_fingerprints_at_once_are_those_of_each(kinds: list[tuple[int, bool]]) -> None:
    named = bucket_of(
        [numel for numel, _ in sorted(kinds, key=lambda kind: not kind[1])],
        [torch.float32 if wide else BF16 for _, wide in sorted(kinds, key=lambda kind: not kind[1])],
    )
    for order in (named, named[::-1], named[::2] + named[1::2]):
        found = check_content(order, {})
        assert found == {name: fingerprint(tensor) for name, tensor in order}
        assert list(found) == [name for name, _ in order]


@pytest.mark.parametrize("wrong", range(6))
def test_the_one_that_is_wrong_among_many_is_named(wrong: int) -> None:
    named = bucket_of([BLOCK, 2 * BLOCK, BLOCK, 7, 9, BLOCK], [BF16] * 6)
    right = check_content(named, {})
    check_content(named, right)
    name, tensor = named[wrong]
    tensor[-1] += 1
    with pytest.raises(ContentError, match=rf"^{name}: fingerprint"):
        check_content(named, right)
    tensor[-1] = float("nan")
    with pytest.raises(ContentError, match=rf"not finite in {name}$"):
        check_content(named, {})


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    """Both by the operator's vectors, of eight blocks, and by its loop over the rest."""
    assert load_kernels().available
    for position in (0, 7 * BLOCK + 9, 8 * BLOCK - 1, 8 * BLOCK, 11 * BLOCK - 1):
        tensor = torch.ones(11 * BLOCK, dtype=dtype)
        tensor[position] = value
        with pytest.raises(ContentError, match="not finite in weight"):
            check_content([("weight", tensor)], {})


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_smallest_finite_values_pass(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = [limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, -0.0]
    tensor = torch.tensor(values, dtype=dtype).repeat(2 * BLOCK)[: 9 * BLOCK]
    assert check_content([("weight", tensor)], {}) == {"weight": fingerprint(tensor)}


def test_a_mask_that_misses_a_bit_shows() -> None:
    """The comparisons above can fail: with one bit less the largest value counts as infinite."""
    words = torch.full((9, BLOCK), torch.finfo(BF16).max, dtype=BF16).view(torch.uint16)
    for operator in (torch.ops.weight_sync.block_sums, plain_block_sums):
        assert not operator(words, multipliers("cpu"), 0x7F80)[1].any()
        assert operator(words, multipliers("cpu"), 0x7F00)[1].all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_both_find_the_same_values_that_are_not_finite(dtype: torch.dtype) -> None:
    assert load_kernels().available
    tensor = torch.ones(150, BLOCK, dtype=dtype)
    tensor[3, 5], tensor[149, 0], tensor[128, BLOCK - 1] = float("nan"), float("inf"), float("-inf")
    words, exponent = tensor.view(UNSIGNED[dtype.itemsize]), EXPONENTS[dtype]
    for operator in (torch.ops.lockstep.block_sums, plain_block_sums):
        masked_N = operator(words, multipliers("cpu"), exponent)[1]
        assert masked_N.nonzero().view(-1).tolist() == [3, 128, 149]


# --- slices -------------------------------------------------------------------------------------------------------


def columns(shape: tuple[int, int], parts: int) -> list[tuple[slice, slice]]:
    edges = [shape[1] * part // parts for part in range(parts + 1)]
    return [(slice(None), slice(first, last)) for first, last in itertools.pairwise(edges)]


@pytest.mark.parametrize("shape", [(64, 96), (3, 40_000), (2, 300_000), (5000, 6), (300, 768), (40, 6144), (50, 5003)])
@pytest.mark.parametrize("parts", [2, 3])
def test_column_shards_add_up(shape: tuple[int, int], parts: int) -> None:
    """Tensor parallelism cuts along the input features; the runs are short and long."""
    full = random_tensor(shape)
    values = [fingerprint_slice(full[index], shape, index) for index in columns(shape, parts)]
    assert combine(*values) == fingerprint(full)


@pytest.mark.parametrize("index", [(slice(2, 5),), (slice(1, 6, 2), 3), (0, slice(4, 11), slice(1, None, 3)), ()])
def test_the_factors_of_words_are_those_of_the_whole(index: tuple[int | slice, ...]) -> None:
    """With one word set to 1 in a slice of zeros, the fingerprint grows by the factor of this word."""
    full = torch.zeros(6, 20, 36, dtype=torch.uint8)
    factors = word_factors(full.shape, index).tolist()
    assert len(factors) == full[index].numel()
    empty = fingerprint(full)
    for at in range(0, len(factors), max(len(factors) // 7, 1)):
        one = torch.zeros(full[index].shape, dtype=torch.uint8)
        one.view(-1)[at] = 1
        whole = full.clone()
        whole[index] = one
        assert combine(fingerprint(whole), -empty) == combine(factors[at])


def test_shards_of_every_form_add_up() -> None:
    """The forms are rows, columns, experts, interleaved rows and blocks of two dimensions; each covers the whole."""
    full = random_tensor((6, 20, 36))
    halves, thirds = (slice(0, 10), slice(10, 20)), (slice(0, 12), slice(12, 24), slice(24, 36))
    every = slice(None)
    covers: list[list[tuple[int | slice, ...]]] = [
        [()],
        [(expert,) for expert in range(6)],
        [(slice(0, 4),), (slice(4, None),)],
        [(every, rows) for rows in halves],
        [(every, every, columns) for columns in thirds],
        [(expert, rows, columns) for expert in range(6) for rows in halves for columns in thirds],
        [(slice(first, None, 2),) for first in range(2)],
        [(every, slice(first, None, 5), slice(second, None, 3)) for first in range(5) for second in range(3)],
        [(every, every, column) for column in range(36)],
        [(slice(0, 6), slice(-20, -3)), (slice(0, 6), slice(-3, 20)), (slice(2, 2),)],
    ]
    for cover in covers:
        values = [fingerprint_slice(full[index], (6, 20, 36), index) for index in cover]
        assert combine(*values) == fingerprint(full), cover


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), dtype=st.sampled_from([BF16, torch.float32, torch.float64, torch.uint8]))
def test_a_slice_is_the_whole_less_the_rest(data: st.DataObject, dtype: torch.dtype) -> None:
    """A random box contributes the sum that its elements contribute one by one."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    index: list[int | slice] = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        if data.draw(st.booleans()):
            index.append(data.draw(st.integers(0, size - 1)))
        else:
            start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
            index.append(slice(start, stop, data.draw(st.integers(1, 3))))
    full = random_tensor(shape, dtype, seed=sum(shape))
    flat = torch.arange(full.numel()).view(shape)[tuple(index)].reshape(-1)
    singly = [fingerprint(full.view(-1)[i : i + 1], offset=i) for i in flat.tolist()]
    assert fingerprint_slice(full[tuple(index)], shape, index) == combine(*singly)


def test_shards_in_the_wrong_place_show() -> None:
    """Two column shards are exchanged, a shard is counted twice, or a shard is left out."""
    full = random_tensor((32, 64))
    left, right = columns((32, 64), 2)
    a, b = (fingerprint_slice(full[index], (32, 64), index) for index in (left, right))
    exchanged = combine(fingerprint_slice(full[right], (32, 64), left), fingerprint_slice(full[left], (32, 64), right))
    assert combine(a, b) == fingerprint(full)
    assert len({combine(a, b), exchanged, combine(a, a, b), a}) == 4


def test_slices_that_do_not_fit_are_refused() -> None:
    tensor = random_tensor((4, 6))
    for shape, index in [
        ((4, 6), (slice(0, 3),)),  # selects [3, 6]
        ((6, 4), ()),
        ((4, 6), (5,)),
        ((4, 6), (-1,)),
        ((4, 6), (slice(None), slice(None), slice(None))),
        ((4, 6), (slice(None, None, -1),)),
    ]:
        with pytest.raises(WeightRequestError):
            fingerprint_slice(tensor, shape, index)


# --- deltas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 1000, 70_000])
def test_a_delta_updates_the_fingerprint_and_takes_it_back(dtype: torch.dtype, count: int) -> None:
    old = random_tensor((400, 500), dtype, seed=1)
    new = old.clone()
    at = torch.randperm(old.numel(), generator=torch.Generator().manual_seed(2))[:count]
    new.view(-1)[at] = random_tensor((count,), dtype, seed=3)
    before, after = old.view(-1)[at], new.view(-1)[at]
    updated = fingerprint_update(fingerprint(old), at, before, after)
    assert updated == fingerprint(new)
    assert fingerprint_update(updated, at, after, before) == fingerprint(old)
    if count > 1:
        assert fingerprint_update(fingerprint(old), at.roll(1), before, after) != updated


def test_deltas_that_do_not_match_are_refused() -> None:
    at, words = torch.arange(3), random_tensor((3,))
    for indices, old, new in [
        (at, words[:2], words),
        (at.int(), words, words),
        (at, words, words.float()),
        (at.view(1, 3), words.view(1, 3), words.view(1, 3)),
    ]:
        with pytest.raises(WeightRequestError):
            fingerprint_update(0, indices, old, new)


def test_exchanging_any_two_of_64_rows_shows() -> None:
    """The additive form shows each of 2016 pairs: rows of one block and of different blocks."""
    full = random_tensor((64, 200))
    rows = {(i, j): fingerprint_slice(full[j], (64, 200), (i,)) for i in range(64) for j in range(64)}
    whole = fingerprint(full)
    values = {
        combine(whole, -rows[i, i], -rows[j, j], rows[i, j], rows[j, i])
        for i, j in itertools.combinations(range(64), 2)
    }
    assert len(values) == 64 * 63 // 2 and whole not in values
