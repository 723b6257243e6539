"""`fused_experts` for CUDA: four launches, or two grouped products of torch.

    plan          assignments sorted by expert, cut into blocks     of a size that the worst routing needs; not for few
    gate and up   blocks x tiles of inner features                  the activation in the same kernel
    down          blocks x tiles of hidden features                 written to the assignment's own place
    sum           tokens x features                                 in slot order, without atomics

The host reads no value of a tensor and every size follows from shapes, so that calls can be captured in a CUDA graph.
Tensors lie on the current CUDA device; weights are contiguous.  Weights in a form of `row_places` become their values
in the dtype of the activations, in registers, as `dequantise` rounds them.

A row's result is the same in every batch: `experts_kernels` explains why.  `tests/gpu` compared bits on an H100, where
tensor cores add in one order for all widths of an instruction.  `grouped_mm` does not promise this.

Shapes: T tokens, D hidden, K slots, A = T K assignments, P experts stored here, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from rollout.kernels.gpu import experts_kernels as kernels
from rollout.kernels.gpu.experts_grouped import grouped_experts
from rollout.kernels.gpu.experts_lora import Adapters, Blocks, Delta
from rollout.kernels.gpu.experts_plan import (
    Tiles,
    choose_implementation,
    choose_tiles,
    depth_step,
    few_assignments,
    max_blocks,
    plan_chunk,
)
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.operators.fused_experts import ExpertOutputs, has_grouped
from rollout.kernels.operators.fused_experts import fused_experts as plain_experts
from rollout.kernels.row_places import PACKED_INT4, fp8_parts, int4_parts
from weight_sync.fp8_blocks import QUANTISED

SUM_WIDTH = 1024  # features that a program of the weighted sum takes
_LANES = 32  # lanes of a warp: the least number of bins of a histogram
PLAIN_WARPS = 4  # warps of kernels without products
_NO_DELTA = (None, None)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class HeldWeights(NamedTuple):
    """The way to read a form of `row_places`: its number in the kernels, `RowForm.parts`, and the dtype of scales."""

    form: int
    parts: Callable[[int], tuple[int, int]]
    scale: torch.dtype


HELD_WEIGHTS = {
    QUANTISED: HeldWeights(kernels.FP8.value, fp8_parts, torch.float32),
    PACKED_INT4: HeldWeights(kernels.INT4.value, int4_parts, torch.int16),
}
"""By the dtype of the storage."""


def fused_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    *,
    expected: int | None = None,
) -> torch.Tensor:
    """Apply SwiGLU of expert `ids[t, k]` to row t [T, K, D]; with weights [T, K], sum over K in slot order [T, D].

    Weights are row-major, or rows of `row_places`.  Ids without an expert, such as -1, are empty slots: their output is
    zero, their weight is not read.  float64 is computed by plain torch, which synchronises and takes no empty slots.
    Tiles are chosen for `expected` slots that are not empty, or for all slots; the result does not depend on it.
    """
    held = Matrices(w13, w2, w13_bias, w2_bias)
    if hidden.dtype not in TRITON_DTYPES:
        return plain_experts.plain(hidden, ids, weights, w13, w2, inner_size, w13_bias, w2_bias, limit, alpha)
    can_group = held.is_plain and has_grouped(w2)
    if can_group and choose_implementation(_load(ids, expected), w13.shape[0]) == "grouped_mm":
        return grouped_experts(hidden, ids, weights, w13, w2, inner_size, w13_bias, w2_bias, limit, alpha)
    return of_matrices(hidden, ids, weights, held, limit, alpha, expected=expected)


def expert_outputs(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> ExpertOutputs:
    """Compute `fused_experts` but for the sum over K, which `experts_norm` takes: a launch fewer, the same bits."""
    held = Matrices(w13, w2, w13_bias, w2_bias)
    can_group = held.is_plain and has_grouped(w2)
    if can_group and choose_implementation(ids.numel(), w13.shape[0]) == "grouped_mm":
        rows_TKD = grouped_experts(hidden, ids, None, w13, w2, inner_size, w13_bias, w2_bias, limit, alpha)
    else:
        rows_TKD = hidden.new_empty(*ids.shape, hidden.shape[1])
        write_outputs(hidden, ids.contiguous(), held, limit, alpha, rows_TKD)
    return ExpertOutputs(rows_TKD, ids.contiguous(), weights.contiguous(), w13.shape[0])


@dataclass(frozen=True)
class Matrices:
    """The tensors of the experts: `w13` [P, 2I, .] and `w2` [P, D, .]."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __post_init__(self) -> None:
        assert self.w13.is_contiguous() and self.w2.is_contiguous(), "experts are stored row by row"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes P, D, I."""
        experts, hidden, _ = self.w2.shape
        return experts, hidden, self.w13.shape[1] // 2

    @property
    def is_plain(self) -> bool:
        return self.w13.dtype not in HELD_WEIGHTS


def of_matrices(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    held: Matrices,
    limit: float | None,
    alpha: float,
    adapters: Adapters | None = None,
    expected: int | None = None,
) -> torch.Tensor:
    """Compute the operator by the kernels of `experts_kernels`, and of `experts_lora` where tokens have adapters."""
    (num_tokens, top_k), (experts, hidden_size, _) = ids.shape, held.sizes
    if num_tokens == 0:
        return hidden.new_empty(0, hidden_size) if weights is not None else hidden.new_empty(0, top_k, hidden_size)
    ids = ids.contiguous()
    # Without weights empty slots are part of the result.
    empty = torch.empty if weights is not None else torch.zeros
    out_TKD = empty((num_tokens, top_k, hidden_size), dtype=hidden.dtype, device=hidden.device)
    write_outputs(hidden, ids, held, limit, alpha, out_TKD, adapters, expected)
    return out_TKD if weights is None else _weighted_sum(out_TKD, ids, weights.contiguous(), experts)


def write_outputs(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    held: Matrices,
    limit: float | None,
    alpha: float,
    out_TKD: torch.Tensor,
    adapters: Adapters | None = None,
    expected: int | None = None,
) -> None:
    """Write the outputs of all slots that are not empty."""
    hidden = hidden.contiguous()
    tiles = choose_tiles(_load(ids, expected), held.sizes[0], held.w13.dtype)
    blocks = _plan(ids, held.sizes[0], tiles)
    delta = None if adapters is None else adapters.gate_up(hidden, blocks)
    inner_AI = _gate_up(hidden, held, blocks, tiles, limit, alpha, delta)
    del delta  # its memory is free for what follows
    _down(inner_AI, held, blocks, tiles, out_TKD)
    if adapters is not None:
        adapters.add_down(inner_AI, blocks, out_TKD)


def _load(ids: torch.Tensor, expected: int | None) -> int:
    return ids.numel() if expected is None else min(expected, ids.numel())


def _plan(ids: torch.Tensor, experts: int, tiles: Tiles) -> Blocks:
    count = ids.numel()
    few = few_assignments(count)
    if few:
        return Blocks(ids.view(-1), None, count, few, ids.shape[1], tiles.tokens)
    num_blocks = max_blocks(count, experts, tiles.tokens)
    order_A = torch.empty(count, dtype=torch.int32, device=ids.device)
    table_N3 = torch.empty(num_blocks, 3, dtype=torch.int32, device=ids.device)
    constants = plan_constants(experts, tiles.tokens, plan_chunk(count))
    kernels.plan_kernel[(experts,)](
        ids,
        order_A,
        table_N3,
        count,
        num_blocks,
        **constants,
        num_warps=PLAIN_WARPS,
        enable_fp_fusion=False,
        **launch_options(ids),
    )
    return Blocks(order_A, table_N3, num_blocks, 0, ids.shape[1], tiles.tokens)


def _gate_up(
    hidden: torch.Tensor,
    held: Matrices,
    blocks: Blocks,
    tiles: Tiles,
    limit: float | None,
    alpha: float,
    delta: Delta | None = None,
) -> torch.Tensor:
    experts, hidden_size, inner_size = held.sizes
    inner_AI = hidden.new_empty(blocks.order_A.shape[0], inner_size)
    grid = (blocks.num_blocks * triton.cdiv(inner_size, tiles.rows // 2),)
    kernels.gate_up_kernel[grid](
        hidden,
        held.w13,
        scales_of(held.w13),
        held.w13_bias,
        *(delta or _NO_DELTA),
        inner_AI,
        *blocks.operands,
        0.0 if limit is None else float(limit),
        float(alpha),
        D=hidden_size,
        I=inner_size,
        K=blocks.top_k,
        P=experts,
        FEW=blocks.few,
        HAS_BIAS=held.w13_bias is not None,
        CLAMPED=limit is not None,
        ADAPTED=delta is not None,
        **product_constants(tiles, held.w13.dtype, hidden_size, held.w13.shape[-1]),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
        **launch_options(hidden),
    )
    return inner_AI


def _down(inner_AI: torch.Tensor, held: Matrices, blocks: Blocks, tiles: Tiles, out_TKD: torch.Tensor) -> None:
    experts, hidden_size, inner_size = held.sizes
    grid = (blocks.num_blocks * triton.cdiv(hidden_size, tiles.rows),)
    kernels.down_kernel[grid](
        inner_AI,
        held.w2,
        scales_of(held.w2),
        held.w2_bias,
        out_TKD,
        *blocks.operands,
        D=hidden_size,
        I=inner_size,
        P=experts,
        FEW=blocks.few,
        HAS_BIAS=held.w2_bias is not None,
        **product_constants(tiles, held.w2.dtype, inner_size, held.w2.shape[-1]),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
        **launch_options(inner_AI),
    )


def _weighted_sum(out_TKD: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    num_tokens, top_k, hidden_size = out_TKD.shape
    sum_TD = out_TKD.new_empty(num_tokens, hidden_size)
    kernels.weighted_sum_kernel[(num_tokens, triton.cdiv(hidden_size, SUM_WIDTH))](
        out_TKD,
        ids,
        weights,
        sum_TD,
        D=hidden_size,
        K=top_k,
        P=experts,
        BLOCK_D=SUM_WIDTH,
        num_warps=PLAIN_WARPS,
        enable_fp_fusion=False,
        **launch_options(out_TKD),
    )
    return sum_TD


def plan_constants(experts: int, tokens: int, chunk: int) -> dict[str, object]:
    bins = max(_LANES, triton.next_power_of_2(experts + 1))
    return {"P": experts, "BINS": bins, "BLOCK_M": tokens, "CHUNK": chunk}


def product_constants(tiles: Tiles, weight_dtype: torch.dtype, depth: int, stride: int) -> dict[str, object]:
    """Return the constants of a product with rows of `depth` columns, `stride` elements apart."""
    form = 0
    scales_at = 0
    if weight_dtype in HELD_WEIGHTS:
        form, parts, _ = HELD_WEIGHTS[weight_dtype]
        scales_at, _ = parts(depth)
    of_rows: dict[str, object] = {"FORM": form, "STRIDE": stride, "SCALES_AT": scales_at}
    return of_rows | {"BLOCK_M": tiles.tokens, "ROWS": tiles.rows, "BLOCK_K": depth_step(weight_dtype)}


def scales_of(matrices: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of held matrices in the type in which their scales are read; None for plain ones."""
    return matrices.view(HELD_WEIGHTS[matrices.dtype].scale) if matrices.dtype in HELD_WEIGHTS else None
