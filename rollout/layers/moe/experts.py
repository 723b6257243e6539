"""The expert weights of one MoE layer on this rank, and where a checkpoint's expert tensors go in them.

Ranks hold some of the experts each (expert parallelism), some inner features of each expert (tensor parallelism within
experts), or both.

Shapes: R rows, S expert slots of a row, A filled slots, E logical experts, D hidden, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from eplb.placement import ExpertPlacement
from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import MoESpec
from rollout.kernels.operators.fused_experts import ExpertOutputs, weighted_sum
from rollout.kernels.ops import ExpertPart
from rollout.kernels.places import Place, ShardPlace, ViewPlace
from rollout.kernels.slot_places import SlotPlace, SlotStack
from rollout.layers.build import Build
from rollout.layers.lora import SlotSizes
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.moe.expert_lora import ExpertLoraSlots
from rollout.layers.shard import Shard
from rollout.layers.weight_entry import FusedForm, WeightEntry, WeightLayer
from weight_sync.fused_experts import fused_pieces
from weight_sync.held_format import HeldFormat

SlotsOf = Callable[[int, int], list[int]]  # the slots of a logical expert in a layer


class Experts(WeightLayer):
    """`w13` holds gate and up projections, `w2` down projections, as `Ops.storage` lays them out.

    Biases lie in `w13_bias` [P, 2I], gate first, and in `w2_bias` [P, D], of P slots.

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
        self.ops, self.build = build.ops, build
        self.lora: ExpertLoraSlots | None = None
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
        self._dtype, self._held = build.dtype, build.ops.storage.experts_held
        if self._held is not None and not self.inner.is_whole and self.inner.length % max(self._held.block):
            block = max(self._held.block)
            raise StartupError(f"{self._held.flag}: {what} over the ranks must be multiples of {block}")
        self.w13, self.w2 = build.ops.storage.empty_experts(*sizes, build.dtype, build.device)
        self._stacks: dict[ExpertPart, SlotStack] = {}
        self.fused_layout = spec.fused
        self.has_bias = spec.bias
        self.w13_bias = build.empty(stored, 2 * self.inner.length) if spec.bias else None
        self.w2_bias = build.empty(stored, hidden_size) if spec.bias else None
        self._adds_w2_bias = self.inner.start == 0  # of the ranks that share an expert, the first adds it
        clamp = spec.activation
        self._activation = () if clamp is None else (clamp.limit, clamp.alpha)

    def slot_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that make up the experts here, by slot in the first dimension, with their adapters."""
        adapters = () if self.lora is None else self.lora.tensors
        return [held for held in (self.w13, self.w2, self.w13_bias, self.w2_bias, *adapters) if held is not None]

    def reserve_lora(self, sizes: SlotSizes) -> ExpertLoraSlots:
        """Return the slots of these experts' adapters, and make them at the first call."""
        if self.lora is None:
            stored = self.placement.num_local_experts
            self.lora = ExpertLoraSlots(self.build, sizes, stored, self.hidden_size, self.inner)
        return self.lora

    def __call__(self, work: DispatchOutput) -> torch.Tensor:
        """Compute the experts: weighted sums [R, D] where the work carries weights, else outputs [R, S, D].

        With a shard of the inner features, the result is this rank's part of a sum.
        """
        if work.packed is not None and work.adapters_R is None and self.ops.packed_experts is not None:
            return self._of_packed_rows(work, work.packed.counts_C, self.ops.packed_experts)
        if work.has_holes and not self.ops.takes_empty_slots:
            return self._of_filled_slots(work)
        return self._outputs(work.hidden_RD, work.ids_RS, work.weights_RS, work.adapters_R, work.expected)

    def unsummed(self, work: DispatchOutput) -> ExpertOutputs:
        """Compute the experts of work with weights, and leave the sum over slots to the next norm.

        The operators have `deferred_sum`.
        """
        deferred = self.ops.deferred_sum
        assert deferred is not None and work.weights_RS is not None
        operands = self._operands(work.hidden_RD, work.ids_RS, work.weights_RS)
        if self.lora is None or work.adapters_R is None:
            return deferred.outputs(*operands)
        return deferred.adapted(*operands, *self._adapters(self.lora, work.adapters_R))

    def _of_packed_rows(
        self, work: DispatchOutput, counts_C: torch.Tensor, packed_experts: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        out_CND = packed_experts(
            work.hidden_RD.view(counts_C.shape[0], -1, self.hidden_size),
            counts_C,
            work.expected,
            self.w13,
            self.w2,
            self.w13_bias,
            self.w2_bias if self._adds_w2_bias else None,
            *self._activation,
        )
        return out_CND.view(-1, 1, self.hidden_size)

    def _outputs(
        self,
        hidden_RD: torch.Tensor,
        local_ids_RS: torch.Tensor,
        weights_RS: torch.Tensor | None,
        adapters_R: torch.Tensor | None,
        expected: int | None = None,
    ) -> torch.Tensor:
        operands = self._operands(hidden_RD, local_ids_RS, weights_RS)
        guess = {} if expected is None else {"expected": expected}
        if self.lora is None or adapters_R is None:
            return self.ops.fused_experts(*operands, **guess)
        return self.ops.adapted_experts(*operands, *self._adapters(self.lora, adapters_R), **guess)

    def _adapters(self, lora: ExpertLoraSlots, adapters_R: torch.Tensor) -> tuple[Any, ...]:
        """Return what `adapted_experts` takes behind the operands: no clamp where there is none, and the adapters."""
        unclamped = () if self._activation else (None, 1.0)
        return (*unclamped, adapters_R, *lora.tensors)

    def _operands(
        self, hidden_RD: torch.Tensor, local_ids_RS: torch.Tensor, weights_RS: torch.Tensor | None
    ) -> tuple[Any, ...]:
        return (
            hidden_RD,
            local_ids_RS,
            weights_RS,
            self.w13,
            self.w2,
            self.inner.length,
            self.w13_bias,
            self.w2_bias if self._adds_w2_bias else None,
            *self._activation,
        )

    def _of_filled_slots(self, work: DispatchOutput) -> torch.Tensor:
        """Compute the filled slots as rows of one slot each, and put their outputs back in their places, among zeros.

        The host waits for the number of filled slots.
        """
        hidden_RD, ids_RS, weights_RS = work.hidden_RD, work.ids_RS, work.weights_RS
        filled_RS = (ids_RS >= 0) & (ids_RS < self.placement.num_local_experts)
        rows_A = filled_RS.nonzero()[:, 0]
        out_RSD = hidden_RD.new_zeros(*ids_RS.shape, self.hidden_size)
        if rows_A.shape[0]:
            adapters_A = None if work.adapters_R is None else work.adapters_R.index_select(0, rows_A)
            hidden_AD, ids_A1 = hidden_RD.index_select(0, rows_A), ids_RS[filled_RS].unsqueeze(1)
            out_A1D = self._outputs(hidden_AD, ids_A1, None, adapters_A)
            out_RSD[filled_RS] = out_A1D.squeeze(1)
        return out_RSD if weights_RS is None else weighted_sum(out_RSD, weights_RS.masked_fill(~filled_RS, 0.0))

    @property
    def places_key(self) -> Hashable:
        return self.placement.slots_key

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        hidden, inner = self.hidden_size, self.inner.total
        parts: dict[ExpertPart, tuple[int, int]] = {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        for logical_expert in range(self.num_logical_experts):
            for part, shape in parts.items():
                name = f"{prefix}.{logical_expert}.{part}"
                yield self._entry(f"{name}.weight", shape, partial(self._places, part, logical_expert), self._held)
                if self.has_bias:
                    yield self._entry(f"{name}.bias", shape[:1], partial(self._bias_places, part, logical_expert))

    def _entry(
        self,
        name: str,
        shape: tuple[int, ...],
        places_in: Callable[[SlotsOf], list[Place]],
        held: HeldFormat | None = None,
    ) -> WeightEntry:
        places, proposed = self.placement.local_slots, self.placement.proposed_slots
        return WeightEntry(name, shape, self._dtype, partial(places_in, places), partial(places_in, proposed), held)

    def fused_forms(self, prefix: str) -> Iterator[FusedForm]:
        """Yield the forms of `gate_up_proj` and `down_proj` of all experts, in the family's layout."""
        both, hidden = 2 * self.inner.total, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (both, hidden), "down_proj": (hidden, both // 2)}
        if self.fused_layout == "interleaved":
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        if self.has_bias:
            shapes |= {"gate_up_proj_bias": (both,), "down_proj_bias": (hidden,)}
        for kind, shape in shapes.items():
            name, whole = f"{prefix}.{kind}", (self.num_logical_experts, *shape)
            yield FusedForm(name, whole, tuple(fused_pieces(name, whole, self.fused_layout)))

    def _places(self, part: ExpertPart, logical_expert: int, slots_of: SlotsOf) -> list[Place]:
        tensor, stack = self.w2 if part == "down_proj" else self.w13, self._stacks.get(part)
        if stack is None or stack.tensor is not tensor:
            stack = self._stacks[part] = SlotStack(tensor, partial(self._slot_place, part))
        return [SlotPlace(stack, slot) for slot in slots_of(self.moe_layer, logical_expert)]

    def _slot_place(self, part: ExpertPart, slot: int) -> Place:
        place = self.ops.storage.expert_place(self.w13, self.w2, part, slot, self.inner.length, self.hidden_size)
        return self._sharded([place], 1 if part == "down_proj" else 0)[0]

    def _bias_places(self, part: ExpertPart, logical_expert: int, slots_of: SlotsOf) -> list[Place]:
        held = self.w2_bias if part == "down_proj" else self.w13_bias
        assert held is not None, "only experts with biases have entries for them"
        rows = [held[slot] for slot in slots_of(self.moe_layer, logical_expert)]
        if part == "down_proj":
            return [ViewPlace(row) for row in rows]
        length = self.inner.length
        return self._sharded([ViewPlace(row[:length] if part == "gate_proj" else row[length:]) for row in rows], 0)

    def _sharded(self, places: Sequence[Place], dim: int) -> list[Place]:
        if self.inner.is_whole:
            return list(places)
        return [ShardPlace(place, dim, self.inner.start, self.inner.length) for place in places]
