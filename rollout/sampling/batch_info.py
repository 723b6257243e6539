"""The sampling parameters of the rows of one step, as tensors.

Built from plain parameters and histories; does not know requests.  Building it costs Python time per row, so the
caller keeps it while the rows stay the same: what changes from step to step is read from the live histories of the rows
that have penalties or a minimum length.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.core.sampling_params import SamplingParams


@dataclass
class SamplingRow:
    """What one row brings: `seed` as an unsigned 64-bit number, the ids that end it, and its tokens so far."""

    params: SamplingParams
    seed: int
    end_ids: Sequence[int]
    prompt_ids: Sequence[int]
    output_ids: list[int]  # the live list, read at every step


class SamplingBatchInfo:
    """Parameters of N rows.  `None` fields mean that no row uses the feature."""

    def __init__(self, rows: list[SamplingRow], vocab_size: int, device: torch.device | str = "cpu") -> None:
        params = [row.params for row in rows]
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        self.all_greedy = all(p.is_greedy for p in params)
        self.greedy = self._tensor([p.is_greedy for p in params], torch.bool)
        self.temperatures = self._tensor([p.effective_temperature for p in params], torch.float32)
        self.scales = bool((self.temperatures != 1.0).any())
        filtering = [
            i for i, p in enumerate(params) if not p.is_greedy and (p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0)
        ]
        self.filtered_rows = self._tensor(filtering, torch.int64) if filtering else None
        self.top_k = self._tensor(
            [params[i].top_k if params[i].top_k > 0 else vocab_size for i in filtering], torch.int64
        )
        self.top_p = self._tensor([params[i].top_p for i in filtering], torch.float64)
        self.min_p = self._tensor([params[i].min_p for i in filtering], torch.float64)
        self.bias = self._bias(params)
        self.penalised_rows = [i for i, p in enumerate(params) if p.has_penalties]
        self.min_length_rows = [i for i, p in enumerate(params) if p.min_new_tokens > 0]

    def apply(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Logit bias, penalties and minimum length, in place.

        Frequency and presence penalties count output tokens (OpenAI's definition); the repetition penalty looks at
        prompt and output (Keskar et al., "CTRL", 2019).
        """
        if self.bias is not None:
            rows, ids, values = self.bias
            logits_NV.index_put_((rows, ids), values.to(logits_NV.dtype), accumulate=True)
        for i in self.penalised_rows:
            self._penalise(logits_NV[i], self.rows[i])
        for i in self.min_length_rows:
            row = self.rows[i]
            if len(row.output_ids) < row.params.min_new_tokens and row.end_ids:
                logits_NV[i, list(row.end_ids)] = -torch.inf
        return logits_NV

    def _penalise(self, logits_V: torch.Tensor, row: SamplingRow) -> None:
        params = row.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor([*row.prompt_ids, *row.output_ids], device=self.device).unique()
            values = logits_V[seen]
            penalty = params.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if row.output_ids and (params.frequency_penalty or params.presence_penalty):
            seen, counts = torch.tensor(row.output_ids, device=self.device).unique(return_counts=True)
            logits_V[seen] -= params.frequency_penalty * counts + params.presence_penalty

    def _bias(self, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        entries = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
        if not entries:
            return None
        rows, ids, values = zip(*entries)
        return (
            self._tensor(rows, torch.int64),
            self._tensor(ids, torch.int64),
            self._tensor(values, torch.float32),
        )

    def _tensor(self, values: Sequence, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
