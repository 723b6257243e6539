"""`sum_in_order` as one Triton kernel, where plain torch launches one or two for each part.

Every element is summed on its own, part after part.  Several parts are read at once, and added in their order.

Shapes: N parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_BLOCK = 512
_WARPS = 2  # a thread reads 16 bytes of bfloat16 from each part
_AT_ONCE = 8  # parts that are read at once: their elements lie in registers


@triton.jit
def sum_in_order_kernel(parts, out, size, N: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    wide: tl.constexpr = dtype if dtype.primitive_bitwidth == 64 else tl.float32
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, mask=inside, other=0).to(wide)
    from_part = at
    for first in range(1, N, AT_ONCE):
        for part in tl.static_range(AT_ONCE):
            from_part += size
            value = tl.load(parts + from_part, mask=inside & (first + part < N), other=0)
            total = tl.where(first + part < N, total + value.to(wide), total)
    tl.store(out + at, total.to(dtype), mask=inside)


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum parts [N, ...] of floats or of int64, which lie one after the other."""
    assert parts.is_floating_point() or parts.dtype == torch.int64
    parts = parts.contiguous()
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    if out.numel():
        sum_in_order_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            parts,
            out,
            out.numel(),
            **_constants(parts.shape[0]),
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **launch_options(parts),
        )
    return out


def _constants(parts: int) -> dict[str, int]:
    return {"N": parts, "AT_ONCE": min(max(parts - 1, 1), _AT_ONCE), "BLOCK": _BLOCK}


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for the ranks of a machine, and of the largest engine, and one of counts."""
    return [
        (f"sum_in_order {kind} N={ranks}", sum_in_order_kernel, types, _constants(ranks), _WARPS, 3)
        for kind, ranks in (("bf16", 2), ("bf16", 8), ("bf16", 64), ("i64", 8))
        for types in [{"parts": f"*{kind}", "out": f"*{kind}", "size": "i32"}]
    ]
