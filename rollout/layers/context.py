"""`ForwardContext`: what a step's layers need besides its tokens.  Passed explicitly, never global.

Shapes: T tokens, t tokens of this rank's slice, L MoE layers, K top-k, n anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch

# Called by every MoE layer with its ordinal among the MoE layers and the logical expert ids [T, K], before they are
# mapped to physical ones.  Must not change the ids, and copies what it keeps: by calls of torch operators alone, which
# is what a tape of the forward plays again.
RouteHook = Callable[[int, torch.Tensor], None]


class SliceRider(Protocol):
    """Rows that come together with the slices of a MoE layer whose tokens are dealt out to ranks."""

    def board(self, moe_layer: int) -> torch.Tensor | None:
        """This rank's rows [t, n], to travel with those of the layer; None: nothing."""

    def arrive(self, rows_Tn: torch.Tensor) -> None:
        """The rows of all ranks that share tokens, in the order of the batch."""


@dataclass(slots=True)
class ForwardContext:
    """One step.  `attention.plan(batch)` has been called.  `rider`: the same kind on all ranks that share tokens."""

    batch: ForwardBatch
    attention: AttentionBackend
    route_hooks: Sequence[RouteHook] = ()
    rider: SliceRider | None = None
