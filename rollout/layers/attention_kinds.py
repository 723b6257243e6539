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
from rollout.layers.norm_rotary import RMSNorm


class AttentionLayer(Protocol):
    """A layer that mixes the tokens of a sequence, as the decoder builds and calls it.

    `name`: its name in checkpoints.  Raises `StartupError` for sizes that do not divide over the ranks.
    """

    name: str

    def __init__(self, spec: Any, hidden_size: int, layer_id: int, norm: NormSpec, build: Build) -> None: ...

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        norm: RMSNorm,
        angles: torch.Tensor | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """This rank's part [T, D], of the norm of `residual += hidden`.  `angles` [T, 2, rd], where it rotates."""

    @staticmethod
    def kept(spec: Any, parallel: Parallel) -> KVKind | None:
        """Return what the KV pool holds of a token for it, on this rank."""

    @staticmethod
    def state(spec: Any, parallel: Parallel) -> RecurrentState | None:
        """Return what the state pool holds of a sequence for it, on this rank."""


ATTENTION_LAYERS: Mapping[type[AttentionKind], type[AttentionLayer]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    GatedDeltaSpec: GatedDelta,
}
