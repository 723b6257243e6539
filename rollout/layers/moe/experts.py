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
from rollout.layers.ops.base import LayerOps
from rollout.layers.weight_entry import FusedForm, WeightEntry, WeightLayer, empty_parameter
from weight_sync.tensor_meta import Piece


class Experts(WeightLayer):
    """`w13` [P, 2I, D], gate rows before up rows, and `w2` [P, D, I]."""

    def __init__(
        self,
        config: ModelConfig,
        moe_layer: int,
        placement: ExpertPlacement,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.moe_layer = moe_layer
        self.placement = placement
        self.num_logical_experts = config.num_experts
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.moe_intermediate_size
        num_slots = placement.num_physical_experts
        hidden, inner = self.hidden_size, self.intermediate_size
        self.w13 = empty_parameter(num_slots, 2 * inner, hidden, dtype=dtype, device=device)
        self.w2 = empty_parameter(num_slots, hidden, inner, dtype=dtype, device=device)

    def forward(self, work: DispatchOutput) -> torch.Tensor:
        """[R, D] where the work carries weights, else [R, S, D] unweighted."""
        return self.ops.experts(work.hidden_RD, work.local_physical_ids_RS, work.weights_RS, self.w13, self.w2)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        hidden, inner = self.hidden_size, self.intermediate_size
        parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for logical_expert in range(self.num_logical_experts):
            for part, shape in parts.items():
                name = f"{prefix}.{logical_expert}.{part}.weight"
                yield WeightEntry(name, shape, self.w13.dtype, partial(self._views, part, logical_expert))

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

    def _views(self, part: str, logical_expert: int) -> list[torch.Tensor]:
        slots = self.placement.local_slots(self.moe_layer, logical_expert)
        if part == "down_proj":
            return [self.w2[slot] for slot in slots]
        rows = slice(0, self.intermediate_size) if part == "gate_proj" else slice(self.intermediate_size, None)
        return [self.w13[slot, rows] for slot in slots]
