"""The slots of each logical expert, layer by layer: `ExpertLocationMetadata`; and the replica that a token goes to:
`SplitTable`.

A token's pick is a number below 65,536 that follows from its row in the batch alone (a Weyl sequence: rows in a row are
spread evenly, whatever their number).  It goes to the first replica whose end lies above its pick:

    expert 3, replicas in slots 3, 9 and 17 with weights .5, .25, .25
        pick       0 ................ 32768 ....... 49152 ....... 65536
        slot       |        3           |     9       |     17      |

So ranks that share tokens agree without asking each other.

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks), R most replicas of an expert,
T tokens, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from eplb.errors import LayoutError, MapError

PICKS = 1 << 16
_STEP = 40503  # odd, next to PICKS times the golden ratio


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

    @cached_property
    def num_physical_experts(self) -> int:
        return self.physical_to_logical_map.shape[1]

    def slots_of(self, layer: int, logical_expert: int) -> list[int]:
        """Return the physical slots that hold `logical_expert` in MoE layer `layer`, ascending."""
        return list(self._slots_LE[layer][logical_expert])

    def check_ranks(self, num_ranks: int) -> None:
        """Check that slots can be spread over `num_ranks` ranks, P / ranks on each.

        Raises `LayoutError` where they do not divide, `MapError` for an expert that is twice on one rank; with one rank
        that is allowed.
        """
        if self.num_physical_experts % num_ranks:
            raise LayoutError(f"{self.num_physical_experts} slots cannot be divided evenly over {num_ranks} ranks")
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
    """Return the map in which slot p holds logical expert p mod E: as many slots as experts unless given."""
    row = torch.arange(num_physical_experts or num_logical_experts) % max(1, num_logical_experts)
    return ExpertLocationMetadata(row.expand(num_layers, -1).clone(), num_logical_experts)


class SplitTable:
    """`slots_LRE[l, r, e]`: slot of the r-th replica; `ends_LRE`: the pick at which its share ends.

    Experts with fewer replicas repeat their first one, with an end that no pick reaches.
    """

    def __init__(self, slots_LRE: torch.Tensor, ends_LRE: torch.Tensor) -> None:
        self.slots_LRE = slots_LRE
        self.ends_LRE = ends_LRE

    @classmethod
    def of(
        cls, metadata: ExpertLocationMetadata, weights_LP: torch.Tensor | None, width: int | None = None
    ) -> SplitTable:
        """Build the table on the host.  `weights_LP`: of each slot among the slots of its expert; None for all alike.

        `width`: replicas that there is room for, at least as many as an expert has.  Raises `MapError` for weights that
        are negative, not finite or of another shape.
        """
        located_LP = metadata.physical_to_logical_map
        layers, experts = metadata.num_layers, metadata.num_logical_experts
        weights_LP = _checked(weights_LP, located_LP)
        # Slots in the order of their experts; within an expert in their own.
        order_LP = located_LP.argsort(dim=1, stable=True)
        sorted_LP = located_LP.gather(1, order_LP)
        counts_LE = torch.zeros((layers, experts), dtype=torch.int64)
        counts_LE.scatter_add_(1, located_LP, torch.ones_like(located_LP))
        starts_LE = counts_LE.cumsum(1) - counts_LE
        replica_LP = torch.arange(located_LP.shape[1]) - starts_LE.gather(1, sorted_LP)
        most = int(counts_LE.max()) if counts_LE.numel() else 1
        width = max(width or 1, most)
        slots_LER = order_LP.gather(1, starts_LE).unsqueeze(2).repeat(1, 1, width) if experts else _none(layers, width)
        shares_LER = torch.zeros((layers, experts, width), dtype=torch.float64)
        layer_LP = torch.arange(layers)[:, None].expand_as(order_LP)
        slots_LER[layer_LP, sorted_LP, replica_LP] = order_LP
        shares_LER[layer_LP, sorted_LP, replica_LP] = weights_LP.gather(1, order_LP)
        has_slot_LER = torch.arange(width) < counts_LE[:, :, None]
        # An expert without any weight is divided evenly.
        shares_LER = torch.where(shares_LER.sum(2, keepdim=True) > 0, shares_LER, has_slot_LER.double())
        ends_LER = (shares_LER.cumsum(2) / shares_LER.sum(2, keepdim=True) * PICKS).round().to(torch.int64)
        ends_LER.masked_fill_(torch.arange(width) >= counts_LE[:, :, None] - 1, PICKS)
        return cls(slots_LER.transpose(1, 2).contiguous(), ends_LER.transpose(1, 2).contiguous())

    def weights(self, num_slots: int) -> torch.Tensor:
        """Return the share of its expert's tokens that every slot takes [L, P] float64: what `of` was given."""
        weights_LP = torch.zeros((len(self.slots_LRE), num_slots), dtype=torch.float64)
        return weights_LP.scatter_add_(1, self.slots_LRE.flatten(1), self._shares().flatten(1))

    @property
    def width(self) -> int:
        return self.slots_LRE.shape[1]

    def widths(self) -> list[int]:
        """Return, by layer, the most replicas among which a token is divided, at least 1."""
        ends_LR = self.ends_LRE.amin(dim=2) if self.ends_LRE.shape[2] else self.ends_LRE.new_full((1, 1), PICKS)
        return [1 + int((row < PICKS).sum()) for row in ends_LR]

    def to(self, device: torch.device | str) -> SplitTable:
        return SplitTable(self.slots_LRE.to(device), self.ends_LRE.to(device))

    def host_copy(self) -> SplitTable:
        return SplitTable(self.slots_LRE.to("cpu", copy=True), self.ends_LRE.to("cpu", copy=True))

    def copy_layers(self, other: SplitTable, layers: list[int]) -> None:
        """Take these layers of another table of the same width; addresses stay."""
        for layer in layers:
            self.slots_LRE[layer].copy_(other.slots_LRE[layer])
            self.ends_LRE[layer].copy_(other.ends_LRE[layer])

    def slots(self, layer: int, width: int, logical_ids_TK: torch.Tensor, first_row: int) -> torch.Tensor:
        """Return the slots [T, K] of tokens in the rows `first_row ..` of the batch; `width` is that of the layer."""
        slots_RE = self.slots_LRE[layer]
        if width == 1:
            return slots_RE[0].take(logical_ids_TK)
        picks_T = picks(first_row, logical_ids_TK.shape[0], logical_ids_TK.device)
        passed_RTK = picks_T[:, None] >= self.ends_LRE[layer, : width - 1][:, logical_ids_TK]
        return slots_RE[passed_RTK.sum(dim=0), logical_ids_TK]

    def nearest(self, rank: int, num_ranks: int, slots_per_rank: int) -> SplitTable:
        """Return a table that sends as few tokens to other ranks as the same loads of slots allow.

        The loads stay the same if every rank brings equally many tokens.

        A slot first takes tokens of its own rank, up to all that it is to take; what it takes beyond comes from the
        ranks whose own slots take less than they bring, or that have none.  On the host; of `rank`.
        """
        shares_LRE = self._shares()
        is_here_LRE = (self.slots_LRE // slots_per_rank == rank) & (shares_LRE > 0)
        here_LE = (shares_LRE * is_here_LRE).sum(1, keepdim=True).mul(num_ranks).clamp(max=1.0)
        beyond_LRE = (shares_LRE - 1.0 / num_ranks).clamp(min=0.0)
        beyond_LE = beyond_LRE.sum(1, keepdim=True)
        elsewhere_LRE = torch.where(beyond_LE > 0, beyond_LRE / beyond_LE, shares_LRE)
        mine_LRE = torch.where(is_here_LRE, here_LE, (1.0 - here_LE) * elsewhere_LRE)
        ends_LRE = (mine_LRE.cumsum(1) / mine_LRE.sum(1, keepdim=True) * PICKS).round().to(torch.int64)
        ends_LRE[:, -1] = PICKS
        return SplitTable(self.slots_LRE, torch.where(self.ends_LRE == PICKS, PICKS, ends_LRE))

    def _shares(self) -> torch.Tensor:
        """Return the share of its expert's tokens that each replica takes [L, R, E] float64."""
        before_LRE = torch.cat([torch.zeros_like(self.ends_LRE[:, :1]), self.ends_LRE[:, :-1]], dim=1)
        return (self.ends_LRE - before_LRE).clamp(min=0).double() / PICKS

    def slot_loads(self, counts_SLE: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Return the counts of experts in S passes, divided over slots [S, L, P] int64: whole tokens, none lost."""
        counts_SLE = counts_SLE.long()
        loads_SLP = counts_SLE.new_zeros((*counts_SLE.shape[:2], num_slots))
        before = torch.zeros_like(counts_SLE)
        for replica in range(self.width):
            passed = counts_SLE * self.ends_LRE[:, replica] // PICKS
            loads_SLP.scatter_add_(2, self.slots_LRE[:, replica].expand(counts_SLE.shape), passed - before)
            before = passed
        return loads_SLP


def picks(first_row: int, num_rows: int, device: torch.device | str) -> torch.Tensor:
    """Return the picks of rows `first_row ..` of a batch: int64 [num_rows] in 0 .. 65,535."""
    rows_T = torch.arange(first_row, first_row + num_rows, device=device)
    return rows_T.mul_(_STEP).bitwise_and_(PICKS - 1)


def _checked(weights_LP: torch.Tensor | None, located_LP: torch.Tensor) -> torch.Tensor:
    if weights_LP is None:
        return torch.ones(located_LP.shape, dtype=torch.float64)
    if weights_LP.shape != located_LP.shape:
        raise MapError(f"split weights have the shape {list(weights_LP.shape)}, the map has {list(located_LP.shape)}")
    weights_LP = weights_LP.double()
    if not bool((weights_LP.isfinite() & (weights_LP >= 0)).all()):
        raise MapError("split weights must be finite and not negative")
    return weights_LP


def _none(layers: int, width: int) -> torch.Tensor:
    return torch.empty((layers, 0, width), dtype=torch.int64)


def check_cover(map_LP: np.ndarray, num_logical_experts: int) -> None:
    """Raise `MapError` for an id out of range or an expert without a slot."""
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
    """Return (layer, rank, expert) of the first expert that a rank holds twice."""
    by_rank = np.sort(map_LP.reshape(len(map_LP), num_ranks, map_LP.shape[1] // num_ranks), axis=2)
    found = np.argwhere(by_rank[:, :, 1:] == by_rank[:, :, :-1])
    if not len(found):
        return None
    layer, rank, index = found[0]
    return int(layer), int(rank), int(by_rank[layer, rank, index])


def replica_counts(map_LP: np.ndarray, num_logical_experts: int) -> np.ndarray:
    """Return [L, E] int64: slots of every logical expert."""
    layers = len(map_LP)
    flat = map_LP + np.arange(layers)[:, None] * num_logical_experts
    return np.bincount(flat.ravel(), minlength=layers * num_logical_experts).reshape(layers, num_logical_experts)
