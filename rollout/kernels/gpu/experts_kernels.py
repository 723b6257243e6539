"""The Triton kernels of the grouped SwiGLU: sort by expert, gate and up, down, weighted sum.

    ids [T, K]      3 0 | 3 5 | 0 3            an assignment is a flat index of it, a = t K + k; the id -1 is empty
    order [A]       1 4 . . | 0 2 5 . | 3      assignments by expert, in ascending order within one
    blocks [N, 3]   (0, 0, 2) (3, 2, 3) (5, 5, 1) (., ., 0)  ..        expert, first place in `order`, number of places

A block has at most BLOCK_M assignments of one expert.  The table has as many blocks as the worst routing needs.  Blocks
that are left over have no places, and their programs return at once.  So the host reads nothing back.

For a few assignments nothing is planned.  Every assignment has a block, whose programs find its places by comparing all
ids.  A place is then the assignment itself.  A block that begins with another assignment has no places.

A program multiplies a tile of ROWS weight rows by the block's columns, weights on the left:

    [ROWS, BLOCK_K] of weights  x  [BLOCK_K, BLOCK_M] of activations, BLOCK_K after BLOCK_K

Warps' matrix instructions take 64 rows on the left and as few as 8 columns on the right, so few tokens waste few
products.  An element of the result is one sum over the depth, in ascending steps, by one warp group.  The number of
columns of a block, the size of tiles and the place of a token change no sum.  Every result that plain torch would round
is rounded here, also between the two products.

ADAPTED: tokens t with `slots[t] >= 0` have an adapter, whose products with gate and up lie in `delta` (`experts_lora`).
They are added to the sums before these are rounded.  The sums of other tokens are not touched.

Shapes: T tokens, K slots of a token, A = T K, N blocks, P experts stored here, D hidden, I expert intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.kernels.gpu.predecessor import wait_for_predecessor

SCALE_BLOCK = tl.constexpr(128)  # columns of FP8 that have one scale
SCALE_GROUP = tl.constexpr(32)  # columns of 4 bits that have one scale
FP8 = tl.constexpr(1)  # forms of `row_places`; 0: as in memory
INT4 = tl.constexpr(2)
_INTERLEAVE = tl.constexpr(8)  # gate rows of a tile, followed by as many up rows: one thread holds both results


@triton.jit(do_not_specialize=["num_assignments", "num_blocks"])
def plan_kernel(
    ids_ptr,
    order_ptr,
    blocks_ptr,
    num_assignments,
    num_blocks,
    P: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write `order` and `blocks` of ids [A] int64, with one program for each expert.  BINS: a power of two above P.

    Both leave out ids without an expert.
    """
    wait_for_predecessor()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    chunk = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, num_assignments, CHUNK):
        counts += tl.histogram(_experts(ids_ptr, start + chunk, num_assignments, P), BINS)
    of_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    count = tl.sum(tl.where(bins == expert, counts, 0))
    place = tl.sum(tl.where(bins < expert, counts, 0))
    end = place + count
    first_block = tl.sum(tl.where(bins < expert, of_blocks, 0))
    last_block = first_block + (count + BLOCK_M - 1) // BLOCK_M
    for block in range(first_block, last_block):
        first = place + (block - first_block) * BLOCK_M
        tl.store(blocks_ptr + 3 * block, expert)
        tl.store(blocks_ptr + 3 * block + 1, first)
        tl.store(blocks_ptr + 3 * block + 2, tl.minimum(end - first, BLOCK_M))
    if expert == P - 1:
        for start in range(last_block, num_blocks, CHUNK):
            tl.store(blocks_ptr + 3 * (start + chunk) + 2, 0, mask=start + chunk < num_blocks)
    if count > 0:
        for start in range(0, num_assignments, CHUNK):
            assignments = start + chunk
            mine = (_experts(ids_ptr, assignments, num_assignments, P) == expert).to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(mine, 0) - 1, assignments, mask=mine > 0)
            place += tl.sum(mine)


@triton.jit
def _experts(ids_ptr, assignments, num_assignments, P: tl.constexpr):
    """Return ids as int32, with P in the place of ids without an expert."""
    ids = tl.load(ids_ptr + assignments, mask=assignments < num_assignments, other=-1)
    return tl.where((ids >= 0) & (ids < P), ids, P).to(tl.int32)


