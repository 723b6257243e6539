"""Token embedding and the output head, which may be the same matrix.

Shapes: T tokens, N rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.layers.linear import Linear, matrix_entry
from rollout.layers.ops.base import LayerOps
from rollout.layers.ops.place import Place, ViewPlace
from rollout.layers.weight_entry import WeightEntry, WeightLayer


class Embedding(WeightLayer):
    """Weight [V, D], for looking up rows only."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str, ops: LayerOps
    ) -> None:
        self.ops = ops
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, D]."""
        return self.ops.gather_rows(self.weight, input_ids_T)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        yield WeightEntry(f"{prefix}.weight", tuple(self.weight.shape), self.weight.dtype, self._places)

    def _places(self) -> list[Place]:
        return [ViewPlace(self.weight)]


class TiedEmbedding(Linear):
    """The matrix [V, D] of an output head, looked up by row."""

    def __call__(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, D]."""
        return self.ops.matrix_rows(self.weight, input_ids_T, self.in_features)


class OutputHead(WeightLayer):
    """Logits over the vocabulary.  With `tied_to`, the matrix is the embedding's and this layer holds nothing."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        tied_to: TiedEmbedding | None = None,
    ) -> None:
        self.ops = ops
        self.is_tied = tied_to is not None
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.weight = tied_to.weight if tied_to else ops.empty_matrix(vocab_size, hidden_size, dtype, device)

    def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, D] -> logits [N, V] in the model's dtype."""
        return self.ops.linear(hidden_ND, self.weight, self.vocab_size)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        if not self.is_tied:
            yield matrix_entry(self.ops, f"{prefix}.weight", self.weight, range(self.vocab_size), self.hidden_size)
