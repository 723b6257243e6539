"""Every rank sees all tokens and computes its experts' part of each; the parts are added in rank order.

    attention DP 1     all ranks have the tokens already     -> parts -> all-reduce
    attention DP > 1   all-gather over attention-DP ranks    -> parts -> each rank's tokens back to it, summed there

Works for experts spread over ranks, for inner features of experts split over ranks, and for both.

Shapes: T tokens of this rank, R tokens of all attention-DP ranks, D hidden, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.base import Dispatcher, DispatchOutput, adapters_of_rows


class AllTokensDispatcher(Dispatcher):
    """Slots are P / ep_size on each rank.  `plan_step` is called before every forward."""

    def __init__(self, parallel: Parallel, num_physical_experts: int) -> None:
        layout = parallel.layout
        self._tp, self._attn_dp = parallel.tp, parallel.attn_dp
        self._attn_tp_size = layout.attn_tp_size
        self._first_slot = parallel.position.ep_rank * (num_physical_experts // layout.ep_size)
        self._ep_size, self._is_spread = layout.ep_size, layout.ep_size > 1
        self._tokens_by_rank: list[int] = []

    def plan_step(self, tokens_by_rank: Sequence[int]) -> None:
        self._tokens_by_rank = list(tokens_by_rank)

    def capture_obstacle(self, tokens_by_rank: Sequence[int]) -> str | None:
        return None if self._tp.device is not None else "the ranks of the engine exchange tokens through the host"

    def order_of_sums(self, has_replicas: bool) -> str | None:
        if not has_replicas:
            return None
        return "expert outputs are added rank by rank, and a token's row in the batch picks among replicas on ranks"

    @property
    def moves_rows(self) -> bool:
        return self._attn_dp.size > 1

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapters_T: torch.Tensor | None = None,
    ) -> DispatchOutput:
        hidden_RD, ids_RK, weights_RK, adapters_R = hidden_TD, physical_ids_TK, weights_TK, adapters_T
        if self._attn_dp.size > 1:
            counts = self._tokens_by_rank[:: self._attn_tp_size]
            mine = [hidden_TD, weights_TK, physical_ids_TK]
            if adapters_T is not None:
                mine.append(adapters_T.unsqueeze(1))
            hidden_RD, weights_RK, ids_RK, *adapters_R1 = self._attn_dp.all_gather_parts(mine, counts)
            adapters_R = adapters_of_rows(adapters_R1)
        work = DispatchOutput(hidden_RD, ids_RK, weights_RK, None, has_holes=self._is_spread, adapters_R=adapters_R)
        if self._is_spread:
            # Slots of other ranks become ids that no expert of this rank has.
            work.local_physical_ids_RS = ids_RK - self._first_slot
            work.expected = ids_RK.numel() // self._ep_size
        return work

    def combine(self, expert_out: torch.Tensor, handle: None) -> torch.Tensor:
        if self._attn_dp.size == 1:
            return self._tp.all_reduce(expert_out)
        if self._attn_tp_size == 1:
            return self._tp.reduce_scatter_rows(expert_out, self._tokens_by_rank)
        by_dp_rank = expert_out.split(self._tokens_by_rank[:: self._attn_tp_size])
        wanted = [by_dp_rank[rank // self._attn_tp_size] for rank in range(self._tp.size)]
        return self._tp.reduce_scatter_rows(torch.cat(wanted), self._tokens_by_rank)
