"""Matrices in 8 and 4 bits as the Triton kernels hold them: what is stored, and `linear` of it, interpreted on the CPU.

Products are judged by float64 products of the values, which `tests.held_reference` defines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import interpreted  # before any kernel

# isort: split
from rollout.core.errors import StartupError
from rollout.kernels.gpu import experts_kernels
from rollout.kernels.gpu import linear as gpu_linear
from rollout.kernels.ops import RowMajorHeld, select_ops
from rollout.kernels.row_places import ROW_FORMS, RowsPlace
from tests.held_reference import held_of
from weight_sync.errors import ContentError
from weight_sync.tensor_meta import Pair

FORMS = pytest.mark.parametrize("form", ROW_FORMS)
HALF = torch.float16
TOLERANCE = 1.5e-3  # a result is rounded once, to 11 bits
ROWS, COLUMNS = (136, 64), 200  # parts of a merged matrix: blocks are cut at both edges


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def _matrix(form: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the storage of matrices that lie one after the other."""
    held, columns = ROW_FORMS[form], parts[0].shape[1]
    storage = held.empty((sum(map(len, parts)),), columns, "cpu")
    for rows, values in zip(storage.split([len(part) for part in parts]), parts, strict=True):
        RowsPlace(held, rows, columns, values.dtype).write(values)
    return storage


def _parts() -> list[torch.Tensor]:
    """Return matrices with blocks of very different scales."""
    parts = [_randn(rows, COLUMNS, seed=rows) for rows in ROWS]
    parts[0][128:] *= 16
    for part in parts:
        part[:, 128:] *= 4
        part[:, 32:64] *= 3
    return parts


# --- what is held -----------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("columns", [200, 64, 40])
def test_values_are_quantised_as_the_format_says(form: str, columns: int) -> None:
    values = _randn(136, columns)
    held = ROW_FORMS[form]
    place = RowsPlace(held, held.empty((136,), columns, "cpu"), columns, HALF)
    place.write(values)
    assert torch.equal(place.read(), held_of(form, values))


