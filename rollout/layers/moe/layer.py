"""The sparse feed-forward block of a decoder layer: router, dispatcher, experts, in that order.

Ranks that share tokens route all of them.  Where the dispatcher scatters tokens, each rank routes a slice:

    attention's parts    [ T rows ] + [ T rows ] + ..     reduce-scatter
    this rank's slice         [ T / G rows ]              route, dispatch, experts, combine, add
    the residual stream  [ T rows ]                       all-gather, routes with the last layer

Shapes: T tokens, D hidden, G ranks that share tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb.placement import ExpertPlacement
from rollout.core.specs.layer_specs import MoESpec
from rollout.distributed.communicator import pack_rows, share_sizes, unpack_rows
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext, SliceRoutes
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear
from rollout.layers.mlp import SharedExpert
from rollout.layers.moe.dispatchers.base import Dispatcher
from rollout.layers.moe.experts import Experts
from rollout.layers.moe.router import TopKRouter
from rollout.layers.norm_rotary import Hidden, RMSNorm
from rollout.layers.shard import Shard

_MAX_DEFERRED = 1024  # tokens: the outputs of more would hold too much memory until the next layer is done


class MoELayer(Layer):
    """One MoE layer.  `moe_layer` is its ordinal among the MoE layers, which is also its row in the placement."""

    def __init__(
        self,
        spec: MoESpec,
        hidden_size: int,
        moe_layer: int,
        placement: ExpertPlacement,
        dispatcher: Dispatcher,
        build: Build,
    ) -> None:
        self._ops = build.ops
        self._ranks = build.parallel.attn_tp
        self._scatters = dispatcher.scatters_tokens and self._ranks.size > 1
        self.moe_layer = moe_layer
        self.dispatcher = dispatcher
        self.gate = TopKRouter(spec.router, hidden_size, moe_layer, placement, build)
        self.experts = Experts(spec, hidden_size, moe_layer, placement, build)
        shared = None
        if spec.shared_inner:
            shared = SharedExpert(spec.shared_inner, hidden_size, build, is_whole=self._scatters)
            setattr(self, spec.shared_name, shared)  # its name in checkpoints
        self._shared = shared
        self._may_defer = dispatcher.is_local and shared is None and build.ops.deferred_sum is not None
        gate = spec.shared_gate
        self.shared_expert_gate = Linear(Shard.whole(hidden_size), 1, build, as_sent=True) if gate else None

    def __call__(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, context: ForwardContext
    ) -> Hidden:
        """Apply the layer to the norm of `residual += hidden`, where each rank has a part of the sum `hidden`.

        Return None where the result has been added to the residual stream already.  On a lone rank the next norm adds
        the outputs of the experts of few tokens, where the operators can.
        """
        if self._scatters:
            self._add_by_slices(residual_TD, hidden_TD, norm, context)
            return None
        hidden_TD = self._ranks.all_reduce(hidden_TD)
        if self._may_defer and hidden_TD.shape[0] <= _MAX_DEFERRED:
            normed_TD, weights_TK, physical_ids_TK = self.gate(residual_TD, hidden_TD, norm, context)
            carried = self._carried(context.batch.adapters, normed_TD)
            return self.experts.unsummed(self.dispatcher.dispatch(normed_TD, physical_ids_TK, weights_TK, carried))
        return self._of_tokens(residual_TD, hidden_TD, norm, context, first_row=0)

    def _of_tokens(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor,
        norm: RMSNorm,
        context: ForwardContext,
        first_row: int,
    ) -> torch.Tensor:
        normed_TD, weights_TK, physical_ids_TK = self.gate(residual_TD, hidden_TD, norm, context, first_row)
        adapters = context.batch.adapters
        if adapters is not None and self._scatters:
            adapters = adapters[first_row : first_row + normed_TD.shape[0]]
        carried = self._carried(adapters, normed_TD)
        work = self.dispatcher.dispatch(normed_TD, physical_ids_TK, weights_TK, carried)
        out_TD = self.dispatcher.combine(self.experts(work), work.handle)
        if self._shared is None:
            return out_TD
        gate_T1 = None if self.shared_expert_gate is None else self.shared_expert_gate(normed_TD, adapters)
        return self._ops.add_gated(out_TD, self._shared(normed_TD, adapters), gate_T1)

    def _carried(self, adapters_T: torch.Tensor | None, rows_TD: torch.Tensor) -> torch.Tensor | None:
        """Return the slots of adapters that go with rows to the experts: where rows move, all ranks send some."""
        if self.experts.lora is None:
            return None
        if adapters_T is None and self.dispatcher.moves_rows:
            return torch.full(rows_TD.shape[:1], -1, device=rows_TD.device)
        return adapters_T

    def _add_by_slices(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, context: ForwardContext
    ) -> None:
        counts = share_sizes(residual_TD.shape[0], self._ranks.size)
        start, count = sum(counts[: self._ranks.rank]), counts[self._ranks.rank]
        slice_TD = residual_TD[start : start + count]
        hidden_TD = self._ranks.reduce_scatter_rows(hidden_TD, counts)
        slice_TD += self._of_tokens(slice_TD, hidden_TD, norm, context, start)
        residual_TD.copy_(self._joined(slice_TD, counts, context.slice_routes))

    def _joined(self, slice_TD: torch.Tensor, counts: Sequence[int], routes: SliceRoutes | None) -> torch.Tensor:
        beside = None if routes is None else routes.to_send(self.moe_layer)
        if routes is None or beside is None:
            return self._ranks.all_gather_rows(slice_TD, counts)
        mine = [slice_TD, beside]
        whole_TD, beside = unpack_rows(self._ranks.all_gather_rows(pack_rows(mine), counts), mine)
        routes.receive(beside)
        return whole_TD
