"""The tokens of a row that top-k, top-p and min-p leave, found in Triton by a few passes over the row, without a sort.

Tokens are ordered by logit, of equal logits the lower id first.  Every filter keeps a beginning of that order.  Each
pass of a search leaves a quarter of the range of logits in which the beginning ends.  Logits are compared as integers,
keys that are as fine as their dtype.  So a search takes at most 8 passes in bfloat16, 10 in float16, 16 in float32.

    key       ..  last - 1 |     last                     | last + 1 ..
    tokens        dropped  | the `ties` lowest ids kept   | kept, if min-p allows

Weights are e^(x - largest of the row) in float32, and are summed in float64 in one order.  So the end depends on the
row alone.  Two samplers may differ by a token where its mass reaches top-p within rounding.

Shapes: V vocabulary, of CHUNK tokens a chunk.  `peaks` are the largest keys of the row's chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

# e^-105 is 0 in float32.  The rest is for the rounding of the bound.
_NO_WEIGHT = tl.constexpr(128.0)
_MARGIN = tl.constexpr(1e-3)  # for the rounding of logarithms and weights


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Return int32 in the order of `x` float32.  SHIFT: how many of its last bits the logits' dtype does not have."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def number_of(key, SHIFT: tl.constexpr):
    """Return the float32 that has this key."""
    bits = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def raw_chunk(line, chunk, V: tl.constexpr, CHUNK: tl.constexpr):
    """Load a chunk of a row: return its token ids, and its logits in float32, -inf past the end."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    return token, tl.load(line + token, mask=token < V, other=float("-inf")).to(tl.float32)


@triton.jit
def row_weights(raw, temperature, most):
    """Compute the weights e^(x - most) in float32, where `most` is the row's largest logit over the temperature."""
    return tl.exp(tl.div_rn(raw, temperature) - most)


@triton.jit
def amounts(
    line, peaks, temperature, most, first, second, third, V: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr
):
    """Count and weigh the tokens at each of three ascending keys or above, in one pass over the row."""
    counts_1, weights_1 = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.float64)
    counts_2, weights_2 = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.float64)
    counts_3, weights_3 = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.float64)
    first, second, third = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
    for chunk in range(tl.cdiv(V, CHUNK)):
        if tl.load(peaks + chunk) >= first:
            _, raw = raw_chunk(line, chunk, V, CHUNK)
            key = key_of(raw, SHIFT)
            weights = row_weights(raw, temperature, most).to(tl.float64)
            counts_1 += (key >= first).to(tl.int32)
            counts_2 += (key >= second).to(tl.int32)
            counts_3 += (key >= third).to(tl.int32)
            weights_1 += tl.where(key >= first, weights, 0.0)
            weights_2 += tl.where(key >= second, weights, 0.0)
            weights_3 += tl.where(key >= third, weights, 0.0)
    n_1, n_2, n_3 = tl.sum(counts_1, 0), tl.sum(counts_2, 0), tl.sum(counts_3, 0)
    return n_1, n_2, n_3, tl.sum(weights_1, 0), tl.sum(weights_2, 0), tl.sum(weights_3, 0)


