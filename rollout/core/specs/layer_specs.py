"""Kinds of layers, as data: how a model family describes each of its layers.

`rollout.layers` builds a layer from its spec.  No torch here: the HTTP process reads them, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions count as one `factor`-th."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's change of rotary frequencies: long wavelengths are slowed down by `factor`, medium ones partly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): a scaling of rotary pairs by how often they turn within the original context.

    Pairs that turn less than `beta_slow` times are slowed down by `factor`, pairs that turn more than `beta_fast` times
    are not, and a ramp lies between.  Cosines and sines are multiplied by `attention_factor`.  `truncate`: the ramp's
    ends are whole numbers.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Compute YaRN's correction of the softmax's temperature for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary embedding of the first `dim` elements of a head.

    In the rotate-half form element i turns with element i + dim / 2; `interleaved`: 2 i with 2 i + 1.
    """

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """RMS norm (Zhang and Sennrich, 2019).

    The normed value is rounded to the model's dtype, then multiplied by the weight; with a `weight_offset`, by offset +
    weight in float32, then rounded.
    """

    eps: float
    weight_offset: float | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention over all earlier tokens with grouped query heads, scores over the root of the head size.

    `qk_norm`: queries and keys go through an RMS norm a head, before the rotation.  `window`: a token attends to itself
    and the `window - 1` before it.  `sinks`: a weight a head is one more score in the softmax, which has no value.
    `output_gate`: `q_proj` gives every head its query, then a gate of the same size; what the head attends to is
    multiplied by the gate's sigmoid.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None
    sinks: bool = False
    output_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-AI, 2024): a token's keys and values come from one latent of `kv_rank`.

    A head's keys and queries have `nope_size` elements, of keys made from the latent, and `rotary.dim` rotated ones, of
    keys the same for all heads; its values have `value_size`.  Queries come from a latent of `query_rank`, where there
    is one.  Both latents go through an RMS norm with `latent_eps`.  Scores are multiplied by `scale`.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_size: int
    value_size: int
    rotary: RotarySpec
    scale: float
    latent_eps: float = 1e-6  # what transformers builds these norms with, whatever the model's own epsilon is

    @property
    def query_size(self) -> int:
        return self.nope_size + self.rotary.dim


@dataclass(frozen=True)
class FullKV:
    """The KV that a layer keeps of every token of a sequence: keys and values of `num_heads` heads each."""

    num_heads: int
    head_dim: int

    values_in_keys: ClassVar[bool] = False

    @property
    def key_size(self) -> int:
        return self.head_dim

    @property
    def value_size(self) -> int:
        return self.head_dim

    @property
    def elements_per_token(self) -> int:
        return 2 * self.num_heads * self.head_dim


@dataclass(frozen=True)
class WindowKV(FullKV):
    """The same KV, but of no more tokens than the layer's attention sees: the last `window`, in pages."""

    window: int


@dataclass(frozen=True)
class LatentKV:
    """The KV of a token in latent attention: `rank` elements that make keys and values, then `rope` rotated ones.

    All heads read the same; values are the first elements of the keys.
    """

    rank: int
    rope: int

    num_heads: ClassVar[int] = 1
    values_in_keys: ClassVar[bool] = True

    @property
    def key_size(self) -> int:
        return self.rank + self.rope

    @property
    def value_size(self) -> int:
        return self.rank

    @property
    def elements_per_token(self) -> int:
        return self.rank + self.rope


KVKind = FullKV | LatentKV


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """The gated delta rule (Yang et al., 2024): a state for each value head instead of the tokens before.

    Queries, keys and values go through a causal convolution over `conv_size` tokens; a key head serves
    `values_per_key` value heads.  `merged_by_key_head`: checkpoints have two projections, `in_proj_qkvz` and
    `in_proj_ba`, whose rows lie key head by key head; otherwise four, each of one kind.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    merged_by_key_head: bool = False
    rotary: ClassVar[RotarySpec | None] = None

    @property
    def values_per_key(self) -> int:
        return self.num_value_heads // self.num_key_heads


@dataclass(frozen=True)
class RecurrentState:
    """The state that a layer keeps of a sequence, however long, in a row of the state pool.

    The last `conv_size - 1` inputs of a convolution [conv_size - 1, conv_channels] in the model's dtype, and a state
    [num_heads, key_dim, value_dim] in float32, or float64 for float64.
    """

    conv_channels: int
    conv_size: int
    num_heads: int
    key_dim: int
    value_dim: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the size of one row, in a model of `dtype`."""
        conv = self.conv_channels * (self.conv_size - 1) * dtype.itemsize
        return conv + max(4, dtype.itemsize) * self.num_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """SwiGLU (Shazeer, 2020) of `inner` features."""

    inner: int


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """The choice of a token's `top_k` of `num_experts`, and their weights.

    Scores are a softmax over all experts, or over the chosen ones alone, or sigmoids.  `correction_bias`: a float32
    number an expert is added to its score for the choice, not for the weight.  Choices come from the `top_groups` best
    of `num_groups` groups.  With `normalise` the weights of a token are divided by their sum; all are multiplied by
    `scaling`.  `bias`: the logits have one.  `name`: the router's name in checkpoints.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    bias: bool = False
    name: str = "gate"


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, of gates of at most `limit` and ups between `-limit` and `limit`."""

    limit: float
    alpha: float


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Experts of `inner` features each, and for every token a shared one of `shared_inner`, if any.

    `activation`: None is SwiGLU.  `bias`: every projection of an expert has one.  `fused`: how checkpoints and trainers
    fuse the experts of a layer into one tensor, by `weight_sync.fused_experts`.
    `shared_gate`: its output is multiplied by a sigmoid of one number a token.  `shared_name`: in checkpoints.
    """

    router: RouterSpec
    inner: int
    shared_inner: int = 0
    activation: ClampedSwiGLU | None = None
    bias: bool = False
    fused: Literal["rows", "interleaved"] = "rows"
    shared_gate: bool = False
    shared_name: str = "shared_experts"


AttentionKind = AttentionSpec | LatentAttentionSpec | GatedDeltaSpec


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    attention: AttentionKind
    mlp: DenseSpec | MoESpec
