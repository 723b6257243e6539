"""Self-attention with grouped query heads: projections, query and key norm, rotation, and the backend between them.

Ranks that share tokens have some heads each; the block then returns one rank's part of a sum over them.

Shapes: T tokens, D hidden, H query heads of this rank, hd head size, rd rotated elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.core.specs.layer_specs import AttentionSpec, FullKV, NormSpec, WindowKV
from rollout.distributed.parallel import Parallel
from rollout.kernels.places import ViewPlace
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear, sharded_entry
from rollout.layers.norm_rotary import Hidden, QueryKeyNorm, RMSNorm
from rollout.layers.shard import Shard, kv_heads, query_heads
from rollout.layers.weight_entry import WeightEntry, WeightLayer


class Sinks(WeightLayer):
    """One score of each of this rank's query heads [H]."""

    def __init__(self, heads: Shard, build: Build) -> None:
        self.heads = heads
        self.weight = build.empty(heads.length)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        yield sharded_entry(prefix, self.weight, ViewPlace(self.weight), (self.heads.total,), 0, self.heads)


class Attention(Layer):
    """Self-attention of one hidden layer, `layer_id`, which is also the layer of the KV pool.

    `norm` describes the norm of queries and keys.  Raises `StartupError` for heads that do not divide over the ranks.
    """

    name = "self_attn"

    def __init__(self, spec: AttentionSpec, hidden_size: int, layer_id: int, norm: NormSpec, build: Build) -> None:
        self.ops = build.ops
        self.layer_id = layer_id
        self._norm = norm
        queries, keys = query_heads(spec, build.parallel), kv_heads(spec, build.parallel)
        head_dim = spec.head_dim
        parts = {"q_proj": queries.times(head_dim), "k_proj": keys.times(head_dim), "v_proj": keys.times(head_dim)}
        orders: dict[str, torch.Tensor] = {}
        self._gate_size = 0
        if spec.output_gate:  # the gates of all heads, then their queries
            self._gate_size, parts["q_proj"] = queries.length * head_dim, queries.times(2 * head_dim)
            orders["q_proj"] = torch.arange(2 * self._gate_size).view(-1, 2, head_dim).flip(1).transpose(0, 1).flatten()
        self.qkv_proj = MergedLinear(hidden_size, parts, build, spec.qkv_bias, orders)
        self.qk_norm = QueryKeyNorm(queries.length, keys.length, head_dim, build) if spec.qk_norm else None
        self.o_proj = Linear(queries.times(head_dim), hidden_size, build, spec.o_bias)
        self.window = spec.window
        self.sinks = Sinks(queries, build) if spec.sinks else None

    @staticmethod
    def kept(spec: AttentionSpec, parallel: Parallel) -> FullKV:
        """Return the KV of a token, on this rank."""
        heads = kv_heads(spec, parallel).length
        return FullKV(heads, spec.head_dim) if spec.window is None else WindowKV(heads, spec.head_dim, spec.window)

    @staticmethod
    def state(spec: AttentionSpec, parallel: Parallel) -> None:
        """Return None: the layer keeps the KV of tokens only, no state of a sequence."""

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden: Hidden,
        norm: RMSNorm,
        angles: torch.Tensor | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Return this rank's part [T, D] of the output for the norm of `residual += hidden`.  `angles`: [T, 2, rd]."""
        if residual_TD.shape[0] == 0:  # an idle data-parallel rank: only its experts are needed
            return torch.empty_like(residual_TD)
        adapters = context.batch.adapters
        qkv, gate = self.qkv_proj(residual_TD, hidden, norm, adapters), None
        if self._gate_size:
            gate, qkv = qkv[:, : self._gate_size], qkv[:, self._gate_size :]
        kv, qk_norm = context.attention.kv, self.qk_norm
        query = self.ops.qk_norm_rope_store(
            qkv,
            None if qk_norm is None else qk_norm.weight,
            angles,
            kv.k[self.layer_id],
            kv.v[self.layer_id],
            context.batch.kv_slots(self.window),
            self._norm.eps,
            self._norm.weight_offset,
            *kv.scales[self.layer_id],
        )
        sinks = None if self.sinks is None else self.sinks.weight
        attended = context.attention.attend(self.layer_id, query, window=self.window, sinks=sinks)
        return self.o_proj(attended if gate is None else self.ops.sigmoid_gate(attended, gate), adapters)
