"""Token embedding and the output head, which may be the same matrix.

Shapes: T tokens, N rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from rollout.layers.ops.base import LayerOps
from rollout.layers.weight_entry import SingleWeightLayer, WeightEntry, empty_parameter


class Embedding(SingleWeightLayer):
    """Weight [V, D]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, D]."""
        return F.embedding(input_ids_T, self.weight)


class OutputHead(SingleWeightLayer):
    """Logits over the vocabulary.  With `tied_to`, the matrix is the embedding's and this layer holds nothing."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        tied_to: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.is_tied = tied_to is not None
        self.weight = (
            tied_to.weight if tied_to else empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)
        )

    def forward(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, D] -> logits [N, V] in float32, or float64 for a float64 model."""
        logits_NV = self.ops.linear(hidden_ND, self.weight)
        return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        if not self.is_tied:
            yield self.rows_entry(f"{prefix}.weight")
