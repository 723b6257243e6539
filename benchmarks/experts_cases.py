"""The configurations of the expert kernels that a model of 30B-A3B's sizes, or one with biases and clamps, launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.compile_cases import CompileCase
from rollout.kernels.gpu import experts_kernels as kernels
from rollout.kernels.gpu.experts_plan import EXPERT_TILES, Tiles, few_assignments, plan_chunk
from rollout.kernels.gpu.fused_experts import HELD_WEIGHTS, PLAIN_WARPS, SUM_WIDTH, plan_constants, product_constants
from rollout.kernels.row_places import row_bytes

_EXPERTS, _TOP_K, _HIDDEN, _INNER = 128, 8, 2048, 768
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}
_TYPES |= {torch.uint8: "u8"}  # two integers of 4 bits
_SCALES = {torch.float8_e4m3fn: "*fp32", torch.uint8: "*i16"}
_DEFAULT_STAGES = 3  # Triton's own, where a launch names none
_PRODUCTS = (  # activations, weights
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.uint8),
)


def compile_cases() -> Iterator[CompileCase]:
    for chunk in sorted({plan_chunk(_TOP_K), plan_chunk(1 << 20)}):
        for tokens in sorted({tiles.tokens for table in EXPERT_TILES.values() for _, tiles in table}):
            yield _plan_case(tokens, chunk)
    for dtype, weight_dtype in _PRODUCTS:
        tables = [tiles for _, tiles in EXPERT_TILES[weight_dtype.itemsize]]
        for clamped in (False, True):
            yield from _product_cases(dtype, weight_dtype, tables[0], clamped, few_assignments(_TOP_K))
            for tiles in tables:
                yield from _product_cases(dtype, weight_dtype, tiles, clamped)
        if dtype == torch.bfloat16:
            yield from _product_cases(dtype, weight_dtype, tables[-1], clamped=False, adapted=True)
    tiles = EXPERT_TILES[2][0][1]
    yield from _product_cases(torch.bfloat16, torch.bfloat16, tiles, False, few_assignments(_TOP_K), adapted=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield _sum_case(dtype)


def _plan_case(tokens: int, chunk: int) -> CompileCase:
    signature = {"ids_ptr": "*i64", "order_ptr": "*i32", "blocks_ptr": "*i32"}
    signature |= {"num_assignments": "i32", "num_blocks": "i32"}
    constants = plan_constants(_EXPERTS, tokens, chunk)
    name = f"experts plan, blocks of {tokens}, chunks of {chunk}"
    return CompileCase(name, kernels.plan_kernel, signature, constants, PLAIN_WARPS, _DEFAULT_STAGES)


def _product_cases(
    dtype: torch.dtype, weight_dtype: torch.dtype, tiles: Tiles, clamped: bool, few: int = 0, adapted: bool = False
) -> Iterator[CompileCase]:
    """Yield the cases of both matrix products with these tiles.  Experts that clamp have biases.

    `few`: no plan.  `adapted`: tokens have adapters, which changes the first product alone.
    """
    own, weight = f"*{_TYPES[dtype]}", f"*{_TYPES[weight_dtype]}"
    beside = {"scale_ptr": _SCALES.get(weight_dtype), "bias_ptr": own if clamped else None}
    plan = {"order_ptr": "*i64" if few else "*i32", "blocks_ptr": None if few else "*i32", "num_assignments": "i32"}
    shared: dict[str, object] = {"D": _HIDDEN, "I": _INNER, "P": _EXPERTS, "FEW": few, "HAS_BIAS": clamped}
    delta = {"delta_ptr": "*fp32" if adapted else None, "slots_ptr": "*i64" if adapted else None}
    kind = "int4" if weight_dtype == torch.uint8 else _TYPES[weight_dtype]
    name = f"{kind}, {tiles.rows} x {tiles.tokens}{', clamped' if clamped else ''}"
    name += (", few" if few else "") + (", adapted" if adapted else "")
    gate_up_types = {"hidden_ptr": own, "w13_ptr": weight, **beside, **delta, "inner_ptr": own, **plan}
    yield _case(
        f"experts gate and up, {name}",
        kernels.gate_up_kernel,
        gate_up_types | {"limit": "fp32", "alpha": "fp32"},
        shared | {"K": _TOP_K, "CLAMPED": clamped, "ADAPTED": adapted} | _of_rows(tiles, weight_dtype, _HIDDEN),
        tiles,
    )
    if adapted:
        return
    down_types = {"inner_ptr": own, "w2_ptr": weight, **beside, "out_ptr": own, **plan}
    shared |= _of_rows(tiles, weight_dtype, _INNER)
    yield _case(f"experts down, {name}", kernels.down_kernel, down_types, shared, tiles)


def _of_rows(tiles: Tiles, weight_dtype: torch.dtype, depth: int) -> dict[str, object]:
    stride = depth
    if weight_dtype in HELD_WEIGHTS:
        stride = row_bytes(*HELD_WEIGHTS[weight_dtype].parts(depth))
    return product_constants(tiles, weight_dtype, depth, stride)


def _case(
    name: str, kernel: Any, types: Mapping[str, str | None], constants: dict[str, object], tiles: Tiles
) -> CompileCase:
    """Return the case of one kernel.  Pointers without a type become constants with the value None."""
    given = {argument: kind for argument, kind in types.items() if kind is not None}
    absent = dict.fromkeys(types.keys() - given.keys())
    return CompileCase(name, kernel, given, constants | absent, tiles.num_warps, tiles.num_stages)


def _sum_case(dtype: torch.dtype) -> CompileCase:
    own = f"*{_TYPES[dtype]}"
    signature = {"out_ptr": own, "ids_ptr": "*i64", "weights_ptr": own, "sum_ptr": own}
    constants: dict[str, object] = {"D": _HIDDEN, "K": _TOP_K, "P": _EXPERTS, "BLOCK_D": SUM_WIDTH}
    name = f"experts weighted sum, {_TYPES[dtype]}"
    return CompileCase(name, kernels.weighted_sum_kernel, signature, constants, PLAIN_WARPS, _DEFAULT_STAGES)
