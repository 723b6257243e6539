"""The stand-in's `ElasticBuffer`.  What it promises is told in `deepep_stand_in`.

Shapes: T tokens, H hidden, K top-k, G ranks, E experts on all ranks, C = E / G on this one, M most tokens of a rank,
N rows received, X rows after expanding to one for each (token, local expert).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.deepep_stand_in_wire import (
    Wire,
    align,
    check_choices,
    check_rows,
    garbage,
    local_ids,
    ranks_of_tokens,
    sum_of_ranks,
)


@dataclass
class EPHandle:
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor  # [G] inclusive
    psum_num_recv_tokens_per_expert: torch.Tensor  # [C]
    num_unaligned_recv_tokens_per_expert: torch.Tensor  # [C]
    recv_src_metadata: torch.Tensor  # [N, K + 2]


class ElasticBuffer:
    wire: Wire

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        deterministic: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        assert isinstance(group, dist.ProcessGroup), "a torch group, not one of its backends"
        assert group._get_backend(torch.device("cpu")) is not None
        assert (group.rank(), group.size()) == (self.wire.rank, self.wire.size)
        assert min(num_max_tokens_per_rank, hidden, num_topk) > 0
        self.wire.agree("ElasticBuffer", num_max_tokens_per_rank, hidden, num_topk)
        group.barrier().wait()
        self.num_max_tokens_per_rank, self.deterministic = num_max_tokens_per_rank, deterministic
        self.explicitly_destroy, self.destroyed = explicitly_destroy, False

    def destroy(self) -> None:
        assert self.explicitly_destroy
        self.wire.agree("destroy")
        self.destroyed = True

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int = 1,
        num_sms: int = 0,
        do_cpu_sync: bool = True,
        do_expand: bool = False,
        do_zero_padding: bool = False,
    ) -> tuple[Any, ...]:
        most, size, top_k = num_max_tokens_per_rank or self.num_max_tokens_per_rank, self.wire.size, topk_idx.shape[1]
        assert not self.destroyed
        check_rows(x)
        check_choices(topk_idx, topk_weights, num_experts, size)
        named = topk_idx.sort(dim=1).values
        assert not ((named[:, 1:] == named[:, :-1]) & (named[:, 1:] >= 0)).any(), "a token names an expert twice"
        assert x.shape[0] <= most, f"{x.shape[0]} tokens, more than {most}"
        assert most <= self.num_max_tokens_per_rank
        self.wire.agree("elastic dispatch", most, num_experts, x.shape[1])
        to_N, tokens_N = ranks_of_tokens(topk_idx, num_experts, size).T.nonzero().unbind(1)
        counts, (recv_x, recv_ids, recv_weights, sources) = self.wire.exchange(
            to_N, x[tokens_N], topk_idx[tokens_N], topk_weights[tokens_N], tokens_N + self.wire.rank * most
        )
        order = torch.arange(len(recv_x)) if self.deterministic else self._arrival(counts)
        recv_x, recv_weights, sources = recv_x[order], recv_weights[order], sources[order]
        recv_ids = local_ids(recv_ids[order], self.wire.rank, num_experts // size)
        metadata = torch.full((len(recv_x), top_k + 2), -1, dtype=torch.int32)
        metadata[:, 0] = sources
        metadata[:, 1] = sources // most * top_k + (recv_ids >= 0).int().argmax(1)
        real = torch.bincount(recv_ids[recv_ids >= 0], minlength=num_experts // size)
        aligned = torch.tensor([align(count, expert_alignment) for count in real.tolist()])
        starts = aligned.cumsum(0) - aligned
        handle = EPHandle(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=expert_alignment,
            num_max_tokens_per_rank=most,
            num_sms=num_sms,
            topk_idx=topk_idx.clone(),
            num_recv_tokens=len(recv_x),
            num_expanded_tokens=int(aligned.sum()),
            num_recv_tokens_per_expert_list=aligned.tolist() if do_cpu_sync else [],
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(counts).cumsum(0).int(),
            psum_num_recv_tokens_per_expert=(starts + (real if do_expand else aligned)).int(),
            num_unaligned_recv_tokens_per_expert=real.int(),
            recv_src_metadata=metadata,
        )
        if do_expand:
            recv_x, recv_weights = self._expanded(handle, recv_x, recv_ids, recv_weights, starts, do_zero_padding)
            return recv_x, None, recv_weights, handle, SimpleNamespace(event=None)
        if not do_cpu_sync:
            rest = most * size - len(recv_x)
            recv_x = torch.cat((recv_x, garbage(rest, x.shape[1])))
            recv_ids = torch.cat((recv_ids, torch.full((rest, top_k), 1 << 40)))
            recv_weights = torch.cat((recv_weights, garbage(rest, top_k, dtype=torch.float32)))
        return recv_x, recv_ids, recv_weights, handle, SimpleNamespace(event=None)

    def combine(self, x: torch.Tensor, handle: EPHandle) -> tuple[Any, ...]:
        assert not self.destroyed
        check_rows(x)
        assert x.shape[1] % 256 == 0
        self.wire.agree("elastic combine", x.shape[1], handle.num_max_tokens_per_rank)
        if handle.do_expand:
            x = self._summed(handle, x)
        sources, most = handle.recv_src_metadata[:, 0].long(), handle.num_max_tokens_per_rank
        assert x.shape[0] >= len(sources)
        _, (rows, tokens) = self.wire.exchange(sources // most, x[: len(sources)], sources % most)
        in_rank_TG = ranks_of_tokens(handle.topk_idx, handle.num_experts, self.wire.size)
        return sum_of_ranks(rows, tokens, in_rank_TG), None, SimpleNamespace(event=None)

    def _arrival(self, counts: list[int]) -> torch.Tensor:
        """Source rank after source rank, the tokens of each in any order."""
        parts, start = [torch.zeros(0, dtype=torch.int64)], 0
        for count in counts:
            parts.append(self.wire.shuffled(count) + start)
            start += count
        return torch.cat(parts)

    def _expanded(
        self,
        handle: EPHandle,
        recv_x: torch.Tensor,
        recv_ids: torch.Tensor,
        recv_weights: torch.Tensor,
        starts: torch.Tensor,
        do_zero_padding: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [X, H] by local expert, each expert's padded to the alignment, and their weights [X]."""
        num_rows = handle.num_expanded_tokens
        rows = recv_x.new_zeros(num_rows, recv_x.shape[1]) if do_zero_padding else garbage(num_rows, recv_x.shape[1])
        weights = torch.zeros(num_rows)
        for expert, start in enumerate(starts.tolist()):
            tokens, slots = (recv_ids == expert).nonzero().unbind(1)
            places = start + torch.arange(len(tokens))
            rows[places], weights[places] = recv_x[tokens], recv_weights[tokens, slots]
            handle.recv_src_metadata[tokens, slots + 2] = places.int()
        return rows, weights

    def _summed(self, handle: EPHandle, rows: torch.Tensor) -> torch.Tensor:
        """The expanded rows of a token added in float32, choice after choice, and rounded: [N, H]."""
        places_NK = handle.recv_src_metadata[:, 2:].long()
        total = torch.zeros(len(places_NK), rows.shape[1])
        for places_N in places_NK.unbind(1):
            here = (places_N >= 0).nonzero().squeeze(1)
            total[here] += rows[places_N[here]].float()
        return total.bfloat16()
