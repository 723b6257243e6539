"""The stand-in's `Buffer`: normal mode, and low-latency mode.  What it promises is listed in `deepep_stand_in`.

Calls of low-latency mode can be captured (`tests/graph_stand_in.py`), the other ones wait for the device.

Shapes: T tokens, H hidden, K top-k, A (token, choice) pairs, G ranks, E experts on all ranks, C = E / G on this one,
M most tokens of a rank, N rows received.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.deepep_stand_in_wire import (
    Wire,
    align,
    check_choices,
    check_rows,
    local_ids,
    ranks_of_tokens,
    sum_of_ranks,
)
from tests.graph_stand_in import launch

NVL_BYTES_OF_A_ROW = 128
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class Config:
    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * num_ranks * align(hidden_bytes, NVL_BYTES_OF_A_ROW)


class NormalBuffer:
    """`Buffer` of a build without low-latency kernels."""

    wire: Wire
    num_sms = 20

    def __init__(
        self,
        group: None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        assert group is None, "the stand-in is set up through `comm`"
        assert (comm.Get_rank(), comm.Get_size()) == (self.wire.rank, self.wire.size)
        assert self.wire.size in (2, 4, 8), "Unsupported ranks"
        assert num_nvl_bytes > 0 and num_nvl_bytes % 128 == 0
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.num_qps_per_rank = low_latency_mode, num_qps_per_rank
        self.explicitly_destroy, self.is_dirty, self.destroyed = explicitly_destroy, False, False
        self._set_up(comm, low_latency_mode)

    def _set_up(self, comm: Any, low_latency_mode: bool) -> None:
        """Exchange device numbers, memory handles of any bytes and the root's id as the package does."""
        rank, size = self.wire.rank, self.wire.size
        assert comm.allgather(rank) == list(range(size))
        assert comm.allgather(bytearray([rank, 0, 255])) == [bytearray([peer, 0, 255]) for peer in range(size)]
        assert all(isinstance(handle, bytearray) for handle in comm.allgather(bytearray(b"\x00" * rank)))
        if low_latency_mode:
            root = comm.allgather(bytearray(b"id" * 64) if rank == 0 else None)
            assert root == [bytearray(b"id" * 64)] + [None] * (size - 1)

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(cls.num_sms)

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        assert self.explicitly_destroy
        self.wire.agree("destroy")
        self.destroyed = True

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        check_choices(topk_idx, None, num_experts, self.wire.size)
        in_rank_TG = ranks_of_tokens(topk_idx, num_experts, self.wire.size)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank_TG.sum(0).int(), None, per_expert.int(), in_rank_TG, SimpleNamespace(event=None)

    def dispatch(
        self,
        x: torch.Tensor,
        num_tokens_per_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens_per_rdma_rank: None = None,
    ) -> tuple[Any, ...]:
        assert not self.destroyed
        check_rows(x)
        assert x.shape[1] * 2 // 16 % 2 == 0 and x.shape[1] + 8 <= 8192
        num_experts, size, rank = num_tokens_per_expert.shape[0], self.wire.size, self.wire.rank
        check_choices(topk_idx, topk_weights, num_experts, size)
        local_experts = num_experts // size
        assert local_experts <= 128 and num_tokens_per_rdma_rank is None
        assert torch.equal(num_tokens_per_rank.long(), is_token_in_rank.sum(0))
        self.wire.agree("dispatch", num_experts, x.shape[1], topk_idx.shape[1])
        self.is_dirty = True
        to_N, tokens_N = is_token_in_rank.T.nonzero().unbind(1)
        _, (recv_x, recv_ids, recv_weights, recv_tokens) = self.wire.exchange(
            to_N, x[tokens_N], topk_idx[tokens_N], topk_weights[tokens_N], tokens_N.int()
        )
        recv_ids = local_ids(recv_ids, rank, local_experts)
        recv_weights = recv_weights.masked_fill(recv_ids < 0, 0.0)
        per_expert = torch.bincount(recv_ids[recv_ids >= 0], minlength=local_experts).tolist()
        prefix_GG = torch.tensor(self.wire.communicator.gather_ints(num_tokens_per_rank.tolist())).cumsum(0).int()
        channels = torch.zeros(size, self.num_sms // 2, dtype=torch.int32)
        handle = (
            prefix_GG,
            channels,
            channels,
            recv_tokens,
            is_token_in_rank,
            -torch.ones_like(is_token_in_rank.int()),
        )
        return recv_x, recv_ids, recv_weights, per_expert, handle, SimpleNamespace(event=None)

    def combine(self, x: torch.Tensor, handle: tuple[Any, ...]) -> tuple[Any, ...]:
        check_rows(x)
        assert isinstance(handle, tuple) and len(handle) == 6, "the handle of another mode"
        prefix_GG, _, _, recv_tokens, in_rank_TG, _ = handle
        self.wire.agree("combine", x.shape[1])
        sources = prefix_GG[:, self.wire.rank].diff(prepend=prefix_GG.new_zeros(1)).tolist()
        from_N = torch.arange(self.wire.size).repeat_interleave(torch.tensor(sources))
        assert x.shape[0] >= len(from_N)
        _, (rows, tokens) = self.wire.exchange(from_N, x[: len(from_N)], recv_tokens)
        return sum_of_ranks(rows, tokens, in_rank_TG), None, SimpleNamespace(event=None)


class Buffer(NormalBuffer):
    """`Buffer` with low-latency kernels."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []  # the two that may be alive: src_info, rows

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 2 * num_experts * num_max_dispatch_tokens_per_rank * (16 + 2 * hidden)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        self.wire.agree("clean_low_latency_buffer", num_max_dispatch_tokens_per_rank, hidden, num_experts)
        self.is_dirty = False

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
    ) -> tuple[Any, ...]:
        most, size, hidden = num_max_dispatch_tokens_per_rank, self.wire.size, x.shape[1]
        self._check_low_latency(x, topk_idx, most, num_experts)
        local_experts = num_experts // size
        recv_x = x.new_empty(local_experts, size * most, hidden)
        src_info = topk_idx.new_empty(local_experts, size * most, dtype=torch.int32)
        layout_range = topk_idx.new_empty(local_experts, size, dtype=torch.int64)
        recv_count = topk_idx.new_empty(local_experts, dtype=torch.int32)
        results = recv_x, src_info, layout_range, recv_count
        launch(lambda: self._dispatch_into(results, x, topk_idx, most, num_experts), "low_latency_dispatch")
        handle = (src_info, layout_range, most, hidden, num_experts)
        result = self._packed_fp8(recv_x) if use_fp8 else recv_x
        return result, recv_count, handle, SimpleNamespace(event=None), None

    def _dispatch_into(
        self,
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        most: int,
        num_experts: int,
    ) -> None:
        """Do a dispatch's work on the device, which a replay of a capture does again."""
        assert not self.is_dirty, "clean_low_latency_buffer was not called after normal mode"
        check_choices(topk_idx, None, num_experts, self.wire.size)
        self.wire.agree("low_latency_dispatch", most, num_experts, x.shape[1])
        recv_x, src_info, layout_range, recv_count = results
        recv_x.fill_(torch.nan)
        src_info.fill_(-7)
        local_experts = num_experts // self.wire.size
        tokens_A, slots_A = (topk_idx >= 0).nonzero().unbind(1)
        experts_A = topk_idx[tokens_A, slots_A]
        counts, (rows, experts, tokens) = self.wire.exchange(
            experts_A // local_experts, x[tokens_A], experts_A % local_experts, tokens_A.int()
        )
        sources = torch.arange(self.wire.size).repeat_interleave(torch.tensor(counts))
        recv_count.copy_(torch.bincount(experts, minlength=local_experts))
        for expert in range(local_experts):
            begin = 0
            for source in self.wire.shuffled(self.wire.size).tolist():
                mine = ((experts == expert) & (sources == source)).nonzero().squeeze(1)
                mine = mine[self.wire.shuffled(len(mine))]
                recv_x[expert, begin : begin + len(mine)] = rows[mine]
                src_info[expert, begin : begin + len(mine)] = tokens[mine]
                layout_range[expert, source] = (begin << 32) | len(mine)
                begin += len(mine)
        self._remember(src_info, recv_x)

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        assert isinstance(handle, tuple) and len(handle) == 5, "the handle of another mode"
        _, _, most, hidden, num_experts = handle
        size, local_experts = self.wire.size, num_experts // self.wire.size
        assert x.shape == (local_experts, size * most, hidden) and x.dtype == torch.bfloat16 and x.is_contiguous()
        combined = x.new_empty(topk_idx.shape[0], hidden)
        launch(lambda: self._combine_into(combined, x, topk_idx, topk_weights, handle), "low_latency_combine")
        return combined, SimpleNamespace(event=None), None

    def _combine_into(
        self,
        combined: torch.Tensor,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
    ) -> None:
        """Do a combine's work on the device, which a replay of a capture does again."""
        src_info, layout_range, most, hidden, num_experts = handle
        size, local_experts = self.wire.size, num_experts // self.wire.size
        assert any(src_info is alive for alive, _ in self._results), "the third live low-latency result"
        check_choices(topk_idx, topk_weights, num_experts, size)
        self.wire.agree("low_latency_combine", most, num_experts, hidden)
        places, to, experts = [torch.zeros(0, dtype=torch.int64)], [], []
        for expert in range(local_experts):
            for source in range(size):
                begin, count = divmod(int(layout_range[expert, source]), 1 << 32)
                places.append(torch.arange(begin, begin + count) + expert * size * most)
                to += [source] * count
                experts += [expert + self.wire.rank * local_experts] * count
        places_A = torch.cat(places)
        is_filled = bool((places_A < src_info.numel()).all()) and bool((src_info.flatten()[places_A] >= 0).all())
        assert self.wire.communicator.all_agree(is_filled), "the handle names places without a row"
        _, (rows, of_experts, tokens) = self.wire.exchange(
            torch.tensor(to, dtype=torch.int64),
            x.flatten(0, 1)[places_A],
            torch.tensor(experts, dtype=torch.int64),
            src_info.flatten()[places_A],
        )
        lookup = torch.full((topk_idx.shape[0], num_experts), -1)
        lookup[tokens.long(), of_experts] = torch.arange(len(rows))
        total = torch.zeros(topk_idx.shape[0], hidden)
        for ids_T, weights_T in zip(topk_idx.T, topk_weights.T, strict=True):
            chosen = (ids_T >= 0).nonzero().squeeze(1)
            total[chosen] += weights_T[chosen, None] * rows[lookup[chosen, ids_T[chosen]]].float()
        combined.copy_(total)

    def _check_low_latency(self, x: torch.Tensor, topk_idx: torch.Tensor, most: int, num_experts: int) -> None:
        check_rows(x)
        assert self.low_latency_mode and not self.destroyed
        assert self.num_qps_per_rank == num_experts // self.wire.size
        needed = self.get_low_latency_rdma_size_hint(most, x.shape[1], self.wire.size, num_experts)
        assert self.num_rdma_bytes >= needed
        assert x.shape[1] in LOW_LATENCY_HIDDEN and topk_idx.shape[1] <= 11
        assert x.shape[0] <= most <= 511 and self.wire.size * most % 4 == 0

    def _remember(self, src_info: torch.Tensor, recv_x: torch.Tensor) -> None:
        self._results.append((src_info, recv_x))
        if len(self._results) > 2:
            _, over = self._results.pop(0)
            if all(over is not alive for _, alive in self._results):  # a replay has its memory again
                over.fill_(torch.nan)

    def _packed_fp8(self, recv_x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise rows to float8 with a scale for 128 channels; scales are column-major in the last two dimensions."""
        groups = recv_x.float().unflatten(2, (-1, 128))
        scales = groups.abs().amax(-1).clamp(min=1e-4) / 448
        rows = (groups / scales.unsqueeze(-1)).flatten(2).to(torch.float8_e4m3fn)
        return rows, scales.transpose(1, 2).contiguous().transpose(1, 2)
