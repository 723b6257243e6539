"""Routes of a step whose tokens were dealt out to ranks in slices: the whole of them, on every rank that shares them.

    rank 0   [ rows 0..2 ]  layers 0 .. L-1        one all-gather a forward, whatever the number of layers;
    rank 1   [ rows 3..4 ]  layers 0 .. L-1        padded to the longest slice, in the narrowest type that holds the ids

The step goes on meanwhile: nothing waits for routes until they are entered where they are kept, some steps later.

Knows ids and ranks.  Does not know requests or KV slots.

Shapes: T tokens of the step, t tokens of this rank's slice, L MoE layers, K top-k, E logical experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout.core.forward_batch import ForwardBatch
from rollout.distributed.communicator import Communicator, share_sizes


class GatheredRoutes(Sequence[torch.Tensor]):
    """By layer, logical ids [T, K] int64, which may still be on their way: whoever looks at them waits."""

    def __init__(self, gather: Callable[[], torch.Tensor], num_layers: int) -> None:
        self._gather = gather
        self._num_layers = num_layers
        self._layers: list[torch.Tensor] | None = None

    def __len__(self) -> int:
        return self._num_layers

    def __getitem__(self, layer: Any) -> Any:
        if self._layers is None:
            self._layers = list(self._gather().transpose(0, 1).to(torch.int64).contiguous())
        return self._layers[layer]


def gather_routes(
    ids_by_layer: Sequence[torch.Tensor], num_tokens: int, num_logical_experts: int, ranks: Communicator
) -> GatheredRoutes:
    """Of a step of `num_tokens`, in the order of the batch, from those of this rank's slice [t, K] by layer.

    `ranks` share the tokens, dealt out as by `share_sizes`; all of them call this together.
    """
    slices_tLK = torch.stack(list(ids_by_layer), dim=1).to(_narrowest(num_logical_experts))
    gather = ranks.start_all_gather_rows(slices_tLK, share_sizes(num_tokens, ranks.size))
    return GatheredRoutes(gather, len(ids_by_layer))


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


def _narrowest(num_logical_experts: int) -> torch.dtype:
    if num_logical_experts <= 1 << 8:
        return torch.uint8
    return torch.int16 if num_logical_experts <= 1 << 15 else torch.int32