@FORMS
def test_pairs_are_held_bit_for_bit(form: str) -> None:
    held, generator = ROW_FORMS[form], torch.Generator().manual_seed(1)
    if form == "fp8":
        weight = torch.randint(0, 256, (136, 200), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
        pair = Pair(weight, torch.rand(2, 2, generator=generator))
    else:
        group = held.held.block[1]
        weight = torch.randint(-8, 8, (136, 200), generator=generator).to(torch.int8)
        scale = torch.rand(136, -(-200 // group), generator=generator).bfloat16()
        pair = Pair(weight, scale, (1, group))
    place = RowsPlace(held, held.empty((3, 136), 200, "cpu")[1], 200, HALF)
    place.write(pair)
    saved = place.saved()
    assert saved.block == pair.block
    for got, wanted in zip(saved[:2], pair[:2], strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))
    other = RowsPlace(held, held.empty((136,), 200, "cpu"), 200, HALF)
    other.restore(saved)
    assert torch.equal(other.storage.view(torch.uint8), place.storage.view(torch.uint8))


@FORMS
def test_rows_do_not_touch_the_rows_beside_them(form: str) -> None:
    storage = _matrix(form, _parts())
    first, before = storage[: ROWS[0]], storage[ROWS[0] :].view(torch.uint8).clone()
    RowsPlace(ROW_FORMS[form], first, COLUMNS, HALF).write(_randn(ROWS[0], COLUMNS, seed=9))
    assert torch.equal(storage[ROWS[0] :].view(torch.uint8), before)


@FORMS
def test_values_that_are_not_finite_are_refused(form: str) -> None:
    values = _randn(8, 64)
    values[3, 5] = float("inf")
    with pytest.raises(ContentError, match="not finite"):
        _matrix(form, [values])


# --- products ---------------------------------------------------------------------------------------------------------


def _error(form: str, tokens: int, bias: bool = False) -> float:
    """Return the largest error of `linear`, over the largest result."""
    parts, x = _parts(), _randn(tokens, COLUMNS, seed=5)
    added = _randn(sum(ROWS), seed=6) if bias else None
    got = gpu_linear.linear(x, _matrix(form, parts), sum(ROWS), added)
    exact = x.double() @ torch.cat([held_of(form, part) for part in parts]).double().T
    exact += 0 if added is None else added.double()
    assert got.shape == exact.shape and got.dtype == HALF
    return float((got.double() - exact).abs().max() / exact.abs().max())


@FORMS
@pytest.mark.parametrize(("tokens", "bias"), [(1, True), (40, False)])
def test_products_are_the_values_products(form: str, tokens: int, bias: bool) -> None:
    assert _error(form, tokens, bias) < TOLERANCE


def _of_exact_steps(form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return activations and a matrix whose products within a step of the depth are exact in float32.

    Then the order of these steps decides all bits, and not the way in which numpy multiplies.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-8, 9, (70, 384), generator=generator).float()
    held = ROW_FORMS[form]
    rows, columns = held.held.block
    integers = torch.randint(-8, 8, (200, 384), generator=generator)
    exponents = torch.tensor([10, -6, 1])[torch.randint(3, (-(-200 // rows), 384 // columns), generator=generator)]
    element, scale = (torch.float8_e4m3fn, torch.float32) if form == "fp8" else (torch.int8, torch.bfloat16)
    storage = held.empty((200,), 384, "cpu")
    scales = (2.0**exponents).to(scale)
    RowsPlace(held, storage, 384, torch.float32).write(Pair(integers.to(element), scales, (rows, columns)))
    return x, storage


@FORMS
def test_a_row_has_the_same_bits_in_every_batch(form: str) -> None:
    x, weight = _of_exact_steps(form)
    whole = gpu_linear.linear(x, weight, 200)
    for rows in (slice(0, 1), slice(3, 20), slice(30, 70)):
        assert torch.equal(gpu_linear.linear(x[rows], weight, 200), whole[rows])
    assert gpu_linear.linear(x[:0], weight, 200).shape == (0, 200)


@pytest.mark.mutant
def test_another_order_of_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _of_exact_steps("fp8")
    whole, constants = gpu_linear.linear(x, weight, 200), gpu_linear.product_constants
    monkeypatch.setattr(gpu_linear, "product_constants", lambda *given: constants(*given) | {"BLOCK_K": 64})
    assert not torch.equal(gpu_linear.linear(x, weight, 200), whole)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.minimum(feature, O - 1) - begin", "feature - feature"),
        ("tl.program_id(0) % blocks * BLOCK_M", "0 * BLOCK_M"),
        ("sums += tl.load(bias_ptr", "sums += 0 * tl.load(bias_ptr"),
        ("(token < num_tokens)[None, :]", "(token < 0)[None, :]"),
    ],
)
def test_wrong_products_are_noticed(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = interpreted.mutated(gpu_linear, tmp_path, (old, new))
    monkeypatch.setattr(gpu_linear, "linear_kernel", wrong.linear_kernel)
    assert not max(_error("fp8", 70, bias=True), _error("fp8", 1, bias=True)) < TOLERANCE


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_the_storage_of_a_format_on_cuda() -> None:
    for form in ROW_FORMS:
        storage: Any = select_ops(torch.bfloat16, "cuda", True, quantization=form).storage
        assert type(storage) is RowMajorHeld and storage.experts_held == ROW_FORMS[form].held
    reason = "--quantization fp8 needs the Triton kernels on CUDA and --dtype bfloat16"
    for dtype, device, available in ((torch.float16, "cuda", True), (torch.bfloat16, "cuda", False)):
        with pytest.raises(StartupError, match=reason):
            select_ops(dtype, device, available, quantization="fp8")
    with pytest.raises(StartupError, match=reason):
        select_ops(torch.bfloat16, "cpu", True, quantization="fp8")
    for other in ("weight_format", "linear_format"):
        with pytest.raises(StartupError, match=f"--cpu-{other.replace('_', '-')} w8 needs the compiled CPU operators"):
            select_ops(torch.bfloat16, "cuda", True, quantization="fp8", **{other: "w8"})  # type: ignore[arg-type]


def test_steps_of_the_depth_are_those_of_the_storage() -> None:
    assert experts_kernels.SCALE_BLOCK.value == ROW_FORMS["fp8"].held.block[1]
    assert experts_kernels.SCALE_GROUP.value == ROW_FORMS["int4"].held.block[1]
