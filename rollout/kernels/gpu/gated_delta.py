"""`gated_delta` for CUDA: the gated delta rule over the sequences of a step, in five launches, without the host.

    convolve          silu of the convolution of every token; programs of a sequence share its tokens
    keep_inputs       the convolution's inputs after each snapshot, then after each sequence
    recur             a program has some columns of a head's state in registers, and goes token by token
    norm_gate         the norm of the values that were read, and the output gate, a token's heads side by side

Lengths, rows and snapshots are read on the device, so that a step can be captured.  In addition to the operator, a row
or a snapshot's sequence may be negative: nothing is kept of it, as for padding rows.  A column's arithmetic is the same
in every step, chunk and batch: states are kept in float32, as they are in registers.  It rounds as plain torch does.

The package `fla-core` has the recurrence, too (`fused_recurrent_gated_delta_rule`), without rows by number, snapshots
and the convolution's inputs.  Its form for prompts by chunks has other sums where a chunk begins elsewhere.

The numbers of sequences and snapshots are arguments at run time: steps with a prompt have ever new ones, and a constant
of a kernel makes a kernel of each of its values.

Shapes: T tokens, N sequences, M snapshots, R rows of the pools, Hk key heads, H value heads, dk and dv sizes of their
keys and values, C = 2 Hk dk + H dv channels of the convolution over w tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import normed, rounded
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor
from rollout.kernels.gpu.sigmoid_gate import sigmoid

_CHANNELS = 256  # of a program of the convolution
_TOKENS = 16  # for each program of a sequence in a step with one sequence
_COLUMNS = 8  # of a head's state in a program, which is one warp
_SNAPSHOTS = (16, 256, 4096)  # sizes of the vectors that hold a step's snapshots, or lengths


@triton.jit
def first_token(query_lens, n, num_sequences, BLOCK: tl.constexpr):
    """Return the number of tokens before sequence n."""
    at = tl.arange(0, BLOCK)
    return tl.sum(tl.load(query_lens + at, mask=(at < n) & (at < num_sequences), other=0), 0)


@triton.jit
def is_row(number, like):
    """Return whether the scalar `number` is not negative, in the shape of `like`.

    The interpreter spreads the comparison of a scalar wrongly.
    """
    return tl.zeros_like(like) + number >= 0


@triton.jit
def input_of(projected, stride, conv_pool, source, start, position, channel, inside, C, TAPS: tl.constexpr):
    """Return the input of the convolution at `position` of a sequence, as stored; negative positions were before."""
    is_new = is_row(position, channel)
    new = tl.load(projected + (start + position) * stride + channel, mask=inside & is_new, other=0.0)
    place = conv_pool + (source * (TAPS - 1) + TAPS - 1 + position) * C + channel
    old = tl.load(place, mask=inside & is_row(source, channel) & ~is_new, other=0.0)
    return tl.where(is_new, new, old)


@triton.jit(do_not_specialize=["num_sequences"])
def convolve_kernel(
    projected,
    conv_weight,
    conv_pool,
    query_lens,
    sources,
    out,
    stride,
    num_sequences,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0)
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    start, length = first_token(query_lens, n, num_sequences, BLOCK_N), tl.load(query_lens + n)
    source = tl.load(sources + n)
    for t in range(tl.program_id(1), length, tl.num_programs(1)):
        total = tl.zeros((BLOCK_C,), tl.float32)
        for tap in tl.static_range(TAPS):
            position = t - (TAPS - 1) + tap
            x = input_of(projected, stride, conv_pool, source, start, position, channel, inside, C, TAPS)
            w = tl.load(conv_weight + tap * C + channel, mask=inside, other=0.0)
            total += x.to(tl.float32) * w.to(tl.float32)
        total = rounded(total, dtype)
        total = tl.div_rn(total, 1.0 + tl.exp(-total))
        tl.store(out + (start + t) * C + channel, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_sequences"])
def keep_inputs_kernel(
    projected,
    conv_pool,
    query_lens,
    rows,
    sources,
    snapshots,
    stride,
    num_sequences,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    OF_SNAPSHOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keep the last inputs.  Programs write rows that no other program reads."""
    wait_for_predecessor()
    n, at = tl.program_id(0).to(tl.int64), tl.program_id(0)
    if OF_SNAPSHOTS:
        n = tl.load(snapshots + 3 * at)
        done, to = tl.load(snapshots + 3 * at + 1), tl.load(snapshots + 3 * at + 2)
    else:
        done, to = tl.load(query_lens + n), tl.load(rows + n)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (channel < C) & is_row(n, channel) & is_row(to, channel)
    start, source = first_token(query_lens, n, num_sequences, BLOCK_N), tl.load(sources + tl.maximum(n, 0))
    # In ascending order: an old input moves to a place that was read before.
    for tap in tl.static_range(TAPS - 1):
        position = done - (TAPS - 1) + tap
        x = input_of(projected, stride, conv_pool, source, start, position, channel, inside, C, TAPS)
        tl.store(conv_pool + (to * (TAPS - 1) + tap) * C + channel, x, mask=inside)


