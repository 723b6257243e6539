"""The compiled operators between values and FP8 blocks or INT4 groups have the bits of the plain ones."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import native_ops
from weight_sync import fp8_blocks, int4_groups


def empty(values: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    if form == "fp8":
        scale = torch.empty(fp8_blocks.scale_shape(values.shape))
        return torch.empty(values.shape, dtype=fp8_blocks.QUANTISED), scale
    groups = -(-values.shape[1] // group_of(form))
    return torch.empty(values.shape, dtype=torch.int8), torch.empty(len(values), groups, dtype=torch.bfloat16)


def group_of(form: str) -> int:
    return {"int4": 32, "int4-128": 128}[form]


def compiled(values: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, bool]:
    weight, scale = empty(values, form)
    if form == "fp8":
        return weight, scale, torch.ops.weight_sync.quantise_fp8(values, weight, scale)
    return weight, scale, torch.ops.weight_sync.quantise_int4(values, weight, scale, group_of(form))


def plain(values: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, bool]:
    weight, scale = empty(values, form)
    if form == "fp8":
        return weight, scale, fp8_blocks.quantise_plainly(values, weight, scale)
    return weight, scale, int4_groups.quantise_plainly(values, weight, scale, group_of(form))


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many magnitudes: zeros of both signs, ties, denormal ones, and ones near the largest."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator)
    values = values * torch.randn(rows, columns, generator=generator).exp()
    values[rows // 2 :] = values[rows // 2 :].mul(4).round_()
    values[0, ::3], values[0, 1::3] = 0.0, -0.0
    values[1 % rows] *= 1e-38
    values[2 % rows] = 2.0**-133
    values[3 % rows, : columns // 2] *= 1e37
    return values.to(dtype)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    native_ops()


@pytest.mark.parametrize("form", ["fp8", "int4", "int4-128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 33), (130, 300), (256, 128)])
def test_compiled_bits_are_the_plain_ones(form: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    values = matrix(rows, columns, dtype).clamp_(-2e4, 2e4)  # three times that is a float16
    for each in (values, values.mul(3), values.t().contiguous().t()):
        one, other = compiled(each, form), plain(each, form)
        assert one[2] and other[2]
        assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8))
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_ties_are_found_by_an_exact_division_alone(form: str) -> None:
    """A product with the reciprocal of the scale rounds some of them to the other side."""
    largest = 448.0 if form == "fp8" else 7.5
    ties = (1 + torch.arange(1, 16, 2) / 16) * 2.0 ** torch.arange(-5, 8)[:, None] if form == "fp8" else None
    exact = torch.cat([torch.tensor([largest]), torch.arange(-7.5, 7) if ties is None else ties.flatten()])[None]
    differ = 0
    for scale in (3.0, 5.0, 7.0, 11.0, 13.0):
        weight, scales, _ = compiled(exact * scale, form)
        assert scales.unique().tolist() == [scale]
        if form == "fp8":
            expected, product = (x.to(weight.dtype) for x in (exact, exact * scale * (1 / torch.tensor(scale))))
        else:
            expected, product = (
                x.round().clamp(-8, 7).to(torch.int8) for x in (exact, exact * scale * (1 / torch.tensor(scale)))
            )
        assert torch.equal(weight.view(torch.uint8), expected.view(torch.uint8))
        differ += int((product.view(torch.uint8) != expected.view(torch.uint8)).sum())
    assert differ > 0


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_noticed_anywhere(form: str, wrong: float) -> None:
    for row, column in ((0, 0), (129, 299), (64, 31)):
        values = matrix(130, 300, torch.bfloat16)
        values[row, column] = wrong
        assert not compiled(values, form)[2] and not plain(values, form)[2]


@pytest.mark.parametrize("form", ["fp8", "int4", "int4-128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_compiled_values_are_the_plain_ones(form: str, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 1), (130, 300), (5, 33)):
        weight, scale, _ = plain(matrix(rows, columns, torch.float32).clamp_(-6e4, 6e4), form)
        weight.view(torch.uint8)[-1, -1] = 0x7F  # no number in FP8
        one, other = (torch.full((rows, columns), float("nan"), dtype=dtype) for _ in range(2))
        if form == "fp8":
            torch.ops.weight_sync.dequantise_fp8(weight, scale, one)
            fp8_blocks.dequantise_plainly(weight, scale, other)
        else:
            torch.ops.weight_sync.dequantise_int4(weight, scale, one, group_of(form))
            int4_groups.dequantise_plainly(weight, scale, other, group_of(form))
        assert form != "fp8" or (bool(one[-1, -1].isnan()) and bool(other[-1, -1].isnan()))
        assert torch.equal(one.nan_to_num_(), other.nan_to_num_())
