"""The layer class of each kind of attention.  A kind is a spec in `layer_specs`, a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from rollout.core.specs.layer_specs import (
    AttentionKind,
    AttentionSpec,
    GatedDeltaSpec,
    KVKind,
    LatentAttentionSpec,
    NormSpec,
    RecurrentState,
)
from rollout.distributed.parallel import Parallel
from rollout.layers.attention import Attention
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.gated_delta import GatedDelta
from rollout.layers.latent_attention import LatentAttention
from rollout.layers.norm_rotary import Hidden, RMSNorm


class AttentionLayer(Protocol):
    """A layer that mixes the tokens of a sequence, as the decoder builds and calls it.

    `name` is its name in checkpoints.  It raises `StartupError` for sizes that do not divide over the ranks.
    """

    name: str

    def __init__(self, spec: Any, hidden_size: int, layer_id: int, norm: NormSpec, build: Build) -> None: ...

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden: Hidden,
        norm: RMSNorm,
        angles: torch.Tensor | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Apply the layer to the norm of `residual += hidden`, and return this rank's part of the sum [T, D].

        `angles` [T, 2, rd] are there for a layer that rotates.
        """

    @staticmethod
    def kept(spec: Any, parallel: Parallel) -> KVKind | None:
        """Return the kind of KV that the pool of this rank holds of a token, or None for a layer without KV."""

    @staticmethod
    def state(spec: Any, parallel: Parallel) -> RecurrentState | None:
        """Return the state that the pool of this rank holds of a sequence, or None for a layer without state."""


ATTENTION_LAYERS: Mapping[type[AttentionKind], type[AttentionLayer]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    GatedDeltaSpec: GatedDelta,
}