@triton.jit
def unit(x):
    """Return x [dk] scaled to length one."""
    return x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) + 1e-6))


@triton.jit(do_not_specialize=["num_sequences", "num_snapshots"])
def recur_kernel(
    projected,
    convolved,
    a_log,
    dt_bias,
    state_pool,
    query_lens,
    rows,
    sources,
    snapshots,
    out,
    stride,
    num_sequences,
    num_snapshots,
    HAS_SNAPSHOTS: tl.constexpr,
    HK: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    C: tl.constexpr = 2 * HK * DK + H * DV
    n, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start, length = first_token(query_lens, n, num_sequences, BLOCK_N), tl.load(query_lens + n)
    source, end = tl.load(sources + n), tl.load(rows + n)
    place = head * DK * DV + k[:, None] * DV + v[None, :]
    inside = (k < DK)[:, None] & (v < DV)[None, :]
    state = tl.load(state_pool + source * H * DK * DV + place, mask=inside & is_row(source, place), other=0.0)
    snapshot = tl.arange(0, BLOCK_M)
    is_mine = snapshot < num_snapshots
    is_mine &= tl.load(snapshots + 3 * snapshot, mask=is_mine, other=-1) == n
    copy_after = tl.load(snapshots + 3 * snapshot + 1, mask=is_mine, other=-1)
    copy_to = tl.load(snapshots + 3 * snapshot + 2, mask=is_mine, other=-1)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    key_head = head // (H // HK)
    for t in range(length):
        token = start + t
        mixed = convolved + token * C
        query = tl.load(mixed + key_head * DK + k, mask=k < DK, other=0.0).to(tl.float32)
        key = tl.load(mixed + (HK + key_head) * DK + k, mask=k < DK, other=0.0).to(tl.float32)
        value = tl.load(mixed + 2 * HK * DK + head * DV + v, mask=v < DV, other=0.0).to(tl.float32)
        query, key = unit(query) * tl.div_rn(1.0, tl.sqrt_rn(DK * 1.0)), unit(key)
        gates = projected + token * stride + C + H * DV + head
        beta = rounded(sigmoid(tl.load(gates).to(tl.float32)), dtype)
        a = tl.load(gates + H).to(tl.float32) + bias
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        state *= tl.exp(-rate * softplus)
        known = tl.sum(state * key[:, None], 0)
        change = (value - known) * beta
        state += key[:, None] * change[None, :]
        read = tl.sum(state * query[:, None], 0)
        tl.store(out + (token * H + head) * DV + v, read.to(dtype), mask=v < DV)
        if HAS_SNAPSHOTS:
            to = tl.max(tl.where(copy_after == t + 1, copy_to, -1), 0)
            tl.store(state_pool + to * H * DK * DV + place, state, mask=inside & is_row(to, place))
    tl.store(state_pool + end * H * DK * DV + place, state, mask=inside & is_row(end, place))


@triton.jit
def norm_gate_kernel(
    projected,
    norm_weight,
    out,
    stride,
    eps,
    C: tl.constexpr,
    H: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head, v = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_V)[None, :]
    inside = (head < H) & (v < DV)
    place = out + (token * H + head) * DV + v
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(norm_weight + v, mask=v < DV, other=0.0).to(tl.float32)
    x = normed(x, tl.sum(x * x, 1)[:, None], DV, eps, w, 0.0, False, dtype)
    gate = tl.load(projected + token * stride + C + head * DV + v, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (x * tl.div_rn(gate, 1.0 + tl.exp(-gate))).to(dtype), mask=inside)


def gated_delta(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    query_lens: torch.Tensor,
    rows: torch.Tensor,
    sources: torch.Tensor,
    snapshots: torch.Tensor,
) -> torch.Tensor:
    """Return the values read from the states, normed and gated [T, H dv], and bring the pools forward.

    The four tables of the step are int64 on the device of `projected`, whose rows may lie apart.  No two snapshots are
    of the same token.
    """
    num_tokens, (heads, key_dim, value_dim), channels = projected.shape[0], state_pool.shape[1:], conv_pool.shape[2]
    count, copies, taps = query_lens.shape[0], snapshots.shape[0], conv_pool.shape[1] + 1
    out = torch.empty((num_tokens, heads * value_dim), dtype=projected.dtype, device=projected.device)
    assert projected.stride(1) == 1 and all(x.is_contiguous() for x in (conv_weight, conv_pool, state_pool, snapshots))
    if num_tokens == 0:
        return out
    convolved = torch.empty((num_tokens, channels), dtype=projected.dtype, device=projected.device)
    stride, blocks = projected.stride(0), triton.cdiv(channels, _CHANNELS)
    # With many sequences one program of each is enough to fill the device.
    parts = 1 if num_tokens == count else triton.cdiv(num_tokens, _TOKENS * count)
    sizes: dict[str, Any] = {"C": channels, "TAPS": taps, "BLOCK_C": _CHANNELS, "BLOCK_N": _vector(count)}
    no_fusion: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    convolve_kernel[(count, parts, blocks)](
        projected,
        conv_weight,
        conv_pool,
        query_lens,
        sources,
        convolved,
        stride,
        count,
        **sizes,
        **no_fusion,
        **launch_options(projected),
    )
    for of_snapshots, programs in ((True, copies), (False, count)):
        if programs:
            tables = query_lens, rows, sources, snapshots
            keep_inputs_kernel[(programs, blocks)](
                projected,
                conv_pool,
                *tables,
                stride,
                count,
                OF_SNAPSHOTS=of_snapshots,
                **sizes,
                **no_fusion,
                **launch_options(projected),
            )
    recur_kernel[(count, heads, triton.cdiv(value_dim, _COLUMNS))](
        projected,
        convolved,
        a_log,
        dt_bias,
        state_pool,
        query_lens,
        rows,
        sources,
        snapshots,
        out,
        stride,
        count,
        copies,
        HAS_SNAPSHOTS=copies > 0,
        HK=(channels - heads * value_dim) // (2 * key_dim),
        H=heads,
        DK=key_dim,
        DV=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=_COLUMNS,
        BLOCK_N=sizes["BLOCK_N"],
        BLOCK_M=_vector(copies),
        num_warps=1,
        enable_fp_fusion=False,
        **launch_options(projected),
    )
    norm_gate_kernel[(num_tokens, triton.cdiv(heads, 4))](
        projected,
        norm_weight,
        out,
        stride,
        eps,
        C=channels,
        H=heads,
        DV=value_dim,
        HEADS=4,
        BLOCK_V=triton.next_power_of_2(value_dim),
        **no_fusion,
        **launch_options(projected),
    )
    return out


def _vector(count: int) -> int:
    """Return the size of a vector for `count` numbers.  Few sizes, as each is a kernel of its own."""
    return next((size for size in _SNAPSHOTS if size >= count), triton.next_power_of_2(count))


def compile_cases() -> list[tuple[Any, ...]]:
    """Return each kernel at the sizes of Qwen3-Next: 16 key heads and 32 value heads of 128, 4 taps."""
    floats = ("projected", "conv_weight", "conv_pool", "convolved", "a_log", "dt_bias", "norm_weight", "out")
    known = dict.fromkeys(floats, "*bf16") | {"state_pool": "*fp32", "stride": "i32", "eps": "fp32"}
    known |= dict.fromkeys(("query_lens", "rows", "sources", "snapshots"), "*i64")
    known |= dict.fromkeys(("num_sequences", "num_snapshots"), "i32")
    channels = 2 * 16 * 128 + 32 * 128
    conv: dict[str, object] = {"C": channels, "TAPS": 4, "BLOCK_C": _CHANNELS, "BLOCK_N": 256}
    recur: dict[str, object] = {"HAS_SNAPSHOTS": True, "HK": 16, "H": 32, "DK": 128, "DV": 128}
    recur |= {"BLOCK_K": 128, "BLOCK_V": _COLUMNS, "BLOCK_N": 256, "BLOCK_M": 256}
    gate: dict[str, object] = {"C": channels, "H": 32, "DV": 128, "HEADS": 4, "BLOCK_V": 128}
    cases = [
        ("gated_delta convolve", convolve_kernel, conv, 4),
        ("gated_delta keep_inputs", keep_inputs_kernel, conv | {"OF_SNAPSHOTS": False}, 4),
        ("gated_delta recur dk=dv=128", recur_kernel, recur, 1),
        ("gated_delta norm_gate", norm_gate_kernel, gate, 4),
    ]
    return [
        (name, kernel, {x: known[x] for x in kernel.arg_names if x in known}, constants, warps, 3)
        for name, kernel, constants, warps in cases
    ]
