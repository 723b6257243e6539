"""Token embedding, the output head, which may be the same matrix, and the head of a classifier.

The embedding is whole on every rank.  Ranks that share tokens have some rows of the head each, unless it is the
embedding.

Shapes: T tokens, N rows whose logits are wanted, D hidden, V vocabulary, G ranks that share tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from rollout.distributed.communicator import share_sizes
from rollout.kernels.places import Place, ViewPlace
from rollout.layers.build import Build
from rollout.layers.linear import Linear, row_entry
from rollout.layers.lora import LoraModule
from rollout.layers.shard import Shard
from rollout.layers.weight_entry import WeightEntry, WeightLayer


class Embedding(WeightLayer):
    """An embedding of tokens with a weight [V, D] whose rows are only looked up."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        self.ops = build.ops
        self.weight = build.empty(vocab_size, hidden_size)

    def __call__(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Gather the rows [T, D] of the tokens [T] int64."""
        return self.ops.gather_rows(self.weight, input_ids_T)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        yield WeightEntry(f"{prefix}.weight", tuple(self.weight.shape), self.weight.dtype, self._places)

    def _places(self) -> list[Place]:
        return [ViewPlace(self.weight)]


class TiedEmbedding(Linear):
    """The matrix [V, D] of an output head, looked up by row.  No adapter changes it."""

    def __call__(self, input_ids_T: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
        """Gather the rows [T, D] of the tokens [T] int64."""
        return self.ops.matrix_rows(self.weight, input_ids_T, self.in_features)

    def lora_modules(self, prefix: str) -> dict[str, LoraModule]:
        return {}


class OutputHead(WeightLayer):
    """Logits over the vocabulary.  With `tied_to` it uses the embedding's matrix and holds none of its own.

    Ranks that share tokens call it together.
    """

    def __init__(self, vocab_size: int, hidden_size: int, build: Build, tied_to: TiedEmbedding | None = None) -> None:
        self.ops = build.ops
        ranks = self._ranks = build.parallel.attn_tp
        self.is_tied = tied_to is not None
        self.hidden_size = hidden_size
        self.rows = Shard.whole(vocab_size) if tied_to else Shard.even(vocab_size, ranks.rank, ranks.size)
        self.weight = tied_to.weight if tied_to else build.empty_matrix(self.rows.length, hidden_size)

    def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Compute the logits [N, V] of hidden states [N, D], in the model's dtype."""
        mine = self.ops.linear(hidden_ND, self.weight, self.rows.length)
        return mine if self.rows.is_whole else self._gathered(mine)

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        lengths = share_sizes(self.rows.total, self._ranks.size)
        if lengths[0] == lengths[-1]:
            return self._ranks.all_gather(mine).transpose(0, 1).flatten(1)
        padded = F.pad(mine, (0, lengths[0] - mine.shape[1]))
        logits_NV = mine.new_empty(mine.shape[0], self.rows.total)
        for part, columns in zip(self._ranks.all_gather(padded), logits_NV.split(lengths, dim=1), strict=True):
            columns.copy_(part[:, : columns.shape[1]])
        return logits_NV

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        if not self.is_tied:
            place = self.ops.storage.matrix_place(self.weight, range(self.rows.length), self.hidden_size)
            yield row_entry(f"{prefix}.weight", self.weight, place, self.rows, self.hidden_size)


class LabelHead(Linear):
    """A number for each label [N, labels] of hidden states [N, D].  Every rank has all of it; no adapter changes it."""

    def __init__(self, hidden_size: int, num_labels: int, has_bias: bool, build: Build) -> None:
        super().__init__(Shard.whole(hidden_size), num_labels, build, bias=has_bias, as_sent=True)

    def lora_modules(self, prefix: str) -> dict[str, LoraModule]:
        return {}
