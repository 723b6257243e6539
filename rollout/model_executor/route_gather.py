"""Routes of a step whose tokens were dealt out to ranks in slices: the whole of them, on every rank that shares them.

    rank 0   [ rows 0..2 | routes of layers 0 .. L-1 ]      they travel with the slices of the last MoE layer: one
    rank 1   [ rows 3..4 | routes of layers 0 .. L-1 ]      all-gather that happens anyway, padded to the longest slice

Knows ids and ranks.  Does not know requests or KV slots.

Shapes: T tokens of the step, t tokens of this rank's slice, L MoE layers, K top-k, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.core.forward_batch import ForwardBatch
from rollout.distributed.communicator import Communicator, share_sizes


class RouteRider:
    """Brings the routes of one step together.  `capturer` has this rank's slice, of a step that has begun."""

    def __init__(self, capturer: RoutedExpertsCapturer, num_logical_experts: int) -> None:
        self._capturer = capturer
        self._narrow = narrowest(num_logical_experts)
        self._rows_Tn: torch.Tensor | None = None

    def board(self, moe_layer: int) -> torch.Tensor | None:
        """Once the last MoE layer is there: what the routers chose in all of them, [t, L K]."""
        if moe_layer < self._capturer.num_moe_layers - 1:
            return None
        return torch.cat(self._capturer.finish_step(), dim=1).to(self._narrow)

    def arrive(self, rows_Tn: torch.Tensor) -> None:
        """Take the rows of the whole step, as `board` gave them."""
        self._rows_Tn = rows_Tn

    def routes(self) -> list[torch.Tensor]:
        """By layer, logical ids [T, K] int64 in the order of the batch."""
        assert self._rows_Tn is not None, "no MoE layer took the routes along"
        return list(self._rows_Tn.to(torch.int64).split(self._capturer.top_k, dim=1))


def gather_step(
    batch: ForwardBatch, ids_by_layer: Sequence[torch.Tensor], ranks: Communicator
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The step of all attention-DP ranks, one after the other: logical ids by layer, input ids and positions.

    `ranks`: one of each DP rank; all of them call this together.
    """
    if batch.global_num_tokens is None:
        return list(ids_by_layer), batch.input_ids, batch.positions
    columns = [batch.input_ids.unsqueeze(1), batch.positions.unsqueeze(1), *ids_by_layer]
    gathered = ranks.all_gather_rows(torch.cat(columns, dim=1), batch.global_num_tokens)
    input_ids, positions, *layers = gathered.split([column.shape[1] for column in columns], dim=1)
    return [ids_TK.contiguous() for ids_TK in layers], input_ids[:, 0].contiguous(), positions[:, 0].contiguous()


def slice_size(num_tokens: int, ranks: Communicator) -> int:
    """Tokens of this rank."""
    return share_sizes(num_tokens, ranks.size)[ranks.rank]


def narrowest(num_logical_experts: int) -> torch.dtype:
    """The narrowest type that holds the ids."""
    if num_logical_experts <= 1 << 8:
        return torch.uint8
    return torch.int16 if num_logical_experts <= 1 << 15 else torch.int32
