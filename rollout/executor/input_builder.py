"""Builds one step's `ForwardBatch` from plain lists and arrays.

Shapes: B decoding requests, T tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rollout.core.forward_batch import DecodeRows, ForwardBatch
from rollout.core.host_copy import to_device
from rollout.memory.kv_pool import ReqToTokenPool


@dataclass(frozen=True, slots=True)
class ExtendInput:
    """`token_ids` go to positions `prefix_len ..` of row `pool_index`.  Logits of the last `num_logits`
    tokens are wanted."""

    token_ids: list[int]
    pool_index: int
    prefix_len: int
    num_logits: int


@dataclass(slots=True)
class DecodeInput:
    """The newest token of each request, int64 on the host [B].

    A batch that only decodes on the CPU holds these same tensors.  `on_device`: pool indices and rows on the device,
    made in the first step.  They stay the same tensors, so that one step's tokens are the next one's input uncopied.
    """

    pool_indices: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor  # positions + 1
    rows: torch.Tensor  # 0 .. B - 1
    on_device: tuple[torch.Tensor, torch.Tensor] | None = None


def build_forward_batch(
    extends: list[ExtendInput], decode: DecodeInput, decode_slots: torch.Tensor, pool: ReqToTokenPool
) -> ForwardBatch:
    """Return the step's batch.

    `decode_slots` [B], on the host, are the slots of the decoding requests' tokens.  Slots of all tokens are entered in
    `pool`, which also has the newest tokens.  On a device, a step that only decodes costs one transfer.
    """
    decode_batch = _decode_only(decode, decode_slots, pool)
    return _with_extends(extends, decode_batch, pool) if extends else decode_batch


def as_decoding_rows(batch: ForwardBatch) -> ForwardBatch:
    """Return the step with a decoding row for each of its tokens, which reads the KV up to its own position.

    A layer stores the KV of all tokens before any of them attends.  So rows of one sequence see one another as its
    tokens do.  `batch` has no recurrent states.
    """
    assert batch.states is None, "a state goes from token to token"
    lens = np.array(batch.extend_lens, dtype=np.int64)
    first = np.array(batch.extend_prefix_lens, dtype=np.int64) + 1
    rows = np.array(batch.extend_req_pool_indices, dtype=np.int64).repeat(lens)
    seq_lens = first.repeat(lens) + np.arange(lens.sum()) - (lens.cumsum() - lens).repeat(lens)
    decode = batch.decode
    host = torch.stack(
        [
            torch.cat([torch.from_numpy(rows), decode.req_pool_indices_host]),
            torch.cat([torch.from_numpy(seq_lens), decode.seq_lens_host]),
        ]
    )
    rows_T, lens_T = to_device(host, batch.req_to_token.device).unbind()
    return replace(
        batch,
        extend_req_pool_indices=[],
        extend_prefix_lens=[],
        extend_lens=[],
        decode=DecodeRows(rows_T, lens_T, *host.unbind()),
    )


def _decode_only(decode: DecodeInput, decode_slots: torch.Tensor, pool: ReqToTokenPool) -> ForwardBatch:
    pool_indices, positions, seq_lens, rows = decode.pool_indices, decode.positions, decode.seq_lens, decode.rows
    slots = decode_slots
    if pool.is_apart:
        if decode.on_device is None:
            indices, numbers = to_device(torch.stack([pool_indices, rows]), pool.device).unbind()
            decode.on_device = indices, numbers
        pool_indices, rows = decode.on_device
        positions, seq_lens, slots = to_device(torch.stack([positions, seq_lens, slots]), pool.device).unbind()
        pool.table.index_put_((pool_indices, positions), slots)
    return ForwardBatch(
        input_ids=pool.newest_tokens.get(pool_indices),
        positions=positions,
        out_cache_loc=slots,
        req_to_token=pool.table,
        extend_req_pool_indices=[],
        extend_prefix_lens=[],
        extend_lens=[],
        decode=DecodeRows(pool_indices, seq_lens, decode.pool_indices, decode.seq_lens),
        logits_rows=rows,
    )


def _with_extends(extends: list[ExtendInput], decode: ForwardBatch, pool: ReqToTokenPool) -> ForwardBatch:
    """Return the batch of the tokens of `extends`, followed by the tokens of `decode`."""
    lens = [len(item.token_ids) for item in extends]
    spans = [(x.pool_index, x.prefix_len, x.prefix_len + count) for x, count in zip(extends, lens)]
    token_ids = [token for item in extends for token in item.token_ids]
    slots = [pool.span(row, start, end) for row, start, end in spans]
    columns = [token_ids, np.concatenate([np.arange(start, end) for _, start, end in spans]), np.concatenate(slots)]
    new_ids, positions, new_slots = to_device(torch.from_numpy(np.array(columns, np.int64)), pool.device).unbind()
    wanted = to_device(torch.from_numpy(np.array(_logits_rows(extends), np.int64)), pool.device)
    return ForwardBatch(
        input_ids=torch.cat([new_ids, decode.input_ids]),
        positions=torch.cat([positions, decode.positions]),
        out_cache_loc=torch.cat([new_slots, decode.out_cache_loc]),
        req_to_token=decode.req_to_token,
        extend_req_pool_indices=[item.pool_index for item in extends],
        extend_prefix_lens=[item.prefix_len for item in extends],
        extend_lens=lens,
        decode=decode.decode,
        logits_rows=torch.cat([wanted, decode.logits_rows + len(token_ids)]),
    )


def _logits_rows(extends: list[ExtendInput]) -> list[int]:
    rows: list[int] = []
    end = 0
    for item in extends:
        end += len(item.token_ids)
        rows += range(end - item.num_logits, end)
    return rows
