"""The ways in which `deep_ep` carries tokens, each as a dispatch and a combine.

    mode          buffer          rows R                     a row is                       sum of a token
    normal        Buffer          as many as came            a token, once for each rank    over ranks, ascending
    low-latency   Buffer          C * G * M, mostly empty    a token, once for each expert  over its K choices
    elastic       ElasticBuffer   as many as came, or G * M  a token, once for each rank    over ranks

Where rows are as many as came, the host waits for their number.  Where their number is fixed it does not wait, and the
step can be captured in a CUDA graph; empty rows have ids of -1.

All modes take contiguous bfloat16 hidden states, ids of the package's type and float32 weights.  They return [T, D]
bfloat16.  A handle is read by the mode that made it.

Slots of adapters cost nothing on the wire where weights travel: a bfloat16 weight sent as float32 has 16 bits of
zeros, and the lower 15 of them bring the slot, counted from 1.  They change no weight, as it is rounded to bfloat16
again.  In low-latency mode no weights travel.  There all ranks gather the slots of all tokens, and the handle tells
which rank and token a row is of.

Shapes: T tokens of this rank, D hidden, K top-k, R rows, S slots of a row, G ranks, P physical experts on all ranks,
C = P / G on this one, M most tokens of a rank, N = G * M.  Physical expert p is local expert p % C of rank p // C.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from rollout.distributed.communicator import Communicator
from rollout.layers.moe.dispatchers.base import DispatchOutput, PackedRows
from rollout.layers.moe.dispatchers.deep_ep_library import DeepEpShape

_SLOT_BITS = 0x7FFF


class DeepEpMode(ABC):
    """A way to carry tokens over `buffer`, which the modes of a rank share."""

    has_fixed_rows = False  # whether the number of rows depends on `shape` alone

    def __init__(self, buffer: Any, shape: DeepEpShape, communicator: Communicator) -> None:
        self.buffer, self.shape, self.communicator = buffer, shape, communicator

    @abstractmethod
    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        """Send tokens to the ranks that hold their experts.  An id of -1 chooses no expert."""

    @abstractmethod
    def dispatch_adapted(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, adapters_T: torch.Tensor
    ) -> DispatchOutput:
        """Send tokens with the slots of their adapters int64, -1 for none; on all ranks or on none."""

    @abstractmethod
    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        """Bring expert outputs back, and return the sums of this rank's tokens [T, D]."""


def _with_slots(weights_TK: torch.Tensor, adapters_T: torch.Tensor) -> torch.Tensor:
    """Return weights that bfloat16 holds with the slots in bits that it does not have."""
    bits_TK = weights_TK.to(torch.bfloat16).float().view(torch.int32)
    return (bits_TK | (adapters_T + 1).to(torch.int32).unsqueeze(1)).view(torch.float32)


def _slots_in(weights_RK: torch.Tensor, ids_RK: torch.Tensor) -> torch.Tensor:
    """Return the slots [R] int64 that came in the weights of this rank's choices; -1 for rows without any."""
    slots_RK = (weights_RK.view(torch.int32) & _SLOT_BITS).long() - 1
    return slots_RK.masked_fill(ids_RK < 0, -1).amax(dim=1)


