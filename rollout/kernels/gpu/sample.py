"""Sampling of one token from each row of logits, with its log-probability, as two Triton kernels.

    chunk_kernel   row x chunk of the vocabulary: largest logit, where it is, total weight, first NaN
    draw_kernel    row: the chunk in which the noise lies, then the token in it

`rollout.sampling.base` defines the results.  Chunks have one size and all sums one order, so every number depends on
the row alone.  Weights are e^(x - largest of the chunk) in float32 and are summed in float64, in vocabulary order.  So
every device samples the token of the inverted cumulative distribution, unless the noise lies within rounding (1e-7 of
the whole) of a boundary.

Shapes: N rows, V vocabulary, C chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_CHUNK = 2048
_WARPS = 8


@triton.jit
def mix(x):
    """Apply SplitMix64's finaliser (Steele, Lea, Flood, 2014) to uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """Return `rollout.sampling.torch_sampler.uniform` of the bits of a seed and a position, both int64."""
    state = mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    state += (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    return (mix(state) >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def scaled_chunk(logits, temperature, chunk, V: tl.constexpr, CHUNK: tl.constexpr):
    """Load a chunk: return its token ids, and its logits over the temperature, -inf past the end."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
    return token, tl.div_rn(x, temperature)


@triton.jit
def chunk_weights(x, largest):
    """Compute e^(x - largest) in float64; zeros where all logits are -inf."""
    return tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest)).to(tl.float64)


@triton.jit
def chunk_kernel(
    logits,
    row_stride,
    temperatures,
    largest,
    best,
    totals,
    first_nan,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, x = scaled_chunk(logits + row * row_stride, tl.load(temperatures + row), chunk, V, CHUNK)
    numbers = tl.where(x == x, x, float("-inf"))
    most = tl.max(numbers, 0)
    place = row * tl.cdiv(V, CHUNK) + chunk
    tl.store(largest + place, most)
    tl.store(best + place, tl.min(tl.where(numbers == most, token, V), 0))
    tl.store(totals + place, tl.sum(chunk_weights(numbers, most), 0))
    tl.store(first_nan + place, tl.min(tl.where(x == x, V, token), 0))


@triton.jit
def first_beyond(cumulative, weights, target, at, SIZE: tl.constexpr):
    """Find the first place with a weight where the cumulative weight exceeds the target, else the last with a weight.

    Parallel sums of growing prefixes need not grow in the last bits; a place without a weight never counts.
    """
    first = tl.min(tl.where((cumulative > target) & (weights > 0.0), at, SIZE), 0)
    return tl.where(first < SIZE, first, tl.max(tl.where(weights > 0.0, at, 0), 0))


@triton.jit
def draw_kernel(
    logits,
    row_stride,
    seeds,
    positions,
    temperatures,
    greedy,
    largest,
    best,
    totals,
    first_nan,
    token_ids,
    logprobs,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < tl.cdiv(V, CHUNK)
    place = row * tl.cdiv(V, CHUNK) + chunk
    maxima = tl.load(largest + place, mask=there, other=float("-inf"))
    most = tl.max(maxima, 0)
    nan_token = tl.min(tl.load(first_nan + place, mask=there, other=V), 0)
    best_token = tl.min(tl.where(maxima == most, tl.load(best + place, mask=there, other=V), V), 0)
    is_distribution = (nan_token == V) & (most > float("-inf")) & (most < float("inf"))

    # Weights are in units of the row's largest weight.
    scales = chunk_weights(maxima, most)
    weights = tl.load(totals + place, mask=there, other=0.0) * scales
    total = tl.sum(weights, 0)
    noise = uniform(tl.load(seeds + row), tl.load(positions + row))
    target = tl.minimum(noise * total, (1.0 - 1.1102230246251565e-16) * total)
    drawn_chunk = first_beyond(tl.cumsum(weights, 0), weights, target, chunk, CHUNKS)
    before = tl.sum(tl.where(chunk < drawn_chunk, weights, 0.0), 0)
    temperature = tl.load(temperatures + row)
    line = logits + row * row_stride
    _, x = scaled_chunk(line, temperature, drawn_chunk, V, CHUNK)
    mine = tl.sum(tl.where(chunk == drawn_chunk, scales, 0.0), 0)
    inner = chunk_weights(x, tl.max(tl.where(chunk == drawn_chunk, maxima, float("-inf")), 0)) * mine
    drawn = drawn_chunk * CHUNK + first_beyond(before + tl.cumsum(inner, 0), inner, target, tl.arange(0, CHUNK), CHUNK)

    settled = tl.where(nan_token < V, nan_token, best_token)
    sampled = tl.where(is_distribution & (tl.load(greedy + row) == 0), drawn, settled)
    own = tl.div_rn(tl.load(line + sampled).to(tl.float32), temperature)
    logprob = own.to(tl.float64) - most.to(tl.float64) - tl.log(total)
    tl.store(token_ids + row, sampled.to(tl.int64))
    tl.store(logprobs + row, tl.where(is_distribution, logprob.to(tl.float32), float("nan")))


def sample_rows(
    logits_NV: torch.Tensor,
    seeds_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    greedy_N: torch.Tensor,
    positions_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token of each row, and return token ids [N] int64 and log-probabilities [N] float32.

    `seeds_N` are bits of unsigned numbers in int64, temperatures float32 (1 for greedy rows), `greedy_N` bool.
    """
    (num_rows, vocab), device = logits_NV.shape, logits_NV.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    assert logits_NV.stride(1) == 1
    if num_rows == 0:
        return token_ids, logprobs
    num_chunks = triton.cdiv(vocab, _CHUNK)

    def of_chunks(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, num_chunks), dtype=dtype, device=device)

    facts = [of_chunks(dtype) for dtype in (torch.float32, torch.int32, torch.float64, torch.int32)]
    rows = (logits_NV, logits_NV.stride(0))
    chunk_kernel[(num_rows, num_chunks)](
        *rows, temperatures_N, *facts, V=vocab, CHUNK=_CHUNK, num_warps=_WARPS, enable_fp_fusion=False
    )
    draw_kernel[(num_rows,)](
        *rows,
        seeds_N,
        positions_N,
        temperatures_N,
        greedy_N.view(torch.int8),
        *facts,
        token_ids,
        logprobs,
        V=vocab,
        CHUNK=_CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return token_ids, logprobs


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for the vocabulary of Qwen3, with bfloat16 and float32 logits."""
    facts = {"largest": "*fp32", "best": "*i32", "totals": "*fp64", "first_nan": "*i32"}
    size: dict[str, object] = {"V": 151_936, "CHUNK": _CHUNK}
    cases = []
    for dtype in ("bf16", "fp32"):
        rows = {"logits": f"*{dtype}", "row_stride": "i32", "temperatures": "*fp32"} | facts
        draw = rows | {"seeds": "*i64", "positions": "*i64", "greedy": "*i8", "token_ids": "*i64", "logprobs": "*fp32"}
        cases += [
            (f"sample, chunks {dtype}", chunk_kernel, rows, size, _WARPS, 3),
            (f"sample, draw {dtype}", draw_kernel, draw, size | {"CHUNKS": 128}, _WARPS, 3),
        ]
    return cases
