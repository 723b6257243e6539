"""The gated delta rule (Yang et al., 2024) in place of attention: a state of fixed size for each value head.

    projections -> convolution, silu -> the recurrence, token by token -> norm, gate -> projection

Ranks that share tokens have some key heads each, with the value heads that these serve.  The block then returns one
rank's part of a sum over them.

Shapes: T tokens, D hidden, C channels of the convolution over w tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rollout.core.specs.layer_specs import GatedDeltaSpec, NormSpec, RecurrentState
from rollout.distributed.parallel import Parallel
from rollout.kernels.places import ViewPlace
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.linear import Linear, MergedLinear, sharded_entry
from rollout.layers.norm_rotary import Hidden, RMSNorm
from rollout.layers.shard import Shard, delta_heads
from rollout.layers.weight_entry import WeightEntry, WeightLayer


class GatedDelta(WeightLayer):
    """The gated delta rule of one hidden layer, `layer_id`, which is also the layer of the state pool.

    Raises `StartupError` for heads that do not divide over the ranks.
    """

    name = "linear_attn"

    def __init__(self, spec: GatedDeltaSpec, hidden_size: int, layer_id: int, norm: NormSpec, build: Build) -> None:
        self.ops = build.ops
        self.layer_id = layer_id
        keys = delta_heads(spec, build.parallel)
        self._heads = values = keys.times(spec.values_per_key)
        self.in_proj = _projections(spec, hidden_size, keys, build)
        self._channels = keys.of_sections(_sections(spec))
        self._conv_weight_wC = build.empty(spec.conv_size, self._channels.length)
        self._a_log, self._dt_bias = build.empty(values.length), build.empty(values.length)
        self.norm = RMSNorm(spec.value_dim, NormSpec(eps=norm.eps), build)
        self.out_proj = Linear(values.times(spec.value_dim), hidden_size, build)

    @staticmethod
    def kept(spec: GatedDeltaSpec, parallel: Parallel) -> None:
        """Return None: the layer keeps no KV."""

    @staticmethod
    def state(spec: GatedDeltaSpec, parallel: Parallel) -> RecurrentState:
        """Return the state of a sequence, on this rank."""
        keys = delta_heads(spec, parallel)
        channels = keys.of_sections(_sections(spec)).length
        heads = keys.length * spec.values_per_key
        return RecurrentState(channels, spec.conv_size, heads, spec.key_dim, spec.value_dim)

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden: Hidden,
        norm: RMSNorm,
        angles: torch.Tensor | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Return this rank's part [T, D] of the output for the norm of `residual += hidden`.  Updates the states."""
        if residual_TD.shape[0] == 0:  # an idle data-parallel rank: only its experts are needed
            return torch.empty_like(residual_TD)
        projected = self.in_proj(residual_TD, hidden, norm, context.batch.adapters)
        assert context.states is not None, "a model with recurrent layers has a state pool"
        pool = context.states.pool
        read_TV = self.ops.gated_delta(
            projected,
            self._conv_weight_wC,
            self._a_log,
            self._dt_bias,
            self.norm.weight,
            self.norm.eps,
            pool.conv[self.layer_id],
            pool.state[self.layer_id],
            *context.states.operands,
        )
        return self.out_proj(read_TV, context.batch.adapters)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        conv_C1w, channels = self._conv_weight_wC.t().unsqueeze(1), self._channels
        shape = (channels.total, *conv_C1w.shape[1:])
        yield sharded_entry(f"{prefix}.conv1d.weight", conv_C1w, ViewPlace(conv_C1w), shape, 0, channels)
        for name, values in (("A_log", self._a_log), ("dt_bias", self._dt_bias)):
            yield sharded_entry(f"{prefix}.{name}", values, ViewPlace(values), (self._heads.total,), 0, self._heads)


def _projections(spec: GatedDeltaSpec, hidden_size: int, keys: Shard, build: Build) -> MergedLinear:
    """Make the projection to queries, keys and values, then output gates, b and a, for both forms of a checkpoint.

    It is never held in fewer bits: b and a decide what a state forgets.
    """
    values = keys.times(spec.values_per_key)
    if not spec.merged_by_key_head:
        parts = {
            "in_proj_qkv": keys.of_sections(_sections(spec)),
            "in_proj_z": values.times(spec.value_dim),
            "in_proj_b": values,
            "in_proj_a": values,
        }
        return MergedLinear(hidden_size, parts, build, as_sent=True)
    served = spec.values_per_key * spec.value_dim
    qkvz, ba = [spec.key_dim, spec.key_dim, served, served], [spec.values_per_key, spec.values_per_key]
    parts = {"in_proj_qkvz": keys.times(sum(qkvz)), "in_proj_ba": keys.times(sum(ba))}
    orders = {"in_proj_qkvz": _kind_by_kind(keys.length, qkvz), "in_proj_ba": _kind_by_kind(keys.length, ba)}
    return MergedLinear(hidden_size, parts, build, orders=orders, as_sent=True)


def _kind_by_kind(heads: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return the rows of every head's first part, then of every head's second, for rows that lie head by head."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(list(sizes), dim=1)])


def _sections(spec: GatedDeltaSpec) -> tuple[int, int, int]:
    """Return the numbers of channels of queries, keys and values, over all ranks."""
    keys = spec.num_key_heads * spec.key_dim
    return keys, keys, spec.num_value_heads * spec.value_dim
