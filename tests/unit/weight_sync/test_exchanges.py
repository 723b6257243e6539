"""Exclusive or and sums of many parts: the compiled operators and plain torch agree, and refuse the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollout.kernels.build import load_kernels
from weight_sync.exchanges import fold, fold_plainly, word_sums, word_sums_plainly

Parts = list[torch.Tensor]
Fold = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
SIZES = st.lists(st.tuples(st.sampled_from([0, 1, 3, 8, 100, 5000]), st.booleans()), min_size=1, max_size=200)
"""The words of each part, and whether they are bytes."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    assert load_kernels().available


def parts_of(sizes: list[tuple[int, bool]], seed: int) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        if is_bytes
        else torch.randint(low, high, (size,), generator=generator)
        for size, is_bytes in sizes
    ]


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES)
def test_compiled_and_plain_operators_agree(sizes: list[tuple[int, bool]]) -> None:
    into, other = parts_of(sizes, 1), parts_of(sizes, 2)
    expected = [one ^ two for one, two in zip(into, other, strict=True)]
    sums = [part.sum() for part in into]
    assert torch.equal(word_sums(into), torch.stack(sums)) and torch.equal(word_sums_plainly(into), torch.stack(sums))
    plain, before = [part.clone() for part in into], [part.clone() for part in other]
    fold_plainly(plain, other)
    fold(into, other)
    for parts in (plain, into):
        assert all(torch.equal(one, two) for one, two in zip(parts, expected, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(other, before, strict=True))


@pytest.mark.parametrize("compute", [fold, fold_plainly], ids=["compiled", "plain"])
@pytest.mark.parametrize("wrong", [[(8, False)], [(8, False), (4, False)], [(8, False), (5, True)]])
def test_parts_that_do_not_fit_are_refused_before_any_is_written(compute: Fold, wrong: list[tuple[int, bool]]) -> None:
    into = parts_of([(8, False), (5, False)], 1)
    before = [part.clone() for part in into]
    with pytest.raises((RuntimeError, AssertionError), match="the parts to fold differ"):
        compute(into, parts_of(wrong, 2))
    assert all(torch.equal(one, two) for one, two in zip(into, before, strict=True))


@pytest.mark.parametrize(
    "part", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.int64)[:, 0]], ids=["floats", "strided"]
)
def test_what_is_no_part_of_memory_is_refused(part: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="a part must be int64 or uint8"):
        fold([part], [part.clone()])
    with pytest.raises(RuntimeError, match="a part must be int64 or uint8"):
        word_sums([part])
