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


@dataclass(slots=True)
class DispatchOutput:
    """Work for the experts of this rank.

    With `weights_RS` the experts return the weighted sum over a row's slots [R, D], in slot order.  Without weights
    they return the outputs [R, S, D], which `combine` then weights and sums.

    With `has_holes`, slots may be empty, marked by the id -1.  Their output is zero, and their weight is not read.
    """

    hidden_RD: torch.Tensor
    local_physical_ids_RS: torch.Tensor  # int64, index into this rank's expert storage
    weights_RS: torch.Tensor | None
    handle: Any  # opaque: read by the dispatcher that made it
    has_holes: bool = False


class Dispatcher(ABC):
    """A token's expert outputs are summed in the order of its K choices, or of the ranks that computed them."""

    # Whether ranks that share tokens bring a slice each, rather than all of them.
    scatters_tokens = False

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

    @abstractmethod
    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        """Send tokens to the ranks that hold their experts."""

    @abstractmethod
    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        """Bring the outputs of the experts for a `DispatchOutput` back to its tokens, and return their sums [T, D]."""


class LocalDispatcher(Dispatcher):
    """The dispatcher of a lone rank: rows are the tokens, slots are their K choices, and the experts do the sum."""

    def capture_obstacle(self, tokens_by_rank: Sequence[int]) -> str | None:
        return None

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        return DispatchOutput(hidden_TD, physical_ids_TK, weights_TK, handle=None)

    def combine(self, expert_out: torch.Tensor, handle: None) -> torch.Tensor:
        return expert_out
