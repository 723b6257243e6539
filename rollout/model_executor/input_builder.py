"""From plain lists to one step's `ForwardBatch`.  Pure; knows no requests, no policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.core.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class ExtendInput:
    """`token_ids` go to positions `prefix_len ..` of row `pool_index`.  `wants_logits`: of the last of them."""

    token_ids: list[int]
    pool_index: int
    prefix_len: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class DecodeInput:
    """One token a request [B]; `seq_lens` count it."""

    token_ids: list[int]
    pool_indices: list[int]
    seq_lens: list[int]


def build_forward_batch(extends: list[ExtendInput], decode: DecodeInput, req_to_token: torch.Tensor) -> ForwardBatch:
    """The step's batch.  Slots of all its tokens are already entered in `req_to_token`."""
    device = req_to_token.device
    decode_rows = torch.tensor(decode.pool_indices, dtype=torch.int64, device=device)
    seq_lens = torch.tensor(decode.seq_lens, dtype=torch.int64, device=device)
    token_ids = [token for item in extends for token in item.token_ids] + decode.token_ids
    positions = [torch.arange(x.prefix_len, x.prefix_len + len(x.token_ids), device=device) for x in extends]
    slots = [req_to_token[x.pool_index, x.prefix_len : x.prefix_len + len(x.token_ids)] for x in extends]
    lens = [len(item.token_ids) for item in extends]
    num_extend = sum(lens)
    return ForwardBatch(
        input_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.cat([*positions, seq_lens - 1]),
        out_cache_loc=torch.cat([*slots, req_to_token[decode_rows, seq_lens - 1]]),
        req_to_token=req_to_token,
        extend_req_pool_indices=[item.pool_index for item in extends],
        extend_prefix_lens=[item.prefix_len for item in extends],
        extend_lens=lens,
        decode_req_pool_indices=decode_rows,
        decode_seq_lens=seq_lens,
        logits_rows=torch.tensor(
            _logits_rows(extends) + list(range(num_extend, num_extend + len(decode.token_ids))),
            dtype=torch.int64,
            device=device,
        ),
    )


def _logits_rows(extends: list[ExtendInput]) -> list[int]:
    rows, end = [], 0
    for item in extends:
        end += len(item.token_ids)
        if item.wants_logits:
            rows.append(end - 1)
    return rows
