"""`ExpertPlacement`: the current expert map, as one rank sees it.

Routers read its device tables, weight loaders ask it for slots; because it is one object they cannot disagree.

    slot p of all P      on rank p // (P / ranks), there at local slot p % (P / ranks)

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks), K top-k, T tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from eplb.algorithms.types import ExpertLayout, Plan
from eplb.errors import MapError
from eplb.expert_location import PICKS, ExpertLocationMetadata, SplitTable


@dataclass(frozen=True)
class _Proposal:
    """`epoch`: of the placement that it was made under."""

    metadata: ExpertLocationMetadata
    split_weights: torch.Tensor | None
    epoch: int


class ExpertPlacement:
    """The current map and its epoch.  The device tables keep their addresses for the life of the object.

    `ep_rank` of `ep_size` ranks over which slots are spread.  With one rank an expert's first slot takes all of its
    tokens: further replicas would be the same weights read twice.  `routes_alone`: no other rank routes the tokens that
    this one does, so that it may send them to the nearest replica where that leaves the loads as they are planned.

    Raises `LayoutError` for slots that do not divide over the ranks, `MapError` for an expert twice on one rank.
    """

    def __init__(
        self,
        metadata: ExpertLocationMetadata,
        device: torch.device | str = "cpu",
        ep_rank: int = 0,
        ep_size: int = 1,
        routes_alone: bool = False,
    ) -> None:
        assert 0 <= ep_rank < ep_size
        metadata.check_ranks(ep_size)
        self.metadata = metadata
        self.epoch = 0
        self.ep_rank, self.ep_size = ep_rank, ep_size
        self._room = metadata.num_physical_experts - metadata.num_logical_experts + 1 if ep_size > 1 else 1
        self._proposal: _Proposal | None = None
        self._num_proposals = 0
        self._routes_alone = routes_alone and ep_size > 1
        self._planned = self._new_table(metadata, None)
        self._split = self._of_this_rank().to(device)
        self._note_table()

    @property
    def num_physical_experts(self) -> int:
        """Slots over all ranks."""
        return self.metadata.num_physical_experts

    @property
    def num_local_experts(self) -> int:
        """Slots of this rank."""
        return self.num_physical_experts // self.ep_size

    def local_slots(self, layer: int, logical_expert: int) -> list[int]:
        """Return the slots of this rank, by its own numbering, into which `logical_expert` of MoE layer `layer` is
        written.

        None, if other ranks hold it.
        """
        return self._local_slots(self.metadata, layer, logical_expert)

    def proposed_slots(self, layer: int, logical_expert: int) -> list[int]:
        """Return `local_slots` under the proposed map; without one, under the current map."""
        proposal = self._proposal
        return self._local_slots(self.metadata if proposal is None else proposal.metadata, layer, logical_expert)

    def adopt(
        self,
        metadata: ExpertLocationMetadata,
        split_weights: torch.Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Replace the map by one of the same sizes, from now on; the epoch is one higher.

        `split_weights` [L, P]: how an expert's tokens are divided over its slots; None for evenly.  `layers`: take only
        these of the map and the weights.  Raises as the constructor, and `MapError` for another shape; nothing changed.
        """
        table = self._checked(metadata, split_weights)
        chosen = list(range(metadata.num_layers)) if layers is None else list(layers)
        merged_LP = self.metadata.physical_to_logical_map.clone()
        merged_LP[chosen] = metadata.physical_to_logical_map[chosen]
        self.metadata = ExpertLocationMetadata(merged_LP, metadata.num_logical_experts)
        self._planned.copy_layers(table, chosen)
        self._split.copy_layers(self._of_this_rank(), chosen)
        self._note_table()
        self.epoch += 1
        self._proposal = None

    def propose(self, metadata: ExpertLocationMetadata, split_weights: torch.Tensor | None = None) -> None:
        """Set the map that is to be adopted with the weights that are being staged for it.  Raises as `adopt`."""
        self._checked(metadata, split_weights)
        self._proposal = _Proposal(metadata, split_weights, self.epoch)
        self._num_proposals += 1

    def withdraw(self) -> None:
        """Forget the proposed map, if there is one."""
        self._proposal = None

    @property
    def slots_key(self) -> Hashable:
        """A key of what `local_slots` and `proposed_slots` return."""
        return self.epoch, self._num_proposals if self.has_proposal else None

    @property
    def has_proposal(self) -> bool:
        return self._proposal is not None

    def adopt_proposed(self) -> None:
        """Adopt the proposed map: every slot holds its expert by now."""
        proposal = self._proposal
        assert proposal is not None, "nothing was proposed"
        assert proposal.epoch == self.epoch, "the placement changed under staged weights"
        self.adopt(proposal.metadata, proposal.split_weights)

    @property
    def form(self) -> Hashable:
        """The facts that `logical_to_physical` depends on, and not its tables, whose contents may change under it."""
        return self.is_identity, tuple(self._widths)

    @property
    def num_logical_experts(self) -> int:
        return self.metadata.num_logical_experts

    def slots_of_experts(self) -> torch.Tensor:
        """Return a copy, on the host, of the first slot of every logical expert [L, E] int64."""
        return self._planned.slots_LRE[:, 0].clone()

    def split(self) -> SplitTable:
        """Return a copy, on the host, of how all ranks together divide an expert's tokens."""
        return self._planned.host_copy()

    def plan(self, layout: ExpertLayout) -> Plan:
        """Return map and split in force as planners give them, so that before and after are measured by one rule."""
        located_LP = self.metadata.physical_to_logical_map
        split_LP = self._planned.weights(located_LP.shape[1])
        reason = f"the placement in force, of epoch {self.epoch}"
        return Plan("in_force", reason, layout, located_LP.numpy().copy(), split_LP.numpy())

    def table(self, layer: int) -> torch.Tensor | None:
        """Return the first slot of every logical expert [E] of MoE layer `layer`; None where these are the experts' own
        numbers.

        All that a router needs where the slots are on one rank.
        """
        return None if self.is_identity else self._split.slots_LRE[layer, 0]

    def logical_to_physical(self, layer: int, logical_ids_TK: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Return the physical ids [T, K] for the logical ids [T, K] of rows `first_row ..` of a batch in MoE layer
        `layer`.
        """
        if self.is_identity:
            return logical_ids_TK
        return self._split.slots(layer, self._widths[layer], logical_ids_TK, first_row)

    def _local_slots(self, metadata: ExpertLocationMetadata, layer: int, logical_expert: int) -> list[int]:
        slots = metadata.slots_of(layer, logical_expert)
        if self.ep_size == 1:
            return slots
        count = self.num_local_experts
        first = self.ep_rank * count
        return [slot - first for slot in slots if 0 <= slot - first < count]

    def _checked(self, metadata: ExpertLocationMetadata, split_weights: torch.Tensor | None) -> SplitTable:
        """Return the table of a map that can take the place of the one in force.  Raises `MapError`, `LayoutError`."""
        shape, wanted = list(metadata.physical_to_logical_map.shape), list(self.metadata.physical_to_logical_map.shape)
        if shape != wanted:
            raise MapError(f"the map has the shape {shape}, the one in force has {wanted}")
        if metadata.num_logical_experts != self.num_logical_experts:
            raise MapError(f"the map has {metadata.num_logical_experts} experts, expected {self.num_logical_experts}")
        metadata.check_ranks(self.ep_size)
        return self._new_table(metadata, split_weights)

    def _new_table(self, metadata: ExpertLocationMetadata, split_weights: torch.Tensor | None) -> SplitTable:
        table = SplitTable.of(metadata, split_weights, self._room)
        if self.ep_size == 1:
            table.ends_LRE.fill_(PICKS)
            return SplitTable(table.slots_LRE[:, :1].contiguous(), table.ends_LRE[:, :1].contiguous())
        return table

    def _of_this_rank(self) -> SplitTable:
        """Return the table that routers of this rank use, in memory of its own."""
        if not self._routes_alone:
            return self._planned.host_copy()
        return self._planned.nearest(self.ep_rank, self.ep_size, self.num_local_experts).host_copy()

    def _note_table(self) -> None:
        table = self._split.host_copy()
        self._widths = table.widths()
        own_E = torch.arange(self.metadata.num_logical_experts)
        self.is_identity = max(self._widths, default=1) == 1 and bool((table.slots_LRE[:, 0] == own_E).all())
