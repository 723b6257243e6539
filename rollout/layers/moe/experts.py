"""The expert weights of one MoE layer on this rank, and where a checkpoint's expert tensors go in them.

Knows storage and names.  Does not know routing; how the experts are applied is up to `LayerOps`.

Shapes: R rows, S expert slots of a row, P experts stored here, E logical experts, D hidden, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from eplb.placement import ExpertPlacement
from rollout.core.model_config import ModelConfig
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.ops.base import ExpertPart, LayerOps
from rollout.layers.ops.place import Place
from rollout.layers.weight_entry import FusedForm, WeightEntry, WeightLayer
from weight_sync.tensor_meta import Piece


class Experts(WeightLayer):
    """`w13` holds gate and up projections, `w2` down projections; `LayerOps` decides how."""

    def __init__(
        self,
        config: ModelConfig,
        moe_layer: int,
        placement: ExpertPlacement,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        self.ops = ops
        self.moe_layer = moe_layer
        self.placement = placement
        self.num_logical_experts = config.num_experts
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.moe_intermediate_size
        stored = placement.num_physical_experts
        w13, w2 = ops.empty_experts(stored, self.intermediate_size, self.hidden_size, dtype, device)
        self.w13, self.w2 = w13, w2

    def __call__(self, work: DispatchOutput) -> torch.Tensor:
        """[R, D] where the work carries weights, else [R, S, D] unweighted."""
        ids_RS, weights_RS = work.local_physical_ids_RS, work.weights_RS
        return self.ops.experts(work.hidden_RD, ids_RS, weights_RS, self.w13, self.w2, self.intermediate_size)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        hidden, inner = self.hidden_size, self.intermediate_size
        parts: dict[ExpertPart, tuple[int, int]] = {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        for logical_expert in range(self.num_logical_experts):
            for part, shape in parts.items():
                name = f"{prefix}.{logical_expert}.{part}.weight"
                yield WeightEntry(name, shape, self.w13.dtype, partial(self._places, part, logical_expert))

    def fused_forms(self, prefix: str) -> Iterator[FusedForm]:
        """The form of transformers 5: `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I]."""
        experts, size, hidden = range(self.num_logical_experts), self.intermediate_size, self.hidden_size
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

    def _places(self, part: ExpertPart, logical_expert: int) -> list[Place]:
        sizes = self.intermediate_size, self.hidden_size
        slots = self.placement.local_slots(self.moe_layer, logical_expert)
        return [self.ops.expert_place(self.w13, self.w2, part, slot, *sizes) for slot in slots]
