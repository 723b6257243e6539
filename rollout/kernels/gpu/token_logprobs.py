"""Log-probabilities of given tokens, by the sums with which `sample` reports the ones that it samples.

Shapes: N rows, V vocabulary, C pairs of a row and a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor
from rollout.kernels.gpu.sample import chunk_facts, chunk_scales, logprob_of

_WARPS = 8  # as of the kernel that draws: both add the chunks of a row in one order


@triton.jit
def logprobs_kernel(
    logits,
    row_stride,
    temperatures,
    largest,
    totals,
    first_nan,
    rows,
    token_ids,
    logprobs,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    wait_for_predecessor()
    pair = tl.program_id(0)
    row = tl.load(rows + pair)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < tl.cdiv(V, CHUNK)
    place = row * tl.cdiv(V, CHUNK) + chunk
    _, most, scales = chunk_scales(largest, there, place)
    total = tl.sum(tl.load(totals + place, mask=there, other=0.0) * scales, 0)
    nan_token = tl.min(tl.load(first_nan + place, mask=there, other=V), 0)
    is_distribution = (nan_token == V) & (most > float("-inf")) & (most < float("inf"))
    raw = tl.load(logits + row * row_stride + tl.load(token_ids + pair))
    logprob = logprob_of(raw, tl.load(temperatures + row), most, total)
    tl.store(logprobs + pair, tl.where(is_distribution, logprob, float("nan")))


def token_logprobs(
    logits_NV: torch.Tensor, temperatures_N: torch.Tensor, rows_C: torch.Tensor, token_ids_C: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability [C] float32 of each pair of a row and a token, both int64.

    `temperatures_N` are float32.  A row without a distribution (`rollout.sampling.base`) gives NaN.
    """
    assert logits_NV.stride(1) == 1
    logprobs_C = torch.empty(rows_C.shape, dtype=torch.float32, device=logits_NV.device)
    if not len(rows_C):
        return logprobs_C
    (largest, _, totals, first_nan, _), constants = chunk_facts(logits_NV, temperatures_N)
    logprobs_kernel[(len(rows_C),)](
        logits_NV,
        logits_NV.stride(0),
        temperatures_N,
        largest,
        totals,
        first_nan,
        rows_C.contiguous(),
        token_ids_C.contiguous(),
        logprobs_C,
        V=constants["V"],
        CHUNK=constants["CHUNK"],
        CHUNKS=constants["CHUNKS"],
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **launch_options(logits_NV),
    )
    return logprobs_C


def compile_cases() -> list[tuple[Any, ...]]:
    """Return the case of bfloat16 logits over the vocabulary of Qwen3."""
    facts = {"largest": "*fp32", "totals": "*fp64", "first_nan": "*i32"}
    pairs = {"rows": "*i64", "token_ids": "*i64", "logprobs": "*fp32"}
    signature = {"logits": "*bf16", "row_stride": "i32", "temperatures": "*fp32"} | facts | pairs
    sizes: dict[str, object] = {"V": 151_936, "CHUNK": 2048, "CHUNKS": 128}
    return [("token log-probabilities bf16", logprobs_kernel, signature, sizes, _WARPS, 3)]
