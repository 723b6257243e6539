"""Requests that pool: from the hidden states of their prompt to the rows of their answer.

    hidden states of a step -- take_all_rows --> rows, in flight -- PoolRecord --> PooledRows

A row depends on its token and the tokens before it alone.  A mean adds the positions one after the other in float64.
So the bits of an answer do not depend on the batch, nor on the chunks of the prompt.

Shapes: T tokens of a request in a step, D hidden, N rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.core.messages.req_output import PooledRows
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.model_state import ServingEpoch
from rollout.scheduler.req import Extend, PoolRecord, Req

_ROWS_AT_ONCE = 256  # of a mean, in float64


def take_all_rows(
    extends: Sequence[Extend], hidden_TD: torch.Tensor, model: DecoderForCausalLM, epoch: ServingEpoch
) -> list[tuple[Req, torch.Tensor]]:
    """Return the rows that a step with these prompts adds to requests that pool; its first rows are the prompts'."""
    pooled, end = [], 0
    for item in extends:
        begin, end = end, end + item.count
        if item.req.output.pool is not None:
            rows_NC = _take_rows(item, hidden_TD[begin:end], model, epoch)
            if rows_NC is not None:
                pooled.append((item.req, rows_NC))
    return pooled


def _take_rows(
    item: Extend, hidden_TD: torch.Tensor, model: DecoderForCausalLM, epoch: ServingEpoch
) -> torch.Tensor | None:
    """Return the rows [N, C] that a step of `epoch` adds to the answer of a request, in float32; None for no row.

    `hidden_TD` are the hidden states of the request's tokens in this step.  The rows share no memory with them.  Ranks
    that share tokens all call this, and get the same rows.
    """
    record = item.req.output.pool
    assert record is not None
    first, end = max(item.start, record.next_position), item.start + item.count
    if end <= first:
        return None
    record.next_position = end
    kind, is_last = record.params.kind, end == item.req.prompt_len
    if kind == "last":
        first = end - 1
    if (kind == "last" and not is_last) or (kind == "cls" and first > 0):
        return None
    record.versions.note(epoch, first)
    rows_ND = hidden_TD[first - item.start :]
    if kind == "cls":
        rows_ND = rows_ND[:1]
    elif kind == "mean":
        record.total_D = _added(record.total_D, rows_ND)
        if not is_last:
            return None
        rows_ND = record.total_D[None] / end
    return (model.compute_scores(rows_ND) if record.params.scores else rows_ND).to(torch.float32, copy=True)


def _added(total_D: torch.Tensor | None, rows_TD: torch.Tensor) -> torch.Tensor:
    """Return the sum in float64 after each of the rows was added in turn: `cumsum` goes from row to row."""
    for rows_ND in rows_TD.split(_ROWS_AT_ONCE):
        wide_ND = rows_ND.double()
        if total_D is not None:
            wide_ND = torch.cat([total_D[None], wide_ND])
        total_D = wide_ND.cumsum(0)[-1].clone()
    assert total_D is not None
    return total_D


def pooled_rows(record: PoolRecord) -> PooledRows | None:
    """Return the rows of a finished request, cut and scaled as it asked; None if it ended before it had any."""
    if not record.rows:
        return None
    rows_NC = np.concatenate(record.rows)
    params = record.params
    if params.dimensions is not None:
        rows_NC = rows_NC[:, : params.dimensions]
    if params.normalise:
        wide_NC = rows_NC.astype(np.float64)
        lengths_N1 = np.sqrt(np.square(wide_NC).sum(axis=1, keepdims=True))
        rows_NC = wide_NC / np.maximum(lengths_N1, np.finfo(np.float64).tiny)
    end = 1 if params.kind == "cls" else record.next_position
    return PooledRows(
        data=np.ascontiguousarray(rows_NC, dtype="<f4").tobytes(),
        num_rows=rows_NC.shape[0],
        num_columns=rows_NC.shape[1],
        versions=record.versions.spans(end),
    )
