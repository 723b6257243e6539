"""`DraftModel`: the interface of a model whose proposals the served model verifies.

Shapes: T rows of a forward, D hidden size of the draft, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rollout.core.forward_batch import ForwardBatch
from rollout.core.specs.layer_specs import KVKind
from rollout.layers.context import ForwardContext


class DraftModel(Protocol):
    """A model on its own KV, in the slots of the served model's tokens.

    Without `needs_hidden`, the row at position p takes the token of p and predicts the one of p + 1.  With it, the row
    takes the token of p + 1 and the served model's hidden state of p, and predicts the token of p + 2.  The state that
    it returns is then the hidden state of the next row.

    With `has_experts` all ranks of the engine call it together, as its experts are spread over them.  Else the ranks
    that share tokens do, and groups of them need not know of one another.
    """

    needs_hidden: bool
    has_experts: bool

    @property
    def kv_layers(self) -> Sequence[KVKind | None]:
        """The KV that each of its layers keeps of a token on this rank."""

    def __call__(self, batch: ForwardBatch, context: ForwardContext, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Return the states [T, D] of the rows, for `compute_logits`.

        `hidden_TD`: only with `needs_hidden`, and where this rank has rows.
        """

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of chosen rows.  The ranks that share tokens call this together."""
