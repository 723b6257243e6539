"""Sampling of one token from each row of logits, with its log-probability and its mask, as two Triton kernels.

    chunk_kernel   row x chunk of the vocabulary: largest logit, where it is, total weight, first NaN
    draw_kernel    row: where top-k, top-p and min-p end (`sample_filter`), and the weight that they leave by chunk; the
                   chunk in which the noise lies, then the token in it; the mask of a row that wants it

`rollout.sampling.base` defines the results.  Chunks have one size and all sums one order, so every number depends on
the row alone.  Weights are e^(x - largest of the chunk) in float32 and are summed in float64, in vocabulary order.  So
every device samples the token of the inverted cumulative distribution, unless the noise lies within rounding (1e-7 of
the whole) of a boundary.  The host reads nothing: rows with and without filters and masks take the same launches.

Shapes: N rows, V vocabulary, C chunks, W most ids of a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor
from rollout.kernels.gpu.sample_filter import id_of_last, is_kept, key_of, limits, raw_chunk

_CHUNK = 2048
_WARPS = 8
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits of float32 that the dtype does not have


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
    peaks,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    wait_for_predecessor()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, raw = raw_chunk(logits + row * row_stride, chunk, V, CHUNK)
    x = tl.div_rn(raw, tl.load(temperatures + row))
    numbers = tl.where(x == x, x, float("-inf"))
    most = tl.max(numbers, 0)
    place = row * tl.cdiv(V, CHUNK) + chunk
    tl.store(largest + place, most)
    tl.store(best + place, tl.min(tl.where(numbers == most, token, V), 0))
    tl.store(totals + place, tl.sum(chunk_weights(numbers, most), 0))
    tl.store(first_nan + place, tl.min(tl.where(x == x, V, token), 0))
    tl.store(peaks + place, key_of(tl.max(tl.where(raw == raw, raw, float("-inf")), 0), SHIFT))


@triton.jit
def chunk_scales(largest, there, place):
    """Return the largest numbers of a row's chunks, the row's largest, and chunks' weights in units of the row's."""
    maxima = tl.load(largest + place, mask=there, other=float("-inf"))
    most = tl.max(maxima, 0)
    return maxima, most, chunk_weights(maxima, most)


@triton.jit
def logprob_of(raw, temperature, most, total):
    """Return the log-probability float32 of a token with this logit."""
    own = tl.div_rn(raw.to(tl.float32), temperature)
    return (own.to(tl.float64) - most.to(tl.float64) - tl.log(total)).to(tl.float32)


@triton.jit
def first_beyond(cumulative, weights, target, at, SIZE: tl.constexpr):
    """Find the first place with a weight where the cumulative weight exceeds the target, else the last with a weight.

    Parallel sums of growing prefixes need not grow in the last bits; a place without a weight never counts.
    """
    first = tl.min(tl.where((cumulative > target) & (weights > 0.0), at, SIZE), 0)
    return tl.where(first < SIZE, first, tl.max(tl.where(weights > 0.0, at, 0), 0))


@triton.jit
def kept_totals(
    line,
    largest,
    peaks,
    temperature,
    most,
    last,
    ties,
    min_p,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the weight that the filters leave in each chunk, in units of its largest, and the last id with `last`."""
    at = tl.arange(0, CHUNKS)
    totals = tl.zeros((CHUNKS,), tl.float64)
    last_id, seen = tl.full((), V, tl.int32), tl.full((), 0, tl.int32)
    for chunk in range(tl.cdiv(V, CHUNK)):
        if tl.load(peaks + chunk) >= last:
            token, raw = raw_chunk(line, chunk, V, CHUNK)
            last_id, seen = id_of_last(token, raw, last, ties, seen, last_id, V, SHIFT)
            kept = is_kept(token, raw, temperature, most, last, last_id, min_p, SHIFT)
            weights = chunk_weights(tl.div_rn(raw, temperature), tl.load(largest + chunk))
            totals = tl.where(at == chunk, tl.sum(tl.where(kept, weights, 0.0), 0), totals)
    return totals, last_id


