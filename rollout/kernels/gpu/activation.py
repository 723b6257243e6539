"""Activations between products, as Triton kernels: `silu_and_mul` and `sigmoid_gate` of `rollout.kernels.schemas`.

Every element is computed on its own, in float32, and rounded where plain torch rounds.

Shapes: T tokens, I intermediate, N features in G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.compile_cases import CompileCase
from rollout.kernels.gpu.norm import rounded

_BLOCK = 1024
_WARPS = 4


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu_and_mul_kernel(gate_up, out, row_stride, I: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < I
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + I + at, mask=inside, other=0.0).to(tl.float32)
    product = rounded(tl.div_rn(gate, 1.0 + tl.exp(-gate)), dtype) * up
    tl.store(out + row * I + at, product.to(dtype), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows of `gate_up` [T, 2I] may lie apart from one another."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == 1
    if out.numel():
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        silu_and_mul_kernel[grid](
            gate_up, out, gate_up.stride(0), I=size, BLOCK=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False
        )
    return out


@triton.jit
def sigmoid_gate_kernel(
    hidden, gate, out, hidden_stride, gate_stride, N: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + at // GROUP_SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, (x * rounded(sigmoid(g), dtype)).to(dtype), mask=inside)


def sigmoid_gate(hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Rows of `hidden` [T, N] and `gate` [T, G] may lie apart from one another."""
    num_tokens, size = hidden.shape
    out = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    assert hidden.stride(1) == gate.stride(1) == 1 and size % gate.shape[1] == 0
    if num_tokens:
        sigmoid_gate_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
            hidden,
            gate,
            out,
            hidden.stride(0),
            gate.stride(0),
            N=size,
            GROUP_SIZE=size // gate.shape[1],
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return out


def compile_cases() -> list[CompileCase]:
    """Both kernels in bfloat16."""
    silu = {"gate_up": "*bf16", "out": "*bf16", "row_stride": "i32"}
    gated = dict.fromkeys(("hidden", "gate", "out"), "*bf16") | dict.fromkeys(("hidden_stride", "gate_stride"), "i32")
    sizes: dict[str, object] = {"N": 4096, "GROUP_SIZE": 128, "BLOCK": _BLOCK}
    return [
        CompileCase("silu_and_mul I=768", silu_and_mul_kernel, silu, {"I": 768, "BLOCK": _BLOCK}, _WARPS, 3),
        CompileCase("sigmoid_gate N=4096", sigmoid_gate_kernel, gated, sizes, _WARPS, 3),
    ]
