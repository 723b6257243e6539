"""FP8 weights with a scale for each block, as DeepSeek-V3's checkpoints have them.

    X.weight             float8_e4m3fn [..., R, C]
    X.weight_scale_inv   float32       [..., R / 128, C / 128], rounded up: blocks at the lower and right edge are cut

    value = float32(weight) * float32(scale of its block), in float32, then rounded to the dtype that is asked for

Scales may also be bfloat16, as Qwen's checkpoints have them, or float16: float32 has their values exactly.

To quantise: scale = largest magnitude of the block / 448, weight = value / scale, both in float32, rounded to the
nearest, ties to even.  A block whose scale would be zero (all its values are, or are below 448 * 2^-150) has scale 1.
`torch.ops.weight_sync` has operators for both ways; engines on a CPU bring compiled kernels for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad

from weight_sync.errors import ContentError, DtypeMismatchError, ShapeMismatchError
from weight_sync.tensor_meta import dtype_name

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
LARGEST = 448.0  # of float8_e4m3fn
QUANTISED = torch.float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BAND = 1 << 20  # elements worked on at a time: a few float32 temporaries of 4 MiB


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of `shape`.  Raises `ShapeMismatchError` below two dimensions."""
    if len(shape) < 2:
        raise ShapeMismatchError(f"blocks of {BLOCK} x {BLOCK} need a matrix, got shape {list(shape)}")
    *leading, rows, columns = shape
    return (*leading, -(-rows // BLOCK), -(-columns // BLOCK))


def scales_of(index: Sequence[int | slice], shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Return the index of the scales of `weight[index]`, where `weight` has `shape`: one for every block it touches."""
    at = [*index, *[slice(None)] * (len(shape) - len(index))]
    found: list[int | slice] = list(at[:-2])
    for size, selected in zip(shape[-2:], at[-2:], strict=True):
        span = range(size)[selected if isinstance(selected, slice) else slice(selected, selected + 1)]
        first, last = (min(span), max(span)) if span else (0, -1)
        found.append(slice(first // BLOCK, last // BLOCK + 1))
    return tuple(found)


def dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values, [..., R, C] in `dtype`, on the weight's device.

    Raises `DtypeMismatchError`, `ShapeMismatchError`, `ContentError` for a scale that is negative or not finite.
    """
    for tensor, wanted in ((weight, (QUANTISED,)), (scale, SCALE_DTYPES)):
        if tensor.dtype not in wanted:
            expected = " or ".join(map(dtype_name, wanted))
            raise DtypeMismatchError(f"expected {expected}, got {dtype_name(tensor.dtype)}")
    if tuple(scale.shape) != scale_shape(weight.shape):
        raise ShapeMismatchError(
            f"a weight of shape {list(weight.shape)} has scales of shape {list(scale_shape(weight.shape))}, "
            f"got {list(scale.shape)}"
        )
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise ContentError("a scale is negative or not finite")
    scale = scale.to(torch.float32)
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for source, scale_rc, target in zip(_matrices(weight), _matrices(scale), _matrices(values), strict=True):
        torch.ops.weight_sync.dequantise_fp8(source, scale_rc, target)
    return values


def dequantise_plainly(weight: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> None:
    """Compute the operator without a kernel: fill in the values [R, C]."""
    columns = weight.shape[-1]
    for rows in _bands(*weight.shape):
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        scale_rC = scale[blocks].repeat_interleave(BLOCK, 1)[:, :columns]
        x_rBC = _padded(weight[rows].to(torch.float32), columns).view(-1, BLOCK, columns)
        product_RC = x_rBC.mul_(scale_rC[:, None]).view(-1, columns)
        values[rows] = product_RC[: rows.stop - rows.start].to(values.dtype)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [..., R, C] and scales of floating-point values of that shape.

    Raises `ShapeMismatchError`, `ContentError` for a value that is not finite.
    """
    scale = torch.empty(scale_shape(values.shape), dtype=torch.float32, device=values.device)
    weight = torch.empty(values.shape, dtype=QUANTISED, device=values.device)
    for source, scale_rc, target in zip(_matrices(values.detach()), _matrices(scale), _matrices(weight), strict=True):
        if not torch.ops.weight_sync.quantise_fp8(source, target, scale_rc):
            raise ContentError("values that are not finite cannot be quantised")
    return weight, scale


def quantise_plainly(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Compute the operator without a kernel: fill in weight [R, C] and scale.  False: a value is not finite."""
    columns = values.shape[-1]
    for rows in _bands(*values.shape):
        whole = -(-columns // BLOCK) * BLOCK
        x_rBcB = _padded(values[rows].to(torch.float32), whole).view(-1, BLOCK, whole // BLOCK, BLOCK)
        largest_rc = x_rBcB.abs().amax((1, 3))
        if not bool(largest_rc.isfinite().all()):
            return False
        found_rc = largest_rc / torch.full_like(largest_rc, LARGEST)  # by a number, CUDA multiplies with 1 / 448
        found_rc = torch.where(found_rc > 0, found_rc, 1.0)
        scale[rows.start // BLOCK : -(-rows.stop // BLOCK)] = found_rc
        # A scale below the normal numbers is rough: the quotient may be beyond the largest number.
        quotient = (x_rBcB / found_rc[:, None, :, None]).clamp_(-LARGEST, LARGEST).view(-1, whole)
        weight[rows] = quotient[: rows.stop - rows.start, :columns].to(QUANTISED)
    return True


torch.library.define("weight_sync::quantise_fp8", "(Tensor values, Tensor(a!) weight, Tensor(b!) scale) -> bool")
torch.library.impl("weight_sync::quantise_fp8", "CompositeExplicitAutograd", quantise_plainly)
torch.library.define("weight_sync::dequantise_fp8", "(Tensor weight, Tensor scale, Tensor(a!) values) -> ()")
torch.library.impl("weight_sync::dequantise_fp8", "CompositeExplicitAutograd", dequantise_plainly)


def requantised(values: torch.Tensor) -> torch.Tensor:
    """Quantise values and return them as a checkpoint of them is loaded, in their own dtype.  Raises as `quantise`."""
    return dequantise(*quantise(values), values.dtype)


def not_a_number(shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [..., R, C] and scales whose values are all NaN.  Raises `ShapeMismatchError`."""
    return torch.full(tuple(shape), float("nan")).to(QUANTISED), torch.ones(scale_shape(shape))


def _matrices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the matrices of a stack, views."""
    yield from (tensor,) if tensor.dim() == 2 else (each for part in tensor for each in _matrices(part))


def _bands(rows: int, columns: int) -> Iterator[slice]:
    """Yield whole rows of blocks, some at a time."""
    if rows and columns:
        step = max(1, _BAND // (columns * BLOCK)) * BLOCK
        yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _padded(matrix: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the matrix contiguous, with zeros at its lower and right edge, up to whole blocks of rows and to
    `columns`.
    """
    edge = (0, columns - matrix.shape[1], 0, -matrix.shape[0] % BLOCK)
    return (pad(matrix, edge) if any(edge) else matrix).contiguous()