@triton.jit
def write_mask(
    ids,
    logprobs,
    line,
    largest,
    peaks,
    temperature,
    most,
    last,
    last_id,
    min_p,
    total,
    W: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Write the first W kept ids with a weight, in vocabulary order, and their log-probabilities among the kept ones.

    Returns how many are kept.
    """
    count = tl.full((), 0, tl.int32)
    for chunk in range(tl.cdiv(V, CHUNK)):
        if tl.load(peaks + chunk) >= last:
            token, raw = raw_chunk(line, chunk, V, CHUNK)
            x, chunk_largest = tl.div_rn(raw, temperature), tl.load(largest + chunk)
            weights = chunk_weights(x, chunk_largest) * chunk_weights(chunk_largest, most)
            kept = is_kept(token, raw, temperature, most, last, last_id, min_p, SHIFT) & (weights > 0.0)
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(ids + place, token, mask=kept & (place < W))
            logprob = x.to(tl.float64) - most.to(tl.float64) - tl.log(total)
            tl.store(logprobs + place, logprob.to(tl.float32), mask=kept & (place < W))
            count += tl.sum(kept.to(tl.int32), 0)
    return count


@triton.jit
def draw_kernel(
    logits,
    row_stride,
    seeds,
    positions,
    temperatures,
    greedy,
    top_k,
    top_p,
    min_p,
    wants_mask,
    largest,
    best,
    totals,
    first_nan,
    peaks,
    token_ids,
    logprobs,
    kept_counts,
    kept_ids,
    kept_logprobs,
    W: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < tl.cdiv(V, CHUNK)
    first_place = row * tl.cdiv(V, CHUNK)
    place = first_place + chunk
    maxima, most, scales = chunk_scales(largest, there, place)  # weights are in units of the row's largest
    nan_token = tl.min(tl.load(first_nan + place, mask=there, other=V), 0)
    best_token = tl.min(tl.where(maxima == most, tl.load(best + place, mask=there, other=V), V), 0)
    is_distribution = (nan_token == V) & (most > float("-inf")) & (most < float("inf"))
    is_drawn = is_distribution & (tl.load(greedy + row) == 0)
    line = logits + row * row_stride
    temperature = tl.load(temperatures + row)

    weights = tl.load(totals + place, mask=there, other=0.0) * scales
    total = tl.sum(weights, 0)
    kept_total, least = total, tl.load(min_p + row)
    last, last_id = tl.full((), -(2**31), tl.int32), tl.full((), V, tl.int32)
    top, mass = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row)
    if is_drawn & ((top < V) | (mass < 1.0) | (least > 0.0)):
        own_peaks, peak = peaks + first_place, tl.load(line + best_token).to(tl.float32)
        last, ties = limits(line, own_peaks, temperature, most, peak, total, top, mass, V, CHUNK, SHIFT)
        kept, last_id = kept_totals(
            line, largest + first_place, own_peaks, temperature, most, last, ties, least, V, CHUNK, CHUNKS, SHIFT
        )
        weights = kept * scales
        kept_total = tl.sum(weights, 0)

    noise = uniform(tl.load(seeds + row), tl.load(positions + row))
    target = tl.minimum(noise * kept_total, (1.0 - 1.1102230246251565e-16) * kept_total)
    drawn_chunk = first_beyond(tl.cumsum(weights, 0), weights, target, chunk, CHUNKS)
    before = tl.sum(tl.where(chunk < drawn_chunk, weights, 0.0), 0)
    token, raw = raw_chunk(line, drawn_chunk, V, CHUNK)
    mine = tl.sum(tl.where(chunk == drawn_chunk, scales, 0.0), 0)
    chunk_largest = tl.max(tl.where(chunk == drawn_chunk, maxima, float("-inf")), 0)
    inner = chunk_weights(tl.div_rn(raw, temperature), chunk_largest) * mine
    inner = tl.where(is_kept(token, raw, temperature, most, last, last_id, least, SHIFT), inner, 0.0)
    drawn = drawn_chunk * CHUNK + first_beyond(before + tl.cumsum(inner, 0), inner, target, tl.arange(0, CHUNK), CHUNK)

    settled = tl.where(nan_token < V, nan_token, best_token)
    sampled = tl.where(is_drawn, drawn, settled)
    logprob = logprob_of(tl.load(line + sampled), temperature, most, total)
    tl.store(token_ids + row, sampled.to(tl.int64))
    tl.store(logprobs + row, tl.where(is_distribution, logprob, float("nan")))

    count = tl.full((), 0, tl.int32)
    if tl.load(wants_mask + row) != 0:
        own_ids, own_logprobs = kept_ids + row * W, kept_logprobs + row * W
        if is_drawn:
            count = write_mask(
                own_ids,
                own_logprobs,
                line,
                largest + first_place,
                peaks + first_place,
                temperature,
                most,
                last,
                last_id,
                least,
                kept_total,
                W,
                V,
                CHUNK,
                SHIFT,
            )
        else:
            tl.store(own_ids, sampled)
            tl.store(own_logprobs, tl.where(is_distribution, 0.0, float("nan")))
            count = tl.full((), 1, tl.int32)
    tl.store(kept_counts + row, count.to(tl.int64))


def chunk_facts(
    logits_NV: torch.Tensor, temperatures_N: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """Return the facts of `chunk_kernel` [N, C] each, in its order, and the constants of kernels that read them."""
    (num_rows, vocab), device = logits_NV.shape, logits_NV.device
    num_chunks = triton.cdiv(vocab, _CHUNK)
    dtypes = (torch.float32, torch.int32, torch.float64, torch.int32, torch.int32)
    facts = tuple(torch.empty((num_rows, num_chunks), dtype=dtype, device=device) for dtype in dtypes)
    constants = {"V": vocab, "CHUNK": _CHUNK, "SHIFT": _SHIFTS[logits_NV.dtype]}
    chunk_kernel[(num_rows, num_chunks)](
        logits_NV,
        logits_NV.stride(0),
        temperatures_N,
        *facts,
        **constants,
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **launch_options(logits_NV),
    )
    return facts, constants | {"CHUNKS": triton.next_power_of_2(num_chunks)}


def sample_rows(
    logits_NV: torch.Tensor,
    seeds_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    greedy_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    wants_mask_N: torch.Tensor,
    positions_N: torch.Tensor,
    out: tuple[torch.Tensor, ...],
) -> None:
    """Sample one token of each row into `out`: token ids [N] int64, log-probabilities [N] float32, and masks.

    `seeds_N` are bits of unsigned numbers in int64, temperatures float32 (1 for greedy rows), `greedy_N` and
    `wants_mask_N` bool.  `top_k_N` int64 is V where there is no limit; `top_p_N` float64, `min_p_N` float32.

    Masks are counts [N] int64, ids [N, W] int32 in vocabulary order and their log-probabilities [N, W] float32 among
    the kept tokens.  A count is 0 where no mask is wanted.  Of a mask with more than W ids the first W are written.
    """
    num_rows = len(logits_NV)
    token_ids_N, logprobs_N, kept_counts_N, kept_ids_NW, kept_logprobs_NW = out
    assert logits_NV.stride(1) == 1 and kept_ids_NW.is_contiguous() and kept_logprobs_NW.is_contiguous()
    if num_rows == 0:
        return
    facts, constants = chunk_facts(logits_NV, temperatures_N)
    draw_kernel[(num_rows,)](
        logits_NV,
        logits_NV.stride(0),
        seeds_N,
        positions_N,
        temperatures_N,
        greedy_N.view(torch.int8),
        top_k_N,
        top_p_N,
        min_p_N,
        wants_mask_N.view(torch.int8),
        *facts,
        token_ids_N,
        logprobs_N,
        kept_counts_N,
        kept_ids_NW,
        kept_logprobs_NW,
        W=kept_ids_NW.shape[1],
        **constants,
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **launch_options(logits_NV),
    )


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for the vocabulary of Qwen3, with bfloat16 and float32 logits."""
    facts = {"largest": "*fp32", "best": "*i32", "totals": "*fp64", "first_nan": "*i32", "peaks": "*i32"}
    settings = {"greedy": "*i8", "top_k": "*i64", "top_p": "*fp64", "min_p": "*fp32", "wants_mask": "*i8"}
    out = {"token_ids": "*i64", "logprobs": "*fp32", "kept_counts": "*i64"}
    out |= {"kept_ids": "*i32", "kept_logprobs": "*fp32"}
    cases = []
    for dtype, of in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        size: dict[str, object] = {"V": 151_936, "CHUNK": _CHUNK, "SHIFT": _SHIFTS[of]}
        rows = {"logits": f"*{dtype}", "row_stride": "i32", "temperatures": "*fp32"} | facts
        draw = rows | {"seeds": "*i64", "positions": "*i64"} | settings | out
        cases += [
            (f"sample, chunks {dtype}", chunk_kernel, rows, size, _WARPS, 3),
            (f"sample, draw {dtype}", draw_kernel, draw, size | {"CHUNKS": 128, "W": 4096}, _WARPS, 3),
        ]
    return cases
