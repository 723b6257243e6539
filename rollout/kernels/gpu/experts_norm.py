"""The norm behind experts as one Triton kernel: a program for each row sums the outputs of the row's experts itself.

    without     weighted sum [T, D] -> residual += sum, norm        two launches
    with                               residual += sum, norm        one

Sum and norm have the orders and the roundings of `fused_experts` and `add_rms_norm`, and so the same bits.

Shapes: T tokens, D hidden, K slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import norm_warps, normed, rounded
from rollout.kernels.gpu.experts_kernels import weighted
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor
from rollout.kernels.operators.fused_experts import ExpertOutputs


@triton.jit
def experts_norm_kernel(
    residual,
    rows,
    ids,
    weights,
    weight,
    out,
    residual_stride,
    eps,
    weight_offset,
    HAS_OFFSET: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    wait_for_predecessor()
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_D)
    inside = at < D
    x = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    added = weighted(rows, ids, weights, row, at, D, K, P, BLOCK_D)
    x = rounded(x + rounded(added, dtype), dtype)
    tl.store(residual + row * residual_stride + at, x.to(dtype), mask=inside)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    x = normed(x, tl.sum(x * x, 0), D, eps, w, weight_offset, HAS_OFFSET, dtype)
    tl.store(out + row * D + at, x.to(dtype), mask=inside)


def experts_norm(
    residual: torch.Tensor,
    hidden: ExpertOutputs,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> torch.Tensor:
    """Add the weighted sum of `hidden` to `residual` [T, D] in place, and return the norm [T, D]."""
    num_tokens, size = residual.shape
    out = torch.empty((num_tokens, size), dtype=residual.dtype, device=residual.device)
    assert residual.stride(1) == weight.stride(0) == 1 and all(part.is_contiguous() for part in hidden[:3])
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(size)
    experts_norm_kernel[(num_tokens,)](
        residual,
        *hidden[:3],
        weight,
        out,
        residual.stride(0),
        eps,
        weight_offset or 0.0,
        HAS_OFFSET=weight_offset is not None,
        K=hidden.ids_TK.shape[1],
        P=hidden.num_experts,
        D=size,
        BLOCK_D=block,
        num_warps=norm_warps(block),
        enable_fp_fusion=False,
        **launch_options(residual),
    )
    return out


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for the hidden sizes of Qwen3-30B-A3B, GPT-OSS and the largest models."""
    signature = dict.fromkeys(("residual", "rows", "weights", "weight", "out"), "*bf16")
    signature |= {"ids": "*i64", "residual_stride": "i32", "eps": "fp32", "weight_offset": "fp32"}
    cases = []
    for size, top_k, experts in ((2048, 8, 128), (2880, 4, 128), (7168, 8, 256)):
        block = triton.next_power_of_2(size)
        constants = {"HAS_OFFSET": False, "K": top_k, "P": experts, "D": size, "BLOCK_D": block}
        name = f"experts_norm D={size} K={top_k}"
        cases.append((name, experts_norm_kernel, signature, constants, norm_warps(block), 3))
    return cases
