"""Multi-head latent attention, in the absorbed form: the cache has one latent a token, which all heads read.

A head's key is W_k c, of the latent c, followed by a rotated part that all heads share.  Its value is W_v c.  As
q . (W_k c) = (W_k' q) . c, W_k is applied to queries.  As the mean of W_v c is W_v times the mean of c, W_v is applied
to the result of attention.  So no keys or values of heads are made.  Prefill and decode take the same path, so
that a token's bits do not depend on how a sequence was cut into steps.  A long prefill pays with arithmetic: a score
takes R + rd products instead of nope + rd, a mean R instead of v.  With published sizes, two to four times as many.
A backend may ask for prompts in expanded form for this reason: queries then meet keys and values of heads.

Shapes: T tokens, D hidden, H heads of this rank, R latent, rd rotated elements.
"""

from __future__ import annotations

import torch

from rollout.attention.base import AttentionBackend, LatentForm
from rollout.core.specs.layer_specs import LatentAttentionSpec, LatentKV, NormSpec
from rollout.distributed.parallel import Parallel
from rollout.kernels.places import LatentSizes
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.latent_heads import LatentHeads
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm_rotary import Hidden, RMSNorm
from rollout.layers.shard import Shard, query_heads


class LatentAttention(Layer):
    """Latent attention of one hidden layer, `layer_id`, which is also the layer of the KV pool.

    Each rank has some heads and all latents.  Raises `StartupError` for heads that do not divide over the ranks.
    """

    name = "self_attn"

    def __init__(
        self, spec: LatentAttentionSpec, hidden_size: int, layer_id: int, norm: NormSpec, build: Build
    ) -> None:
        self.ops = build.ops
        self.layer_id, self.scale, self.value_size = layer_id, spec.scale, spec.value_size
        heads, latent_norm = query_heads(spec, build.parallel), NormSpec(eps=spec.latent_eps)
        self.num_heads = heads.length
        queries, inputs = heads.times(spec.query_size), Shard.whole(hidden_size)
        self.q_a_proj: Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if spec.query_rank is None:
            self.queries = MergedLinear(hidden_size, {"q_proj": queries}, build)
        else:
            self.q_a_proj = Linear(inputs, spec.query_rank, build)
            self.q_a_layernorm = RMSNorm(spec.query_rank, latent_norm, build)
            self.queries = MergedLinear(spec.query_rank, {"q_b_proj": queries}, build)
        self.kv_a_proj_with_mqa = Linear(inputs, spec.kv_rank + spec.rotary.dim, build)
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, latent_norm, build)
        self.kv_b_proj = LatentHeads(heads, LatentSizes(spec.nope_size, spec.value_size, spec.kv_rank), build)
        sizes = spec.nope_size, spec.rotary.dim, spec.value_size, spec.kv_rank
        self._form = LatentForm(heads.length, *sizes, spec.scale)
        self.o_proj = Linear(heads.times(spec.value_size), hidden_size, build)

    @staticmethod
    def kept(spec: LatentAttentionSpec, parallel: Parallel) -> LatentKV:
        """Return the KV of a token, on every rank."""
        return LatentKV(spec.kv_rank, spec.rotary.dim)

    @staticmethod
    def state(spec: LatentAttentionSpec, parallel: Parallel) -> None:
        """Return None: the layer keeps the latents of tokens only, no state of a sequence."""

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
        normed_TD, adapters = norm(residual_TD, hidden), context.batch.adapters
        query, latent = self._queries(normed_TD, adapters), self.kv_a_proj_with_mqa(normed_TD, adapters)
        attention, slots = context.attention, context.batch.out_cache_loc
        cut = attention.expanded_tokens(self._form)
        if cut:
            assert adapters is None and angles is not None, "the settings refuse adapters with expanded prompts"
            return self.o_proj(self._expanded(query, latent, angles, slots, attention, cut))
        pool = attention.kv.k[self.layer_id]
        absorbed = self._stored(query, latent, self.kv_b_proj.weight, angles, pool, slots)
        absorbed = self.kv_b_proj.adapted_queries(absorbed, query, adapters)
        latents = attention.attend(self.layer_id, absorbed, self.scale)
        values = self.ops.latent_values(latents, self.kv_b_proj.weight, self.num_heads, self.value_size)
        return self.o_proj(self.kv_b_proj.adapted_values(values, latents, adapters), adapters)

    def _stored(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        weight: torch.Tensor | None,
        angles: torch.Tensor | None,
        pool: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Store latents, and return queries with what is rotated, absorbed by `weight` if given."""
        norm = self.kv_a_layernorm
        return self.ops.latent_query_store(
            query, latent, norm.weight, norm.eps, weight, self.num_heads, angles, pool, slots
        )

    def _expanded(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        angles: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBackend,
        cut: int,
    ) -> torch.Tensor:
        """Return the values [T, H v]: `cut` tokens of prompts meet keys and values of heads, the others latents."""
        pool, weight = attention.kv.k[self.layer_id], self.kv_b_proj.weight
        prompts = self._stored(query[:cut], latent[:cut], None, angles[:cut], pool, slots[:cut])
        decodes = self._stored(query[cut:], latent[cut:], weight, angles[cut:], pool, slots[cut:])
        expand = self.kv_b_proj.expanded
        values, latents = attention.attend_expanded(self.layer_id, self._form, prompts, decodes, expand)
        return torch.cat((values, self.ops.latent_values(latents, weight, self.num_heads, self.value_size)))

    def _queries(self, normed_TD: torch.Tensor, adapters_T: torch.Tensor | None) -> torch.Tensor:
        if self.q_a_proj is None or self.q_a_layernorm is None:
            return self.queries.of_normed(normed_TD, adapters_T)
        return self.queries(self.q_a_proj(normed_TD, adapters_T), None, self.q_a_layernorm, adapters_T)
