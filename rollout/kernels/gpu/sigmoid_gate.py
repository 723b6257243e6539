"""`sigmoid_gate` as a Triton kernel.

Every element is computed on its own, in float32, and rounded where plain torch rounds.

Shapes: T tokens, N features in G groups.
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
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def sigmoid_gate_kernel(
    hidden, gate, out, hidden_stride, gate_stride, N: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + at // GROUP_SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, (x * rounded(sigmoid(g), dtype)).to(dtype), mask=inside)


def sigmoid_gate(hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply groups of `hidden` [T, N] with the sigmoid of their `gate` [T, G].  Rows may lie apart."""
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
            **launch_options(hidden),
        )
    return out


def compile_cases() -> list[tuple[Any, ...]]:
    """Return one case, in bfloat16."""
    gated = dict.fromkeys(("hidden", "gate", "out"), "*bf16") | dict.fromkeys(("hidden_stride", "gate_stride"), "i32")
    sizes: dict[str, object] = {"N": 4096, "GROUP_SIZE": 128, "BLOCK": _BLOCK}
    return [("sigmoid_gate N=4096", sigmoid_gate_kernel, gated, sizes, _WARPS, 3)]
