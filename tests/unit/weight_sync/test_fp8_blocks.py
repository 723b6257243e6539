"""`weight_sync.fp8_blocks` against the definition of the format, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests import fp8_reference
from weight_sync.errors import ContentError, DtypeMismatchError, ShapeMismatchError
from weight_sync.fp8_blocks import BLOCK, dequantise, quantise, requantised, scale_shape, scales_of

sizes = st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 256]))


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Draw a matrix with blocks of very different magnitudes, from subnormal numbers up to the largest, or zeros."""
    rows, columns = draw(sizes), draw(sizes)
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    blocks = scale_shape((rows, columns))
    low, high = draw(st.sampled_from([(-3, 0), (-40, 38), (-45, -35)]))
    powers = 10 ** (low + (high - low) * torch.rand(blocks, generator=generator, dtype=torch.float64))
    powers[torch.rand(blocks, generator=generator) < 0.2] = 0
    scale = powers.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64).clamp(-3, 3) * scale
    return values.clamp(-6e4, 6e4).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(bits(found), bits(expected))


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_quantise_and_dequantise_are_the_definition(values: torch.Tensor) -> None:
    weight, scale = quantise(values)
    expected_weight, expected_scale = fp8_reference.quantise(values)
    assert equal(scale, expected_scale)
    assert equal(weight, expected_weight)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert equal(dequantise(weight, scale, dtype), fp8_reference.dequantise(weight, scale, dtype))


@settings(max_examples=40, deadline=None)
@given(matrices())
def test_values_are_within_half_a_step_and_stay_where_they_are(values: torch.Tensor) -> None:
    """A step is 1/8 of the power of two below, or 2^-9 scales; the value of a code is a code again."""
    weight, scale = quantise(values.float())
    found = dequantise(weight, scale, torch.float32)
    scales = scale.repeat_interleave(BLOCK, 0)[: len(values)].repeat_interleave(BLOCK, 1)[:, : values.shape[1]].double()
    is_rough = scales < 2.0**-126  # such a scale has few bits: the largest numbers are cut
    error = (found.double() - values.double()).abs()
    bound = torch.maximum(values.double().abs() / 16, scales * 2.0**-10) * (1 + 1e-5) + 2.0**-149
    assert bool((error <= bound)[~is_rough].all())
    if not bool(is_rough.any()):
        again = dequantise(*quantise(found), torch.float32)
        assert bool(((again.double() - found.double()).abs() <= found.double().abs() * 1e-6).all())


def test_every_code_is_decoded_by_the_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    found = dequantise(codes, torch.tensor([[0.5]]), torch.float32).view(-1)
    for code in range(256):
        expected = fp8_reference.decoded(code) / 2
        assert math.isnan(expected) if math.isnan(found[code]) else float(found[code]) == expected
    assert math.copysign(1, float(found[0x80])) == -1, "minus zero"


def test_ties_go_to_even() -> None:
    halfway = torch.tensor([[448.0, 17, 19, 21, 23, 1.0625, 1.1875]])  # between two codes, of a scale of 1
    weight, scale = quantise(halfway)
    assert scale.item() == 1
    assert weight.float().tolist() == [[448.0, 16, 20, 20, 24, 1.0, 1.25]]


