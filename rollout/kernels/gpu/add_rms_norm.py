"""`add_rms_norm`: the residual sum and RMSNorm of a row as one Triton kernel.

Each row has one program.  A row's bits depend on that row alone: the sum of squares runs in one order for each D.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 `x` to `dtype`, and return it as float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def normed(x, sum_of_squares, size, eps, weight, weight_offset, HAS_OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Return `x` over its root mean square, times the weight: rounded before and after, or with an offset once."""
    x = x * tl.div_rn(1.0, tl.sqrt_rn(sum_of_squares / size + eps))
    if HAS_OFFSET:
        x = x * (weight_offset + weight)
    else:
        x = rounded(x, dtype) * weight
    return rounded(x, dtype)


@triton.jit
def add_rms_norm_kernel(
    residual,
    hidden,
    weight,
    out,
    cleared,
    residual_stride,
    hidden_stride,
    eps,
    weight_offset,
    ADDS: tl.constexpr,
    CLEARS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    wait_for_predecessor()
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_D)
    inside = at < D
    if CLEARS:
        tl.store(cleared + row, 0)
    x = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
        x = rounded(x + added, dtype)
        tl.store(residual + row * residual_stride + at, x.to(dtype), mask=inside)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    x = normed(x, tl.sum(x * x, 0), D, eps, w, weight_offset, HAS_OFFSET, dtype)
    tl.store(out + row * D + at, x.to(dtype), mask=inside)


def add_rms_norm(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> torch.Tensor:
    """Add `hidden` in place, and return the norm [T, D].  Rows may lie apart from one another, elements may not."""
    return normed_rows(residual, hidden, weight, eps, weight_offset)


def normed_rows(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None,
    cleared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel of `add_rms_norm`.  It also sets `cleared` [T] int32 to zero, for the kernel behind it."""
    num_tokens, size = residual.shape
    out = torch.empty((num_tokens, size), dtype=residual.dtype, device=residual.device)
    assert residual.stride(1) == weight.stride(0) == 1 and (hidden is None or hidden.stride(1) == 1)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(size)
    add_rms_norm_kernel[(num_tokens,)](
        residual,
        residual if hidden is None else hidden,
        weight,
        out,
        out if cleared is None else cleared,
        residual.stride(0),
        0 if hidden is None else hidden.stride(0),
        eps,
        weight_offset or 0.0,
        ADDS=hidden is not None,
        CLEARS=cleared is not None,
        HAS_OFFSET=weight_offset is not None,
        D=size,
        BLOCK_D=block,
        num_warps=norm_warps(block),
        enable_fp_fusion=False,
        **launch_options(residual),
    )
    return out


def norm_warps(block: int) -> int:
    """Choose the warps so that a thread has eight elements, but at most eight warps."""
    return min(max(block // 256, 1), 8)


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for hidden sizes of published models and both forms of the weight."""
    pointers = dict.fromkeys(("residual", "hidden", "weight", "out"), "*bf16")
    numbers = {"cleared": "*i32", "residual_stride": "i32", "hidden_stride": "i32"}
    floats = dict.fromkeys(("eps", "weight_offset"), "fp32")
    return [
        (
            f"add_rms_norm D={size}{' offset' if offset else ''}",
            add_rms_norm_kernel,
            pointers | numbers | floats,
            {"ADDS": True, "CLEARS": True, "HAS_OFFSET": offset, "D": size, "BLOCK_D": triton.next_power_of_2(size)},
            norm_warps(triton.next_power_of_2(size)),
            3,
        )
        for size, offset in ((2048, False), (2048, True), (7168, False))
    ]
