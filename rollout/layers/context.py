"""`ForwardContext`: what a step's layers need besides its tokens.  Passed explicitly, never global.

Shapes: T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch

# Called by every MoE layer with its ordinal among the MoE layers and the logical expert ids [T, K], before they are
# mapped to physical ones.  Must not change the ids.
RouteHook = Callable[[int, torch.Tensor], None]


@dataclass(slots=True)
class ForwardContext:
    """One step.  `attention.plan(batch)` has been called."""

    batch: ForwardBatch
    attention: AttentionBackend
    route_hooks: Sequence[RouteHook] = ()