@triton.jit
def block_of_few(ids_ptr, block, num_assignments, P: tl.constexpr, FEW: tl.constexpr, BLOCK_M: tl.constexpr):
    """Find the block that begins with the assignment `block`, of at most FEW: expert, number of places, assignments.

    Behind the last of the assignments [BLOCK_M] it is repeated.
    """
    at = tl.arange(0, FEW)
    experts = _experts(ids_ptr, at, num_assignments, P)
    expert = tl.sum(tl.where(at == block, experts, 0), 0)
    mine = experts == expert
    number = tl.cumsum(mine.to(tl.int32), 0) - 1
    first = tl.sum(tl.where(at == block, number, 0), 0)
    num_places = tl.minimum(tl.sum(mine.to(tl.int32), 0) - first, BLOCK_M)
    num_places = tl.where((expert < P) & (first % BLOCK_M == 0), num_places, 0)
    wanted = first + tl.minimum(tl.arange(0, BLOCK_M), num_places - 1)
    is_wanted = mine[None, :] & (number[None, :] == wanted[:, None])
    return expert, num_places, tl.sum(tl.where(is_wanted, at[None, :], 0), 1)


@triton.jit(do_not_specialize=["num_assignments"])
def gate_up_kernel(
    hidden_ptr,
    w13_ptr,
    scale_ptr,
    bias_ptr,
    delta_ptr,
    slots_ptr,
    inner_ptr,
    order_ptr,
    blocks_ptr,
    num_assignments,
    limit,
    alpha,
    D: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    FEW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ADAPTED: tl.constexpr,
    FORM: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the activation of each assignment: inner [A, I] by place in `order`, of hidden [T, D] and w13 [P, 2I, D].

    FEW: 0, or a power of two that is not below A.  Then `order_ptr` points to the ids, and there is no table of blocks.
    `delta` [A, 2I] float32 by place, gate first.  FORM, STRIDE, SCALES_AT: see `row_sums`.
    """
    wait_for_predecessor()
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    WIDTH: tl.constexpr = ROWS // 2  # inner features of a tile
    TILES: tl.constexpr = (I + WIDTH - 1) // WIDTH
    block = tl.program_id(0) // TILES
    column = tl.arange(0, BLOCK_M)
    if FEW > 0:
        expert, num_places, places = block_of_few(order_ptr, block, num_assignments, P, FEW, BLOCK_M)
    else:
        num_places = tl.load(blocks_ptr + 3 * block + 2)
    if num_places == 0:
        return
    # Beyond the edges the last column and the last row are computed once more, and not stored.
    if FEW > 0:
        assignments = places
    else:
        expert = tl.load(blocks_ptr + 3 * block)
        places = tl.load(blocks_ptr + 3 * block + 1) + tl.minimum(column, num_places - 1)
        assignments = tl.load(order_ptr + places)
    expert = expert.to(tl.int64)
    begin = tl.program_id(0) % TILES * WIDTH

    row = tl.arange(0, ROWS)
    half = row // _INTERLEAVE % 2
    feature = begin + row // (2 * _INTERLEAVE) * _INTERLEAVE + row % _INTERLEAVE
    row = half * I + tl.minimum(feature, I - 1)
    token = (assignments // K).to(tl.int64)
    first = expert * (2 * I)
    sums = row_sums(
        w13_ptr, scale_ptr, first, row, hidden_ptr, token, D, FORM, STRIDE, SCALES_AT, BLOCK_M, ROWS, BLOCK_K
    )
    by_half = tl.reshape(sums, (ROWS // (2 * _INTERLEAVE), 2, _INTERLEAVE, BLOCK_M))
    gate, up = tl.split(tl.permute(by_half, (0, 2, 3, 1)))
    gate, up = tl.reshape(gate, (WIDTH, BLOCK_M)), tl.reshape(up, (WIDTH, BLOCK_M))
    feature = begin + tl.arange(0, WIDTH)
    stored = (feature < I)[:, None] & (column < num_places)[None, :]
    if ADAPTED:
        adapted = stored & (tl.load(slots_ptr + token) >= 0)[None, :]
        delta_ptrs = delta_ptr + places.to(tl.int64)[None, :] * (2 * I) + feature[:, None]
        gate = tl.where(adapted, gate + tl.load(delta_ptrs, mask=adapted, other=0.0), gate)
        up = tl.where(adapted, up + tl.load(delta_ptrs + I, mask=adapted, other=0.0), up)
    gate, up = _rounded(gate, dtype), _rounded(up, dtype)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * (2 * I) + tl.minimum(feature, I - 1)
        gate = _rounded(gate + tl.load(bias_ptrs).to(tl.float32)[:, None], dtype)
        up = _rounded(up + tl.load(bias_ptrs + I).to(tl.float32)[:, None], dtype)
    inner = _activation(gate, up, limit, alpha, CLAMPED, dtype)
    tl.store(inner_ptr + places.to(tl.int64)[None, :] * I + feature[:, None], inner.to(dtype), mask=stored)


@triton.jit(do_not_specialize=["num_assignments"])
def down_kernel(
    inner_ptr,
    w2_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    blocks_ptr,
    num_assignments,
    D: tl.constexpr,
    I: tl.constexpr,
    P: tl.constexpr,
    FEW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the output of each assignment: out [A, D], of inner [A, I] by place in `order` and w2 [P, D, I].

    FORM, STRIDE, SCALES_AT: see `row_sums`.
    """
    wait_for_predecessor()
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    TILES: tl.constexpr = (D + ROWS - 1) // ROWS
    block = tl.program_id(0) // TILES
    column = tl.arange(0, BLOCK_M)
    if FEW > 0:
        expert, num_places, places = block_of_few(order_ptr, block, num_assignments, P, FEW, BLOCK_M)
    else:
        num_places = tl.load(blocks_ptr + 3 * block + 2)
    if num_places == 0:
        return
    if FEW > 0:
        assignments = places
    else:
        expert = tl.load(blocks_ptr + 3 * block)
        places = tl.load(blocks_ptr + 3 * block + 1) + tl.minimum(column, num_places - 1)
        assignments = tl.load(order_ptr + places)
    expert = expert.to(tl.int64)
    feature = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(feature, D - 1)
    place = places.to(tl.int64)
    first = expert * D
    sums = row_sums(w2_ptr, scale_ptr, first, row, inner_ptr, place, I, FORM, STRIDE, SCALES_AT, BLOCK_M, ROWS, BLOCK_K)
    out = _rounded(sums, dtype)
    if HAS_BIAS:
        out += tl.load(bias_ptr + expert * D + row).to(tl.float32)[:, None]
    stored = (feature < D)[:, None] & (column < num_places)[None, :]
    tl.store(out_ptr + assignments.to(tl.int64)[None, :] * D + feature[:, None], out.to(dtype), mask=stored)


@triton.jit
def row_sums(
    w_ptr,
    scale_ptr,
    first_row,
    w_rows,
    x_ptr,
    x_rows,
    DEPTH: tl.constexpr,
    FORM: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows `first_row + w_rows` of a matrix with rows `x_rows` of another, of DEPTH columns: [ROWS, BLOCK_M].

    The result is float32.  Rows of the matrix begin STRIDE elements after one another.  FORM FP8 and INT4: its scales
    lie SCALES_AT bytes behind the beginning of a row (`row_places`).  `scale_ptr` points to the same memory, as float32
    or as the bits of bfloat16.  A weight becomes its value in the dtype of `x` before it is multiplied.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    sums = tl.zeros((ROWS, BLOCK_M), dtype=tl.float32)
    if FORM == INT4:
        sums = _int4_sums(
            sums, w_ptr, scale_ptr, first_row, w_rows, x_ptr, x_rows, DEPTH, STRIDE, SCALES_AT, BLOCK_K // 2
        )
    else:
        step = tl.arange(0, BLOCK_K)
        w_ptrs = w_ptr + first_row * STRIDE + w_rows[:, None] * STRIDE + step[None, :]
        x_ptrs = x_ptr + x_rows[None, :] * DEPTH + step[:, None]
        for start in range(0, DEPTH, BLOCK_K):
            if DEPTH % BLOCK_K == 0:
                w = tl.load(w_ptrs + start)
                x = tl.load(x_ptrs + start)
            else:
                w = tl.load(w_ptrs + start, mask=step[None, :] < DEPTH - start, other=0.0)
                x = tl.load(x_ptrs + start, mask=step[:, None] < DEPTH - start, other=0.0)
            if FORM == FP8:
                tl.static_assert(SCALE_BLOCK % BLOCK_K == 0)
                scales = scale_ptr + (first_row * STRIDE + SCALES_AT) // 4 + w_rows * (STRIDE // 4)
                w = (w.to(tl.float32) * tl.load(scales + start // SCALE_BLOCK)[:, None]).to(dtype)
            sums = tl.dot(w, x, sums, input_precision="ieee")
    return sums


@triton.jit
def _int4_sums(
    sums,
    w_ptr,
    scale_ptr,
    first_row,
    w_rows,
    x_ptr,
    x_rows,
    DEPTH: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    HALF: tl.constexpr,
):
    """Add the products of `row_sums` to `sums`, of 2 HALF columns after 2 HALF columns: lower halves of bytes first."""
    tl.static_assert(HALF == SCALE_GROUP)
    at = tl.arange(0, HALF)
    w_ptrs = w_ptr + first_row * STRIDE + w_rows[:, None] * STRIDE + at[None, :]
    scales = scale_ptr + (first_row * STRIDE + SCALES_AT) // 2 + w_rows * (STRIDE // 2)
    x_ptrs = x_ptr + x_rows[None, :] * DEPTH + at[:, None]
    for start in range(0, DEPTH, 2 * HALF):
        both = tl.load(w_ptrs + start // 2)
        if DEPTH % (2 * HALF) == 0:
            lower_x = tl.load(x_ptrs + start)
            upper_x = tl.load(x_ptrs + start + HALF)
        else:
            lower_x = tl.load(x_ptrs + start, mask=at[:, None] < DEPTH - start, other=0.0)
            upper_x = tl.load(x_ptrs + start + HALF, mask=at[:, None] + HALF < DEPTH - start, other=0.0)
        lower = _int4_values(both & 15, scales + start // HALF, lower_x.dtype)
        sums = tl.dot(lower, lower_x, sums, input_precision="ieee")
        upper = _int4_values(both >> 4, scales + start // HALF + 1, upper_x.dtype)
        sums = tl.dot(upper, upper_x, sums, input_precision="ieee")
    return sums


@triton.jit
def _int4_values(integers, scales, dtype: tl.constexpr):
    """Return the values of integers, plus 8 [ROWS, HALF], with a scale for each row, the bits of bfloat16."""
    scale = (tl.load(scales).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return ((integers.to(tl.float32) - 8.0) * scale[:, None]).to(dtype)


@triton.jit
def _activation(gate, up, limit, alpha, CLAMPED: tl.constexpr, dtype: tl.constexpr):
    """Apply `silu_and_mul`, or `clamped_swiglu` if CLAMPED, to float32 tensors that hold numbers of `dtype`."""
    if CLAMPED:
        gate = _rounded(tl.where(gate > limit, limit, gate), dtype)  # a NaN stays one
        up = _rounded(tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)), dtype)
        sigmoid = _rounded(1.0 / (1.0 + tl.exp(-_rounded(gate * alpha, dtype))), dtype)
        return _rounded(up + 1.0, dtype) * _rounded(gate * sigmoid, dtype)
    return _rounded(gate / (1.0 + tl.exp(-gate)), dtype) * up


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def weighted_sum_kernel(
    out_ptr, ids_ptr, weights_ptr, sum_ptr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Sum out [T, K, D] times weights [T, K] over slots [T, D]: rounded products, added in float32 in slot order.

    Empty slots count as zero, whatever their outputs and weights hold.
    """
    wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = weighted(out_ptr, ids_ptr, weights_ptr, token, feature, D, K, P, BLOCK_D)
    tl.store(sum_ptr + token * D + feature, total.to(out_ptr.dtype.element_ty), mask=feature < D)


@triton.jit
def weighted(
    out_ptr, ids_ptr, weights_ptr, token, feature, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return features [BLOCK_D] of a token's weighted sum, in float32."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for slot in tl.static_range(K):  # unrolled, so that all loads are under way together
        assignment = token * K + slot
        expert = tl.load(ids_ptr + assignment)
        weight = tl.load(weights_ptr + assignment).to(tl.float32)
        out = tl.load(out_ptr + assignment * D + feature, mask=feature < D, other=0.0).to(tl.float32)
        total += tl.where((expert >= 0) & (expert < P), _rounded(out * weight, dtype), 0.0)
    return total
