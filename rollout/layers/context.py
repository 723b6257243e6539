"""`ForwardContext`: the inputs of a step's layers in addition to its tokens.  Passed explicitly, never global.

Shapes: T tokens, t tokens of this rank's slice, D hidden, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch, StateOperands
from rollout.layers.norm_rotary import Hidden, RMSNorm
from rollout.memory.state_pool import StatePool

# Called by every MoE layer with its ordinal among the MoE layers and the logical expert ids [T, K], before they are
# mapped to physical ones.  It must not change the ids.  It copies the ids that it keeps beyond the step, with calls of
# torch operators alone: a tape of the forward replays only these.
RouteHook = Callable[[int, torch.Tensor], None]


class SliceRoutes:
    """Routes of a step whose tokens are dealt out to ranks in slices: every rank that shares tokens gets all routes.

    rank 0   [ rows 0..2 | routes of layers 0 .. L-1 ]      they are sent with the slices of the last MoE layer: one
    rank 1   [ rows 3..4 | routes of layers 0 .. L-1 ]      all-gather that happens anyway, padded to the longest slice

    `capturer` has this rank's slice of a step that has begun.
    """

    def __init__(self, capturer: RoutedExpertsCapturer) -> None:
        self._capturer = capturer
        self._rows_Tn: torch.Tensor | None = None

    def to_send(self, moe_layer: int) -> torch.Tensor | None:
        """Return this rank's routes of all layers [t, L K], once the last MoE layer is there; None before."""
        if moe_layer < self._capturer.num_moe_layers - 1:
            return None
        return self._capturer.finish_step().flatten(1)

    def receive(self, rows_Tn: torch.Tensor) -> None:
        """Take the rows of all ranks that share tokens, in the order of the batch."""
        self._rows_Tn = rows_Tn

    def routes(self) -> torch.Tensor:
        """Return the logical ids of the chosen experts [T, L, K], in the order of the batch."""
        assert self._rows_Tn is not None, "no MoE layer sent the routes"
        routes_TLK: torch.Tensor = self._rows_Tn.unflatten(1, (self._capturer.num_moe_layers, self._capturer.top_k))
        return routes_TLK


class States(NamedTuple):
    """The memory of recurrent layers, and the rows of it that a step reads and writes."""

    pool: StatePool
    operands: StateOperands


class LayerStates:
    """Keeps the hidden states of a step in front of chosen layers: the residual stream that enters each of them.

    The stream is copied, so that the step computes the same bits as without it.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = layers
        self._kept: dict[int, torch.Tensor] = {}

    def take(self, layer: int, residual_TD: torch.Tensor, hidden: Hidden, norm: RMSNorm) -> None:
        """Keep `residual + hidden` as `norm`, the layer's own, adds them, if the layer is a chosen one."""
        if layer in self._layers:
            stream_TD = residual_TD.clone()
            if hidden is not None:
                norm(stream_TD, hidden)
            self._kept[layer] = stream_TD

    def of(self, layer: int) -> torch.Tensor:
        """Return the stream [T, D] in front of a chosen layer."""
        return self._kept[layer]


@dataclass(slots=True)
class ForwardContext:
    """One step.  `attention.plan(batch)` has been called.

    `slice_routes` is set where routes are recorded and tokens are dealt out: on all ranks that share tokens, or none.
    """

    batch: ForwardBatch
    attention: AttentionBackend
    route_hooks: Sequence[RouteHook] = ()
    slice_routes: SliceRoutes | None = None
    states: States | None = None
    layer_states: LayerStates | None = None  # None: no layer's hidden states are wanted
