"""The expert weights of one MoE layer on this rank, and where a checkpoint's expert tensors go in them.

Ranks hold some of the experts each (expert parallelism), some inner features of each expert (tensor parallelism within
experts), or both.

Shapes: R rows, S expert slots of a row, A filled slots, E logical experts, D hidden, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eplb.placement import ExpertPlacement
from rollout.core.layer_specs import MoESpec
from rollout.kernels.ops import ExpertPart
from rollout.kernels.places import Place, ShardPlace
from rollout.kernels.plain import weighted_sum
from rollout.layers.build import Build
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.shard import Shard
from rollout.layers.weight_entry import FusedForm, WeightEntry, WeightLayer
from weight_sync.tensor_meta import Piece


class Experts(WeightLayer):
    """`w13` holds gate and up projections, `w2` down projections, as `Ops.storage` lays them out.

    Raises `StartupError` for an inner size that does not divide over the ranks.
    """

    def __init__(
        self,
        spec: MoESpec,
        hidden_size: int,
        moe_layer: int,
        placement: ExpertPlacement,
        build: Build,
    ) -> None:
        self.ops = build.ops
        self.moe_layer = moe_layer
        self.placement = placement
        self.num_logical_experts = spec.router.num_experts
        self.hidden_size = hidden_size
        layout, position = build.parallel.layout, build.parallel.position
        assert (placement.ep_rank, placement.ep_size) == (position.ep_rank, layout.ep_size), "another rank's placement"
        what = f"--tp-size {layout.tp_size} --ep-size {layout.ep_size}: intermediate size of the experts"
        self.inner = Shard.equal(spec.inner, position.moe_tp_rank, layout.moe_tp_size, what)
        stored = placement.num_local_experts
        sizes = (stored, self.inner.length, hidden_size)
        self.w13, self.w2 = build.ops.storage.empty_experts(*sizes, build.dtype, build.device)

    def __call__(self, work: DispatchOutput) -> torch.Tensor:
        """[R, D] where the work carries weights, else [R, S, D] unweighted.

        With a shard of the inner features, it is this rank's part of a sum.
        """
        if work.has_holes:
            return self._of_filled_slots(work)
        return self._outputs(work.hidden_RD, work.local_physical_ids_RS, work.weights_RS)

    def _outputs(
        self, hidden_RD: torch.Tensor, local_ids_RS: torch.Tensor, weights_RS: torch.Tensor | None
    ) -> torch.Tensor:
        return self.ops.fused_experts(hidden_RD, local_ids_RS, weights_RS, self.w13, self.w2, self.inner.length)

    def _of_filled_slots(self, work: DispatchOutput) -> torch.Tensor:
        """Filled slots are computed as rows of one slot each; their outputs go back to where they were, among zeros."""
        hidden_RD, ids_RS, weights_RS = work.hidden_RD, work.local_physical_ids_RS, work.weights_RS
        filled_RS = ids_RS >= 0
        rows_A = filled_RS.nonzero()[:, 0]
        out_RSD = hidden_RD.new_zeros(*ids_RS.shape, self.hidden_size)
        if rows_A.shape[0]:
            out_A1D = self._outputs(hidden_RD.index_select(0, rows_A), ids_RS[filled_RS].unsqueeze(1), None)
            out_RSD[filled_RS] = out_A1D.squeeze(1)
        return out_RSD if weights_RS is None else weighted_sum(out_RSD, weights_RS.masked_fill(~filled_RS, 0.0))

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        hidden, inner = self.hidden_size, self.inner.total
        parts: dict[ExpertPart, tuple[int, int]] = {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        for logical_expert in range(self.num_logical_experts):
            for part, shape in parts.items():
                name = f"{prefix}.{logical_expert}.{part}.weight"
                places = partial(self._places, self.placement.local_slots, part, logical_expert)
                proposed = partial(self._places, self.placement.proposed_slots, part, logical_expert)
                yield WeightEntry(name, shape, self.w13.dtype, places, proposed)

    def fused_forms(self, prefix: str) -> Iterator[FusedForm]:
        """The form of transformers 5: `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I]."""
        experts, size, hidden = range(self.num_logical_experts), self.inner.total, self.hidden_size
        halves = (("gate_proj", slice(0, size)), ("up_proj", slice(size, 2 * size)))
        yield FusedForm(
            f"{prefix}.gate_up_proj",
            (len(experts), 2 * size, hidden),
            tuple(Piece(f"{prefix}.{e}.{part}.weight", (e, rows)) for e in experts for part, rows in halves),
        )
        yield FusedForm(
            f"{prefix}.down_proj",
            (len(experts), hidden, size),
            tuple(Piece(f"{prefix}.{e}.down_proj.weight", (e,)) for e in experts),
        )

    def _places(self, slots_of: Callable[[int, int], list[int]], part: ExpertPart, logical_expert: int) -> list[Place]:
        sizes = self.inner.length, self.hidden_size
        slots = slots_of(self.moe_layer, logical_expert)
        places = [self.ops.storage.expert_place(self.w13, self.w2, part, slot, *sizes) for slot in slots]
        if self.inner.is_whole:
            return places
        dim = 1 if part == "down_proj" else 0
        return [ShardPlace(place, dim, self.inner.start, self.inner.length) for place in places]
