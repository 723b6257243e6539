"""`silu_and_mul` as a Triton kernel.

Every element is computed on its own, in float32, and rounded where plain torch rounds.

Shapes: T tokens, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import rounded
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def silu_and_mul_kernel(gate_up, out, row_stride, I: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < I
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + I + at, mask=inside, other=0.0).to(tl.float32)
    product = rounded(tl.div_rn(gate, 1.0 + tl.exp(-gate)), dtype) * up
    tl.store(out + row * I + at, product.to(dtype), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply silu of the gates with the up projections of `gate_up` [T, 2I], gates first.  Rows may lie apart."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == 1
    if out.numel():
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        silu_and_mul_kernel[grid](
            gate_up,
            out,
            gate_up.stride(0),
            I=size,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **launch_options(gate_up),
        )
    return out


def compile_cases() -> list[tuple[Any, ...]]:
    """Return one case, in bfloat16."""
    silu = {"gate_up": "*bf16", "out": "*bf16", "row_stride": "i32"}
    return [("silu_and_mul I=768", silu_and_mul_kernel, silu, {"I": 768, "BLOCK": _BLOCK}, _WARPS, 3)]
