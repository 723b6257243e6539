"""Attention over paged KV with PyTorch's scaled dot product attention: every device and every float dtype.

A step becomes few, large calls:

    extend   sequences of equal prefix and equal length form a group; a group is one call
    decode   requests are bucketed by length so that padding at most about doubles the work; a bucket is one call,
             with the query heads that share a key/value head as the rows of one small matrix

Shapes: T tokens, X sequences of an extend group, Q tokens computed of each, L length of KV, B requests of a decode
bucket, H query heads, Hkv key/value heads, G = H / Hkv, hd size of a query and a key, vd size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch
from rollout.core.host_copy import to_device
from rollout.kernels.operators.qk_norm_rope_store import pool_rows
from rollout.memory.kv_pool import KVPool

# Below this many gathered KV rows one padded call is cheaper than several exact ones.
SMALL_GATHER_ROWS = 4096
# Above this many query rows a mask per query head costs more than SDPA's own handling of grouped heads saves.
ROWS_FORM_MAX_QUERIES = 64


@dataclass(slots=True)
class _ExtendGroup:
    """X sequences that compute Q tokens each on top of the same number of cached ones."""

    rows: torch.Tensor | slice  # [X * Q] rows of the step
    num_sequences: int
    requests_X: torch.Tensor  # rows of the slot table
    lengths_X: torch.Tensor  # lengths of KV, all the same
    kv_slots: torch.Tensor  # [X * L]
    mask_QL: torch.Tensor | None  # bool, True where attended; None: no cached prefix, plain causal


@dataclass(slots=True)
class _DecodeBucket:
    """B requests with one token each."""

    rows: torch.Tensor | slice  # [B] rows of the step
    num_sequences: int
    requests_X: torch.Tensor  # rows of the slot table
    lengths_X: torch.Tensor  # lengths of KV
    kv_slots: torch.Tensor  # [B * L], padded with the request's own last slot
    mask: torch.Tensor | None  # [B, 1, 1, L] additive; None: all lengths are L


class TorchNativeBackend(AttentionBackend):
    """Attention in plain torch.  Keys and values in FP8 are widened when they are gathered.

    Their scales are factors of the scores' scale and of the result.
    """

    def __init__(self, kv: KVPool) -> None:
        super().__init__(kv)
        self._extend: list[_ExtendGroup] = []
        self._decode: list[_DecodeBucket] = []
        self._tables: tuple[torch.Tensor, ...] = ()  # slot tables of layers without and with a window

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None

    def plan(self, batch: ForwardBatch) -> None:
        self._extend = _plan_extend(batch)
        self._decode = _plan_decode(batch, self.kv.dtype)
        self._tables = batch.req_to_token, batch.window_table

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_scale, v_scale = self.kv.scales[layer]
        if k_scale != 1.0:
            scale = (q.shape[2] ** -0.5 if scale is None else scale) * k_scale
        out = self._attend(layer, q, scale, window, sinks)
        return out if v_scale == 1.0 else out.mul_(v_scale)

    def _attend(
        self, layer: int, q: torch.Tensor, scale: float | None, window: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        k_pool, v_pool = self.kv.k[layer], self.kv.v[layer]
        out = q.new_empty(q.shape[0], q.shape[1] * v_pool.shape[2])
        if window is not None or sinks is not None:
            parts: list[_ExtendGroup | _DecodeBucket] = [*self._extend, *self._decode]
            table = self._tables[window is not None]
            for part in parts:
                out[part.rows] = _explicit(part, table, q[part.rows], k_pool, v_pool, scale, window, sinks)
            return out
        if not self._extend and len(self._decode) == 1:
            return _decode(self._decode[0], q, k_pool, v_pool, scale)
        for group in self._extend:
            out[group.rows] = _extend(group, q[group.rows], k_pool, v_pool, scale)
        for bucket in self._decode:
            out[bucket.rows] = _decode(bucket, q[bucket.rows], k_pool, v_pool, scale)
        return out


def _plan_extend(batch: ForwardBatch) -> list[_ExtendGroup]:
    """Group the extending sequences by (prefix length, extend length), in order of first appearance."""
    members: dict[tuple[int, int], list[tuple[int, int]]] = {}  # -> (first row, request row)
    first_row = 0
    for request, prefix_len, extend_len in zip(
        batch.extend_req_pool_indices, batch.extend_prefix_lens, batch.extend_lens, strict=True
    ):
        members.setdefault((prefix_len, extend_len), []).append((first_row, request))
        first_row += extend_len
    assert first_row == batch.num_extend_tokens, "extend_lens do not add up to the step's extend tokens"
    device = batch.input_ids.device
    groups = []
    for (prefix_len, extend_len), group in members.items():
        starts = [start for start, _ in group]
        contiguous = starts[-1] - starts[0] == extend_len * (len(starts) - 1)
        rows: torch.Tensor | slice = slice(starts[0], starts[0] + extend_len * len(starts))
        if not contiguous:
            offsets = torch.arange(extend_len, device=device)
            rows = (to_device(torch.tensor(starts), device)[:, None] + offsets).flatten()
        length, mask = prefix_len + extend_len, None
        requests = to_device(torch.tensor([request for _, request in group]), device)
        slots = batch.req_to_token[requests, :length].flatten()
        if prefix_len > 0:
            mask = torch.ones(extend_len, length, dtype=torch.bool, device=device).tril(prefix_len)
        lengths = torch.full((len(group),), length, device=device)
        groups.append(_ExtendGroup(rows, len(group), requests, lengths, slots, mask))
    return groups


def _plan_decode(batch: ForwardBatch, dtype: torch.dtype) -> list[_DecodeBucket]:
    lengths_B = batch.decode.seq_lens
    num_requests = lengths_B.shape[0]
    if num_requests == 0:
        return []
    first = batch.num_extend_tokens
    lengths = batch.decode.seq_lens_host.tolist()
    buckets = bucket_by_length(lengths)
    if len(buckets) == 1:
        rows = slice(first, first + num_requests)
        return [_decode_bucket(batch, batch.decode.req_pool_indices, lengths_B, lengths, rows, dtype)]
    result = []
    for bucket in buckets:
        picks = to_device(torch.tensor(bucket), lengths_B.device)
        requests, bucket_lengths = batch.decode.req_pool_indices[picks], [lengths[i] for i in bucket]
        result.append(_decode_bucket(batch, requests, lengths_B[picks], bucket_lengths, picks + first, dtype))
    return result


def bucket_by_length(lengths: list[int]) -> list[list[int]]:
    """Split `0 .. len(lengths) - 1` into buckets whose padding to their longest at most doubles the work.

    There is one bucket where this holds for all lengths together, or where the whole is small.
    """
    padded = len(lengths) * max(lengths)
    if padded <= max(2 * sum(lengths), SMALL_GATHER_ROWS):
        return [list(range(len(lengths)))]
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if 2 * lengths[index] < longest or not buckets:
            buckets.append([])
            longest = lengths[index]
        buckets[-1].append(index)
    return buckets


def _decode_bucket(
    batch: ForwardBatch,
    requests_B: torch.Tensor,
    lengths_B: torch.Tensor,
    lengths: list[int],
    rows: torch.Tensor | slice,
    dtype: torch.dtype,
) -> _DecodeBucket:
    longest = max(lengths)
    if min(lengths) == longest:
        slots = batch.req_to_token[requests_B, :longest].flatten()
        return _DecodeBucket(rows, len(lengths), requests_B, lengths_B, slots, None)
    positions_L = torch.arange(longest, device=lengths_B.device)
    # A padded position reads a slot that is known to be written: the content of a free slot could be NaN.
    inside_BL = torch.minimum(positions_L, lengths_B[:, None] - 1)
    slots = batch.req_to_token[requests_B[:, None], inside_BL].flatten()
    mask = torch.zeros(len(lengths), longest, dtype=dtype, device=lengths_B.device)
    mask.masked_fill_(positions_L >= lengths_B[:, None], float("-inf"))
    return _DecodeBucket(rows, len(lengths), requests_B, lengths_B, slots, mask[:, None, None])


def _gather(pool: torch.Tensor, slots: torch.Tensor, num_sequences: int, dtype: torch.dtype) -> torch.Tensor:
    """Gather the rows at `slots` of a pool [S, Hkv, hd] as [num_sequences, Hkv, L, hd] of `dtype`."""
    # To select rows of one flat matrix is several times faster on the CPU than to index the three-dimensional pool.
    rows = pool_rows(pool.view(pool.shape[0], -1), slots).to(dtype)
    return rows.view(num_sequences, -1, *pool.shape[1:]).transpose(1, 2)


def _decode(
    bucket: _DecodeBucket, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend with one query of each request, q [B, H, hd].  Returns [B, H * vd]."""
    num_requests, num_kv_heads = bucket.num_sequences, k_pool.shape[1]
    k = _gather(k_pool, bucket.kv_slots, num_requests, q.dtype)
    v = _gather(v_pool, bucket.kv_slots, num_requests, q.dtype)
    q = q.view(num_requests, num_kv_heads, -1, q.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=scale).reshape(num_requests, -1)