@triton.jit
def search(
    line,
    peaks,
    temperature,
    most,
    low,
    high,
    count,
    mass,
    total,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Find the end of the shortest beginning that has `count` tokens or weighs `mass`, known to be in low .. high - 1.

    Returns its last key, how many tokens of that key it has, and its weight.  The tokens down to `low` are the
    beginning if they have neither; all of them weigh `total` at most.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    low_count, low_weight = tl.full((), V, tl.int32), total
    high_count, high_weight = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
    while (high - low > 1) & (low_count - high_count > 1):
        width = high - low
        first, second, third = low + width // 4, low + width // 2, low + width * 3 // 4
        n_1, n_2, n_3, w_1, w_2, w_3 = amounts(line, peaks, temperature, most, first, second, third, V, CHUNK, SHIFT)
        in_1 = (n_1 >= count) | (w_1 >= mass)
        in_2 = (n_2 >= count) | (w_2 >= mass)
        in_3 = (n_3 >= count) | (w_3 >= mass)
        low = tl.where(in_3, third, tl.where(in_2, second, tl.where(in_1, first, low)))
        low_count = tl.where(in_3, n_3, tl.where(in_2, n_2, tl.where(in_1, n_1, low_count)))
        low_weight = tl.where(in_3, w_3, tl.where(in_2, w_2, tl.where(in_1, w_1, low_weight)))
        high = tl.where(in_1, tl.where(in_2, tl.where(in_3, high, third), second), first)
        high_count = tl.where(in_1, tl.where(in_2, tl.where(in_3, high_count, n_3), n_2), n_1)
        high_weight = tl.where(in_1, tl.where(in_2, tl.where(in_3, high_weight, w_3), w_2), w_1)

    # With one key left, equal logits are cut by their number.  Else one token is left, and belongs to the beginning.
    last = low.to(tl.int32)
    weight = row_weights(number_of(last, SHIFT), temperature, most).to(tl.float64)
    by_mass = tl.minimum(tl.ceil((mass - high_weight) / weight), V * 1.0).to(tl.int32)
    ties = tl.maximum(tl.minimum(count - high_count, by_mass), 1)
    is_one_key = high - low == 1
    cut = high_weight + tl.minimum(ties, low_count - high_count).to(tl.float64) * weight
    return last, tl.where(is_one_key, ties, V), tl.where(is_one_key, cut, low_weight)


@triton.jit
def limits(
    line,
    peaks,
    temperature,
    most,
    best,
    total,
    top_k,
    top_p,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the last key that top-k and top-p keep, and how many tokens of it.  `best`: the largest logit as it is.

    `top_k` int32 is V where there is no limit.  Top-p is of the weight that top-k leaves; `total` is the row's.
    """
    least = (most - _NO_WEIGHT - tl.abs(most) * 1e-6) * temperature
    last, ties, whole = key_of(least, SHIFT), tl.full((), V, tl.int32), total
    high = key_of(best, SHIFT) + 1
    if top_k < V:
        endless = tl.full((), float("inf"), tl.float64)
        last, ties, whole = search(line, peaks, temperature, most, last, high, top_k, endless, total, V, CHUNK, SHIFT)
    if top_p < 1.0:
        # V tokens with a smaller logit than `bound` weigh less than 1 - top_p together: the others have the mass.
        share = tl.log((1.0 - top_p) * whole / V).to(tl.float32)
        bound = (most + share - _MARGIN - tl.abs(most) * 1e-6) * temperature
        low = tl.minimum(tl.maximum(last, key_of(bound, SHIFT)), high - 1)
        end, of_end, _ = search(
            line,
            peaks,
            temperature,
            most,
            low,
            high,
            tl.full((), V + 1, tl.int32),
            top_p * whole,
            whole,
            V,
            CHUNK,
            SHIFT,
        )
        ties = tl.where(end > last, of_end, tl.minimum(ties, of_end))
        last = end
    return last, ties


@triton.jit
def is_kept(token, raw, temperature, most, last, last_id, min_p, SHIFT: tl.constexpr):
    """Return which tokens the filters leave.  Of those with the key `last`, ids up to `last_id` are kept."""
    key = key_of(raw, SHIFT)
    return ((key > last) | ((key == last) & (token <= last_id))) & (row_weights(raw, temperature, most) >= min_p)


@triton.jit
def id_of_last(token, raw, last, ties, seen, last_id, V: tl.constexpr, SHIFT: tl.constexpr):
    """Return the id of the last kept token with the key `last` if it is in this chunk, and how many were seen so far.

    Before it is found, `last_id` is V, which keeps all.
    """
    is_tie = key_of(raw, SHIFT) == last
    count = tl.sum(is_tie.to(tl.int32), 0)
    if (seen < ties) & (ties <= seen + count):
        rank = seen + tl.cumsum(is_tie.to(tl.int32), 0)
        last_id = tl.min(tl.where(is_tie & (rank == ties), token, V), 0)
    return last_id, seen + count
