"""Where each logical expert lives: the map between logical experts and physical slots, layer by layer.

Knows the map and its invariants.  Does not know weights, ranks' process groups or how a map is chosen.

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from eplb.errors import LayoutError, MapError


@dataclass(frozen=True)
class ExpertLocationMetadata:
    """Frozen map, on the CPU.  `physical_to_logical_map[l, p]` is the logical expert in slot p of MoE layer l.

    Invariant (checked once, here): every logical expert of every layer has at least one slot.  Raises `MapError`.
    """

    physical_to_logical_map: torch.Tensor  # [L, P] int64
    num_logical_experts: int

    def __post_init__(self) -> None:
        check_cover(self.physical_to_logical_map.numpy(), self.num_logical_experts)

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical_map.shape[0]

    @property
    def num_physical_experts(self) -> int:
        return self.physical_to_logical_map.shape[1]

    def slots_of(self, layer: int, logical_expert: int) -> list[int]:
        """Physical slots that hold `logical_expert` in MoE layer `layer`, ascending."""
        return list(self._slots_LE[layer][logical_expert])

    def check_ranks(self, num_ranks: int) -> None:
        """Whether slots can be spread over `num_ranks` ranks, P / ranks on each.

        Raises `LayoutError` where they do not divide, `MapError` for an expert that is twice on one rank; with one rank
        that is allowed.
        """
        if self.num_physical_experts % num_ranks:
            raise LayoutError(f"{self.num_physical_experts} slots do not divide over {num_ranks} ranks")
        if num_ranks == 1:
            return
        repeated = find_duplicate(self.physical_to_logical_map.numpy(), num_ranks)
        if repeated is not None:
            layer, rank, expert = repeated
            raise MapError(f"MoE layer {layer}: rank {rank} of {num_ranks} holds expert {expert} twice")

    @cached_property
    def _slots_LE(self) -> list[list[list[int]]]:
        found: list[list[list[int]]] = [[[] for _ in range(self.num_logical_experts)] for _ in range(self.num_layers)]
        for layer, row in enumerate(self.physical_to_logical_map.tolist()):
            for slot, expert in enumerate(row):
                found[layer][expert].append(slot)
        return found


def trivial_location(
    num_layers: int, num_logical_experts: int, num_physical_experts: int | None = None
) -> ExpertLocationMetadata:
    """Slot p holds logical expert p mod E: as many slots as experts unless given."""
    row = torch.arange(num_physical_experts or num_logical_experts) % max(1, num_logical_experts)
    return ExpertLocationMetadata(row.expand(num_layers, -1).clone(), num_logical_experts)


def check_cover(map_LP: np.ndarray, num_logical_experts: int) -> None:
    """Raises `MapError` for an id out of range or an expert without a slot."""
    outside = np.argwhere((map_LP < 0) | (map_LP >= num_logical_experts))
    if len(outside):
        layer, slot = outside[0]
        raise MapError(
            f"layer {layer}: slot {slot} holds expert {map_LP[layer, slot]}; the model has {num_logical_experts}"
        )
    missing = np.argwhere(replica_counts(map_LP, num_logical_experts) == 0)
    if len(missing):
        layer, expert = missing[0]
        raise MapError(f"layer {layer}: no slot holds expert {expert}")


def find_duplicate(map_LP: np.ndarray, num_ranks: int) -> tuple[int, int, int] | None:
    """(layer, rank, expert) of the first expert that a rank holds twice."""
    by_rank = np.sort(map_LP.reshape(len(map_LP), num_ranks, map_LP.shape[1] // num_ranks), axis=2)
    found = np.argwhere(by_rank[:, :, 1:] == by_rank[:, :, :-1])
    if not len(found):
        return None
    layer, rank, index = found[0]
    return int(layer), int(rank), int(by_rank[layer, rank, index])


def replica_counts(map_LP: np.ndarray, num_logical_experts: int) -> np.ndarray:
    """[L, E] int64: slots of every logical expert."""
    layers = len(map_LP)
    flat = map_LP + np.arange(layers)[:, None] * num_logical_experts
    return np.bincount(flat.ravel(), minlength=layers * num_logical_experts).reshape(layers, num_logical_experts)