def _extend(
    group: _ExtendGroup, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend with the queries of a group, q [X * Q, H, hd].  Returns [X * Q, H * vd]."""
    count, num_heads, head_dim = group.num_sequences, q.shape[1], q.shape[2]
    queries = q.view(count, -1, num_heads, head_dim).transpose(1, 2)
    k, v = (_gather(pool, group.kv_slots, count, q.dtype) for pool in (k_pool, v_pool))
    if group.mask_QL is None:
        out = F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape[0], -1)
    num_queries, num_kv_heads = queries.shape[2], k_pool.shape[1]
    if num_queries > ROWS_FORM_MAX_QUERIES:
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask_QL, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape[0], -1)
    # With few queries the heads of a group become further rows of the same matrix, as in decoding.
    queries = queries.reshape(count, num_kv_heads, -1, head_dim)
    mask = group.mask_QL.repeat(num_heads // num_kv_heads, 1)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
    return out.reshape(count, num_heads, num_queries, -1).transpose(1, 2).reshape(q.shape[0], -1)


def _explicit(
    part: _ExtendGroup | _DecodeBucket,
    table: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with q [X * Q, H, hd] through explicit scores and softmax, because SDPA has no sinks.

    It reads the last L positions of each sequence: its queries see no others.  Returns [X * Q, H * vd].
    """
    count, num_heads, num_kv_heads = part.num_sequences, q.shape[1], k_pool.shape[1]
    queries = q.view(count, -1, num_heads, q.shape[2]).transpose(1, 2)
    num_queries, length = queries.shape[2], part.kv_slots.shape[0] // count
    if window is not None:
        length = min(length, window + num_queries - 1)
    lengths_X1 = part.lengths_X[:, None]
    positions_XL = (lengths_X1 - length).clamp(min=0) + torch.arange(length, device=q.device)
    slots = table[part.requests_X[:, None], positions_XL.minimum(lengths_X1 - 1)].flatten()
    k, v = (_gather(pool, slots, count, q.dtype) for pool in (k_pool, v_pool))
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
    scores_XHQL = queries @ k.transpose(2, 3) * (q.shape[2] ** -0.5 if scale is None else scale)
    ends_XQ1 = (lengths_X1 - torch.arange(num_queries - 1, -1, -1, device=q.device))[..., None]
    hidden_XQL = positions_XL[:, None] >= ends_XQ1
    if window is not None:
        hidden_XQL |= positions_XL[:, None] < ends_XQ1 - window
    scores_XHQL = scores_XHQL.masked_fill(hidden_XQL[:, None], float("-inf"))
    if sinks is not None:
        sinks_XHQ1 = sinks.to(q.dtype).view(1, -1, 1, 1).expand(count, -1, num_queries, 1)
        scores_XHQL = torch.cat((scores_XHQL, sinks_XHQ1), -1)
    work_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights_XHQL = scores_XHQL.softmax(-1, dtype=work_dtype).to(q.dtype)[..., :length]
    return (weights_XHQL @ v).transpose(1, 2).reshape(q.shape[0], -1)
