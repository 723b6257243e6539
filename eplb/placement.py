"""`ExpertPlacement`: the one holder of the expert map in force.

Routers read its device table, weight loaders ask it for slots; because it is one object they cannot disagree.
Does not know how a map is planned or how weights are moved.

Shapes: L MoE layers, E logical experts, K top-k, T tokens.
"""

from __future__ import annotations

import torch

from eplb.expert_location import ExpertLocationMetadata


class ExpertPlacement:
    """The map in force and its epoch.

    The device table keeps its address for the life of the object.
    """

    def __init__(self, metadata: ExpertLocationMetadata, device: torch.device | str = "cpu") -> None:
        self.metadata = metadata
        self.epoch = 0
        first_slots = [
            [metadata.slots_of(layer, expert)[0] for expert in range(metadata.num_logical_experts)]
            for layer in range(metadata.num_layers)
        ]
        self.is_identity = first_slots == [list(range(metadata.num_logical_experts))] * metadata.num_layers
        self._logical_to_physical_LE = torch.tensor(first_slots, dtype=torch.int64, device=device)

    @property
    def num_physical_experts(self) -> int:
        return self.metadata.num_physical_experts

    def local_slots(self, layer: int, logical_expert: int) -> list[int]:
        """Slots of this rank into which the weights of `logical_expert` of MoE layer `layer` must be written."""
        return self.metadata.slots_of(layer, logical_expert)

    def slots_of_experts(self) -> torch.Tensor:
        """A copy, on the host, of what routers go by: the slot of every logical expert [L, E] int64."""
        return self._logical_to_physical_LE.to("cpu", copy=True)

    def table(self, layer: int) -> torch.Tensor | None:
        """Physical id of every logical expert [E] of MoE layer `layer`; None where they are the same."""
        return None if self.is_identity else self._logical_to_physical_LE[layer]

    def logical_to_physical(self, layer: int, logical_ids_TK: torch.Tensor) -> torch.Tensor:
        """Physical ids [T, K] for logical ids [T, K] of MoE layer `layer`."""
        table_E = self.table(layer)
        return logical_ids_TK if table_E is None else table_E[logical_ids_TK]
