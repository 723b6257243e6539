"""Builds one step's `ForwardBatch` from plain lists and arrays.

Shapes: B decoding requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.core.forward_batch import ForwardBatch
from rollout.mem_cache.kv_pool import ReqToTokenPool


@dataclass(frozen=True, slots=True)
class ExtendInput:
    """`token_ids` go to positions `prefix_len ..` of row `pool_index`.  `wants_logits`: of the last of them."""

    token_ids: list[int]
    pool_index: int
    prefix_len: int
    wants_logits: bool


@dataclass(slots=True)
class DecodeInput:
    """The newest token of each request, int64 on the host [B].

    A batch that only decodes on the CPU holds these very tensors.
    """

    pool_indices: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor  # positions + 1
    rows: torch.Tensor  # 0 .. B - 1


def build_forward_batch(
    extends: list[ExtendInput], decode: DecodeInput, decode_slots: torch.Tensor, pool: ReqToTokenPool
) -> ForwardBatch:
    """The step's batch.

    `decode_slots` [B] are those of the decoding requests' tokens.  Slots of all tokens are entered in `pool`, which
    also has the tokens that decode.
    """
    decode_batch = _decode_only(decode, decode_slots, pool)
    return _with_extends(extends, decode_batch) if extends else decode_batch


def _decode_only(decode: DecodeInput, decode_slots: torch.Tensor, pool: ReqToTokenPool) -> ForwardBatch:
    pool_indices, positions, seq_lens, rows = decode.pool_indices, decode.positions, decode.seq_lens, decode.rows
    if not pool.table.is_cpu:  # copies, in one transfer
        tensors = torch.stack([pool_indices, positions, seq_lens, rows]).to(pool.table.device)
        pool_indices, positions, seq_lens, rows = tensors.unbind()
    return ForwardBatch(
        input_ids=pool.newest_tokens.get(pool_indices),
        positions=positions,
        out_cache_loc=decode_slots,
        req_to_token=pool.table,
        extend_req_pool_indices=[],
        extend_prefix_lens=[],
        extend_lens=[],
        decode_req_pool_indices=pool_indices,
        decode_seq_lens=seq_lens,
        decode_req_pool_indices_host=decode.pool_indices,
        decode_seq_lens_host=decode.seq_lens,
        logits_rows=rows,
    )


def _with_extends(extends: list[ExtendInput], decode: ForwardBatch) -> ForwardBatch:
    """`decode` behind the tokens of `extends`."""
    table = decode.req_to_token
    device = table.device
    lens = [len(item.token_ids) for item in extends]
    token_ids = [token for item in extends for token in item.token_ids]
    positions = [torch.arange(x.prefix_len, x.prefix_len + count, device=device) for x, count in zip(extends, lens)]
    slots = [table[x.pool_index, x.prefix_len : x.prefix_len + count] for x, count in zip(extends, lens)]
    wanted = torch.tensor(_logits_rows(extends), dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=torch.cat([torch.tensor(token_ids, dtype=torch.int64, device=device), decode.input_ids]),
        positions=torch.cat([*positions, decode.positions]),
        out_cache_loc=torch.cat([*slots, decode.out_cache_loc]),
        req_to_token=table,
        extend_req_pool_indices=[item.pool_index for item in extends],
        extend_prefix_lens=[item.prefix_len for item in extends],
        extend_lens=lens,
        decode_req_pool_indices=decode.decode_req_pool_indices,
        decode_seq_lens=decode.decode_seq_lens,
        decode_req_pool_indices_host=decode.decode_req_pool_indices_host,
        decode_seq_lens_host=decode.decode_seq_lens_host,
        logits_rows=torch.cat([wanted, decode.logits_rows + len(token_ids)]),
    )


def _logits_rows(extends: list[ExtendInput]) -> list[int]:
    rows, end = [], 0
    for item in extends:
        end += len(item.token_ids)
        if item.wants_logits:
            rows.append(end - 1)
    return rows