class RowMode(DeepEpMode):
    """Base of the modes whose rows come with float32 weights for the experts to apply."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        return self._dispatched(hidden_TD, ids_TK, weights_TK)[0]

    def dispatch_adapted(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, adapters_T: torch.Tensor
    ) -> DispatchOutput:
        work, received_RK = self._dispatched(hidden_TD, ids_TK, _with_slots(weights_TK, adapters_T))
        work.adapters_R = _slots_in(received_RK, work.ids_RS)
        return work

    @abstractmethod
    def _dispatched(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[DispatchOutput, torch.Tensor]:
        """Send tokens; return the work, and the weights [R, K] as they came."""


class NormalMode(RowMode):
    """`Buffer.dispatch`: the experts apply the weights, and round a token's sum on a rank to bfloat16."""

    def _dispatched(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[DispatchOutput, torch.Tensor]:
        counts_G, counts_of_nodes, counts_P, is_token_in_rank_TG, _ = self.buffer.get_dispatch_layout(
            topk_idx=ids_TK, num_experts=self.shape.num_physical_experts
        )
        received_RD, local_ids_RK, received_weights_RK, _, handle, _ = self.buffer.dispatch(
            x=hidden_TD,
            num_tokens_per_rank=counts_G,
            num_tokens_per_rdma_rank=counts_of_nodes,
            is_token_in_rank=is_token_in_rank_TG,
            num_tokens_per_expert=counts_P,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
        )
        # Choices of other ranks arrive with id -1 and weight 0.
        weights_RK = received_weights_RK.to(received_RD.dtype)
        work = DispatchOutput(received_RD, local_ids_RK.long(), weights_RK, handle, has_holes=True)
        return work, received_weights_RK

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        combined_TD: torch.Tensor
        combined_TD, _, _ = self.buffer.combine(x=expert_out.contiguous(), handle=handle)
        return combined_TD


class LowLatencyMode(DeepEpMode):
    """`Buffer.low_latency_dispatch`: `combine` applies the weights to the outputs of the experts.

    local expert 0   [ row row row  .   .   . ]     N places, recv_count of them filled in any order,
    local expert 1   [ row  .   .   .   .   . ]     the rest is uninitialized

    The rows lie in one of two buffers, which the call after the next overwrites: experts read them before `combine`.
    """

    has_fixed_rows = True

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        packed_CND, counts_C, handle, _, _ = self.buffer.low_latency_dispatch(
            x=hidden_TD,
            topk_idx=ids_TK,
            num_max_dispatch_tokens_per_rank=self.shape.low_latency_tokens,
            num_experts=self.shape.num_physical_experts,
            use_fp8=False,
        )
        rows_RD, packed = packed_CND.flatten(0, 1), PackedRows(counts_C)
        return DispatchOutput(rows_RD, None, None, (handle, ids_TK, weights_TK), has_holes=True, packed=packed)

    def dispatch_adapted(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, adapters_T: torch.Tensor
    ) -> DispatchOutput:
        most = self.shape.low_latency_tokens
        mine_M = torch.full((most,), -1, device=adapters_T.device)
        mine_M[: adapters_T.shape[0]] = adapters_T
        all_A = self.communicator.all_gather(mine_M).flatten()  # A = G * M tokens of all ranks
        work = self.dispatch(hidden_TD, ids_TK, weights_TK)
        tokens_CN, layout_CG = work.handle[0][:2]
        starts_CG, counts_CG = layout_CG >> 32, layout_CG & 0xFFFFFFFF
        places_N = torch.arange(tokens_CN.shape[1], device=tokens_CN.device)
        after_CGN = places_N - starts_CG.unsqueeze(2)
        is_of_rank_CGN = (after_CGN >= 0) & (after_CGN < counts_CG.unsqueeze(2))
        tokens_CN = is_of_rank_CGN.int().argmax(dim=1) * most + tokens_CN.long()
        is_row_CN = is_of_rank_CGN.any(dim=1)  # other places hold nothing that may be read
        slots_CN = all_A[tokens_CN.masked_fill(~is_row_CN, 0)].masked_fill(~is_row_CN, -1)
        work.adapters_R = slots_CN.flatten()
        return work

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        packed_handle, ids_TK, weights_TK = handle
        combined_TD: torch.Tensor
        combined_TD, _, _ = self.buffer.low_latency_combine(
            x=expert_out.reshape(self.shape.slots_per_rank, -1, self.shape.hidden_size),
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            handle=packed_handle,
        )
        return combined_TD


class ElasticMode(RowMode):
    """`ElasticBuffer.dispatch` for any number of tokens; the host waits for the number of rows.

    The experts apply the weights, as in normal mode.  The buffer is deterministic: rows come by source rank, then by
    token.
    """

    def _dispatched(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[DispatchOutput, torch.Tensor]:
        received_RD, local_ids_RK, received_weights_RK, handle, _ = self.buffer.dispatch(
            x=hidden_TD,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_experts=self.shape.num_physical_experts,
            num_max_tokens_per_rank=self._max_tokens,
            do_cpu_sync=not self.has_fixed_rows,
        )
        ids_RK = local_ids_RK.long()
        if self.has_fixed_rows:
            count = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            rows_R1 = torch.arange(ids_RK.shape[0], device=ids_RK.device).unsqueeze(1)
            ids_RK = ids_RK.masked_fill(rows_R1 >= count, -1)
        # Weights come as they were given, also for choices of other ranks.
        weights_RK = received_weights_RK.masked_fill(ids_RK < 0, 0.0).to(received_RD.dtype)
        return DispatchOutput(received_RD, ids_RK, weights_RK, handle, has_holes=True), received_weights_RK

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        combined_TD: torch.Tensor
        combined_TD, _, _ = self.buffer.combine(x=expert_out.contiguous(), handle=handle)
        return combined_TD

    @property
    def _max_tokens(self) -> int:
        return self.shape.max_tokens_per_rank


class FixedElasticMode(ElasticMode):
    """Elastic mode for few tokens, with a fixed number of rows N, of which the first ones are filled."""

    has_fixed_rows = True

    @property
    def _max_tokens(self) -> int:
        return self.shape.low_latency_tokens
