"""Logit bias, penalties and minimum length in plain torch.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch

from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow


def apply_edits(logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> torch.Tensor:
    """In place, in this order: bias, repetition, frequency and presence, minimum length.

    Frequency and presence penalties count output tokens (OpenAI's definition); the repetition penalty looks at prompt
    and output (Keskar et al., "CTRL", 2019).
    """
    for i, row in info.rows_with_lists:
        _edit_row(logits_NV[i], row, int(positions_N[i]))
    return logits_NV


def _edit_row(logits_V: torch.Tensor, row: SamplingRow, position: int) -> None:
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits_V.device)
        logits_V[ids] += values.to(logits_V.dtype)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([*row.prompt_ids, *row.output_ids], device=logits_V.device, dtype=torch.int64).unique()
        values, penalty = logits_V[seen], params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output_ids and (params.frequency_penalty or params.presence_penalty):
        seen, counts = torch.tensor(row.output_ids, device=logits_V.device).unique(return_counts=True)
        logits_V[seen] -= params.frequency_penalty * counts.to(logits_V.dtype) + params.presence_penalty
    if position < params.min_new_tokens:
        logits_V[row.end_ids_below(logits_V.shape[0])] = -torch.inf