@pytest.mark.parametrize("shape", [(300, 200), (129, 127), (3, 2, 200, 257), (1, 1), (0, 5), (5, 0), (2, 0, 7)])
def test_ragged_edges_stacks_and_nothing(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight, scale = quantise(values)
    assert scale.shape == scale_shape(shape)
    assert weight.shape == values.shape
    found = requantised(values)
    assert found.shape == values.shape
    for at in itertools.product(*map(range, shape[:-2])) if values.numel() else ():
        assert equal(fp8_reference.dequantise(weight[at], scale[at], torch.bfloat16), found[at])


def test_bands_of_a_large_matrix_are_the_same() -> None:
    """The matrix is larger than one band, and has no whole number of blocks."""
    values = torch.randn(1000, 5000, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight, scale = quantise(values)
    for rows in (slice(0, 128), slice(128, 256), slice(896, 1000)):
        part, of_part = quantise(values[rows])
        assert equal(weight[rows], part)
        assert equal(scale[rows.start // 128 : -(-rows.stop // 128)], of_part)


def test_a_shard_within_a_block_has_other_scales() -> None:
    """Weights are quantised whole because rows 0..63 alone miss the largest value of their block."""
    values = torch.ones(128, 128, dtype=torch.bfloat16) * 0.3
    values[100, 0] = 100.0
    assert not torch.equal(requantised(values[:64]), requantised(values)[:64])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(value: float) -> None:
    values = torch.ones(130, 130)
    values[129, 129] = value
    with pytest.raises(ContentError, match="not finite"):
        quantise(values)
    weight, scale = quantise(torch.ones(130, 130))
    scale[1, 1] = value
    with pytest.raises(ContentError, match="negative or not finite"):
        dequantise(weight, scale, torch.bfloat16)


def test_forms_that_are_no_blocks_are_refused() -> None:
    weight, scale = quantise(torch.ones(200, 300))
    for wrong in (scale.t(), scale[:1], scale.view(-1), torch.tensor(1.0), torch.ones(200, 300)):
        with pytest.raises(ShapeMismatchError, match=r"scales of shape \[2, 3\]"):
            dequantise(weight, wrong, torch.bfloat16)
    with pytest.raises(ShapeMismatchError, match="matrix"):
        quantise(torch.ones(300))
    with pytest.raises(DtypeMismatchError, match="float32"):
        dequantise(weight, scale.double(), torch.bfloat16)
    with pytest.raises(DtypeMismatchError, match="float8_e4m3fn"):
        dequantise(weight.view(torch.float8_e5m2), scale, torch.bfloat16)
    with pytest.raises(ContentError, match="negative"):
        dequantise(weight, -scale, torch.bfloat16)


def test_wrong_readings_are_seen_by_the_reference() -> None:
    """These tests would miss wrong scales that the reference took: transposed, inverted, of blocks of 127."""
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    values *= torch.tensor([[1.0, 8.0], [64.0, 512.0]]).repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight, scale = quantise(values)
    right = fp8_reference.dequantise(weight, scale, torch.bfloat16)
    wrong = {
        "transposed": fp8_reference.dequantise(weight, scale.t().contiguous(), torch.bfloat16),
        "inverted": fp8_reference.dequantise(weight, 1 / scale, torch.bfloat16),
        "127": fp8_reference.dequantise(weight, torch.nn.functional.pad(scale, (0, 1, 0, 1)), torch.bfloat16, 127),
    }
    assert equal(dequantise(weight, scale, torch.bfloat16), right)
    for name, values_of in wrong.items():
        assert not torch.equal(values_of, right), name


def test_scales_of_a_part() -> None:
    shape = (4, 300, 260)
    assert scales_of((), shape) == (slice(None), slice(0, 3), slice(0, 3))
    assert scales_of((2, slice(0, 100)), shape) == (2, slice(0, 1), slice(0, 3))
    assert scales_of((2, slice(100, 300)), shape) == (2, slice(0, 3), slice(0, 3))
    assert scales_of((2, slice(128, 256), slice(130, 140)), shape) == (2, slice(1, 2), slice(1, 2))
    assert scales_of((slice(None), slice(0, 300, 2)), shape) == (slice(None), slice(0, 3), slice(0, 3))
    assert scales_of((1, slice(300, 300)), shape) == (1, slice(0, 0), slice(0, 3))


def test_transformers_reads_the_same_values() -> None:
    """transformers takes whole blocks only."""
    values = torch.randn(3, 384, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight, scale = quantise(values)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert equal(dequantise(weight, scale, torch.bfloat16), theirs)
