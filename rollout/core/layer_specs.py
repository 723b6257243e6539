"""Kinds of layers, as data: how a model family describes each of its layers.

`rollout.layers` builds a layer from its spec.  No torch here: the HTTP process reads them, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's change of rotary frequencies: long wavelengths are slowed down by `factor`, medium ones partly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary embedding in the rotate-half form of the first `dim` elements of a head."""

    dim: int
    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention over all earlier tokens with grouped query heads, scores over the root of the head size.

    `qk_norm`: queries and keys go through an RMS norm a head, before the rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec
    qk_norm: bool = False
    qkv_bias: bool = False


@dataclass(frozen=True)
class FullKV:
    """What a layer keeps of every token of a sequence: keys and values of `num_heads` heads each."""

    num_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        return 2 * self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """SwiGLU (Shazeer, 2020) of `inner` features."""

    inner: int


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How a token's `top_k` of `num_experts` are chosen and weighted.

    Scores are a softmax over all experts, or sigmoids.  `correction_bias`: a float32 number an expert is added to its
    score for the choice, not for the weight.  Choices come from the `top_groups` best of `num_groups` groups.  With
    `normalise` the weights of a token are divided by their sum; all are multiplied by `scaling`.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Experts of `inner` features each, and for every token a shared one of `shared_inner`, if any."""

    router: RouterSpec
    inner: int
    shared_inner: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    attention: AttentionSpec
    mlp: DenseSpec | MoESpec
