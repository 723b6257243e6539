"""Routes of a step whose tokens were dealt out to ranks in slices: the whole of them, on every rank that shares them.

    rank 0   [ rows 0..2 | routes of layers 0 .. L-1 ]      they travel with the slices of the last MoE layer: one
    rank 1   [ rows 3..4 | routes of layers 0 .. L-1 ]      all-gather that happens anyway, padded to the longest slice

Knows ids and ranks.  Does not know requests or KV slots.

Shapes: T tokens of the step, t tokens of this rank's slice, L MoE layers, K top-k, E logical experts.
"""

from __future__ import annotations

import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.core.forward_batch import ForwardBatch
from rollout.distributed.communicator import Communicator, share_sizes


class RouteRider:
    """Brings the routes of one step together.  `capturer` has this rank's slice, of a step that has begun."""

    def __init__(self, capturer: RoutedExpertsCapturer) -> None:
        self._capturer = capturer
        self._rows_Tn: torch.Tensor | None = None

    def board(self, moe_layer: int) -> torch.Tensor | None:
        """Once the last MoE layer is there: what the routers chose in all of them, [t, L K]."""
        if moe_layer < self._capturer.num_moe_layers - 1:
            return None
        return self._capturer.finish_step().flatten(1)

    def arrive(self, rows_Tn: torch.Tensor) -> None:
        """Take the rows of the whole step, as `board` gave them."""
        self._rows_Tn = rows_Tn

    def routes(self) -> torch.Tensor:
        """Logical ids [T, L, K] in the order of the batch."""
        assert self._rows_Tn is not None, "no MoE layer took the routes along"
        return self._rows_Tn.unflatten(1, (self._capturer.num_moe_layers, self._capturer.top_k))


def gather_step(
    batch: ForwardBatch, ids_TLK: torch.Tensor, ranks: Communicator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step of all attention-DP ranks, one after the other: logical ids [T, L, K], input ids and positions [T].

    `ranks`: one of each DP rank; all of them call this together.
    """
    if batch.global_num_tokens is None:
        return ids_TLK, batch.input_ids, batch.positions
    columns = [batch.input_ids.unsqueeze(1), batch.positions.unsqueeze(1), ids_TLK.flatten(1)]
    gathered = ranks.all_gather_rows(torch.cat(columns, dim=1), batch.global_num_tokens)
    return gathered[:, 2:].to(ids_TLK.dtype).unflatten(1, ids_TLK.shape[1:]), gathered[:, 0], gathered[:, 1]


def slice_size(num_tokens: int, ranks: Communicator) -> int:
    """Tokens of this rank."""
    return share_sizes(num_tokens, ranks.size)[ranks.rank]
