"""The interface between routing and the experts: bring each token to the ranks of its experts, and the results back.

A dispatcher holds no parameters and is not a module; all MoE layers of a rank share one.  It keeps the data that
`combine` needs in a handle that only the same dispatcher reads.

Shapes: T tokens of this rank, D hidden, K top-k, R rows that the experts of this rank work on, S expert slots of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows that lie by local expert, each of which has the same number of places.

    `counts_C` int32: how many of an expert's places hold a row, from the first on.
    """

    counts_C: torch.Tensor

    def local_ids(self, num_rows: int) -> torch.Tensor:
        """Return the expert of each of `num_rows` places, as a slot [R, 1] int64; -1 where there is no row."""
        num_experts, device = self.counts_C.shape[0], self.counts_C.device
        experts_C1 = torch.arange(num_experts, device=device).unsqueeze(1)
        places_N = torch.arange(num_rows // num_experts, device=device)
        return torch.where(places_N < self.counts_C.unsqueeze(1), experts_C1, -1).view(-1, 1)


@dataclass(slots=True)
class DispatchOutput:
    """Work for the experts of this rank.

    With `weights_RS` the experts return the weighted sum over a row's slots [R, D], in slot order.  Without weights
    they return the outputs [R, S, D], which `combine` then weights and sums.

    With `has_holes`, slots may be empty: their id, such as -1, is none of this rank's experts'.  Their output is zero,
    and their weight is not read.

    With `packed`, rows have one slot and no ids: their place tells the expert.  Nothing reads the output of empty
    places.

    `adapters_R` int64 is the slot of each row's adapter, -1 for none; None: no row has one.

    `expected` is a guess of the number of filled slots, which tiles are chosen for; None: all slots are filled.
    """

    hidden_RD: torch.Tensor
    local_physical_ids_RS: torch.Tensor | None  # int64, index into this rank's expert storage
    weights_RS: torch.Tensor | None
    handle: Any  # opaque: read by the dispatcher that made it
    has_holes: bool = False
    packed: PackedRows | None = None
    adapters_R: torch.Tensor | None = None
    expected: int | None = None

    @property
    def ids_RS(self) -> torch.Tensor:
        """The local expert of each slot [R, S] int64; any other id for none."""
        if self.packed is not None:
            return self.packed.local_ids(self.hidden_RD.shape[0])
        assert self.local_physical_ids_RS is not None
        return self.local_physical_ids_RS


def adapters_of_rows(parts_R1: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the slots [R] of rows that came with [R, 1] or without; None also where the host sees that all are -1."""
    if not parts_R1 or not (parts_R1[0].is_cuda or bool((parts_R1[0] >= 0).any())):
        return None
    return parts_R1[0].squeeze(1)


class Dispatcher(ABC):
    """A token's expert outputs are summed in the order of its K choices, or of the ranks that computed them."""

    # Whether ranks that share tokens bring a slice each, rather than all of them.
    scatters_tokens = False
    # Whether tokens stay with the experts of a lone rank, so that `combine` changes nothing.
    is_local = False

    def plan_step(self, tokens_by_rank: Sequence[int]) -> None:  # noqa: B027 (most have nothing to plan)
        """Prepare for a forward in which each rank of the engine brings this many tokens to `dispatch`.

        All ranks call it, before every forward and before every replay of a captured one.
        """

    @abstractmethod
    def capture_obstacle(self, tokens_by_rank: Sequence[int]) -> str | None:
        """Return why a forward with these tokens of each rank cannot be captured in a CUDA graph; None if it can.

        In a forward that can, `dispatch` and `combine` read nothing on the host that changes from step to step, and
        their messages are captured, too.  The answer is the same on all ranks.
        """

    def order_of_sums(self, has_replicas: bool) -> str | None:
        """Return why the order in which a token's expert outputs are added depends on its batch.

        None where it does not.  With `has_replicas` an expert may be in several slots.
        """
        return None

    @property
    def moves_rows(self) -> bool:
        """True if rows of other ranks come here.  They may have adapters when the rows of this rank have none."""
        return not self.is_local

    @abstractmethod
    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapters_T: torch.Tensor | None = None,
    ) -> DispatchOutput:
        """Send tokens to the ranks that hold their experts, with the slots of their adapters int64 where given.

        If the dispatcher moves rows, all ranks give slots or none does.
        """

    @abstractmethod
    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        """Bring the outputs of the experts for a `DispatchOutput` back to its tokens, and return their sums [T, D]."""


class LocalDispatcher(Dispatcher):
    """The dispatcher of a lone rank: rows are the tokens, slots are their K choices, and the experts do the sum."""

    is_local = True

    def capture_obstacle(self, tokens_by_rank: Sequence[int]) -> str | None:
        return None

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapters_T: torch.Tensor | None = None,
    ) -> DispatchOutput:
        return DispatchOutput(hidden_TD, physical_ids_TK, weights_TK, handle=None, adapters_R=adapters_T)

    def combine(self, expert_out: torch.Tensor, handle: None) -> torch.Tensor:
        return expert_out
