"""The stand-in's `ElasticBuffer`.  What it promises is listed in `deepep_stand_in`.

Shapes: T tokens, H hidden, K top-k, G ranks, E experts on all ranks, C = E / G on this one, M most tokens of a rank,
N rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.deepep_stand_in_wire import (
    Wire,
    check_choices,
    check_rows,
    garbage,
    local_ids,
    ranks_of_tokens,
    sum_of_ranks,
)


@dataclass
class EPHandle:
    """The fields in use, and the fields that combine needs."""

    topk_idx: torch.Tensor
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor  # [G] int32, inclusive
    recv_src_metadata: torch.Tensor  # [N, K + 2] int32, the first column src_rank * M + src_token
    num_experts: int
    num_max_tokens_per_rank: int


class ElasticBuffer:
    wire: Wire

    def __init__(
        self,
        group: Any,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        explicitly_destroy: bool = False,
    ) -> None:
        assert (group.rank(), group.size()) == (self.wire.rank, self.wire.size)
        assert group._get_backend(torch.device("cuda"))._comm_ptr(), "no NCCL communicator"
        assert num_max_tokens_per_rank > 0 and hidden > 0 and num_topk > 0, "a buffer of no size"
        self.wire.agree("ElasticBuffer", num_max_tokens_per_rank, hidden, num_topk)
        self._most, self._hidden, self._top_k = num_max_tokens_per_rank, hidden, num_topk
        self.deterministic, self.explicitly_destroy, self.destroyed = deterministic, explicitly_destroy, False
        group.barrier()

    def destroy(self) -> None:
        assert self.explicitly_destroy
        self.wire.agree("destroy")
        self.destroyed = True

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        do_cpu_sync: bool | None = None,
    ) -> tuple[Any, ...]:
        assert not self.destroyed and num_experts is not None, "num_experts decides how many SMs are used"
        most = self._most if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        waits = True if do_cpu_sync is None else do_cpu_sync
        size, rank, local_experts = self.wire.size, self.wire.rank, num_experts // self.wire.size
        check_rows(x)
        check_choices(topk_idx, topk_weights, num_experts, size)
        chosen = topk_idx.sort(dim=1).values
        assert not ((chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)).any(), "a token names an expert twice"
        assert x.shape == (topk_idx.shape[0], self._hidden), f"rows of {x.shape[1]} in a buffer for {self._hidden}"
        assert topk_idx.shape[1] <= self._top_k
        assert x.shape[0] <= most <= self._most, f"{x.shape[0]} tokens, {most} announced, room for {self._most}"
        self.wire.agree("elastic dispatch", most, num_experts, int(waits))
        in_rank_TG = ranks_of_tokens(topk_idx, num_experts, size)
        to_N, tokens_N = in_rank_TG.T.nonzero().unbind(1)
        weights = torch.zeros_like(topk_idx, dtype=torch.float32) if topk_weights is None else topk_weights
        counts, (recv_x, recv_ids, recv_weights, recv_tokens) = self.wire.exchange(
            to_N, x[tokens_N], topk_idx[tokens_N], weights[tokens_N], tokens_N.int()
        )
        sources = torch.arange(size).repeat_interleave(torch.tensor(counts))
        order = torch.arange(len(sources))
        if not self.deterministic:
            parts = [mine[self.wire.shuffled(len(mine))] for mine in order.split(counts)]
            order = torch.cat(parts)
        num_rows = len(order) if waits else size * most
        rows = garbage(num_rows, x.shape[1])
        ids = torch.full((num_rows, topk_idx.shape[1]), 1 << 40)
        all_weights = garbage(num_rows, topk_idx.shape[1], dtype=torch.float32)
        metadata = torch.full((num_rows, topk_idx.shape[1] + 2), -7, dtype=torch.int32)
        rows[: len(order)] = recv_x[order]
        ids[: len(order)] = local_ids(recv_ids, rank, local_experts)[order]
        all_weights[: len(order)] = recv_weights[order]
        metadata[: len(order), 0] = (sources * most + recv_tokens)[order].int()
        handle = EPHandle(topk_idx.clone(), torch.tensor(counts).cumsum(0).int(), metadata, num_experts, most)
        return rows, ids, None if topk_weights is None else all_weights, handle, SimpleNamespace(event=None)

    def combine(self, x: torch.Tensor, handle: EPHandle) -> tuple[Any, ...]:
        assert isinstance(handle, EPHandle), "the handle of another mode"
        check_rows(x)
        assert x.shape[1] % 256 == 0, "no kernel for this hidden size"
        assert x.shape[0] == handle.recv_src_metadata.shape[0], "rows that were not received, or not all of them"
        self.wire.agree("elastic combine", x.shape[1], handle.num_max_tokens_per_rank)
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        names = handle.recv_src_metadata[:count, 0]
        sources = names.div(handle.num_max_tokens_per_rank, rounding_mode="floor").long()
        _, (rows, tokens) = self.wire.exchange(sources, x[:count], names % handle.num_max_tokens_per_rank)
        in_rank_TG = ranks_of_tokens(handle.topk_idx, handle.num_experts, self.wire.size)
        return sum_of_ranks(rows, tokens, in_rank_TG), None, SimpleNamespace(event=None)
