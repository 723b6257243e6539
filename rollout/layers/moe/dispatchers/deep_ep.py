"""Tokens travel through DeepEP's buffers, between the GPUs of expert-parallel ranks.

The CUDA path has not been run: there was no GPU with `deep_ep` to run it on.  It is written to the interface of
`deep_ep.Buffer` in DeepEP 1.2.1 and 2.1.0, and its contract tests run against a stand-in of the package on a CPU
(`tests/deepep_stand_in.py`).

    mode          a row is                          weights are applied by   rows of a rank come
    normal        a token, once for each rank       the experts              by source rank, then by token
    low-latency   a token, once for each expert     combine                  in any order

In normal mode the experts' sum over a token's slots on one rank is rounded to bfloat16, then the ranks'
sums are added in float32 in rank order and rounded once more; low-latency mode adds weighted outputs in float32 in the
order of the K choices and rounds once.  So the last bits differ from one rank's, and from mode to mode.

Waits end by deep_ep's own time-outs: 100 s on the device, up to 300 s on the host.

Shapes: T tokens of this rank, D hidden, K top-k, R rows received, S slots of a row, G ranks, P physical experts on all
ranks, C = P / G on this one, M most tokens of a rank.  Physical expert p is local expert p % C of rank p // C.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator
from rollout.layers.moe.dispatchers.base import Dispatcher, DispatchOutput
from rollout.layers.moe.dispatchers.deep_ep_library import (
    DeepEpApi,
    DeepEpShape,
    choose_api,
    has_rdma_device,
    make_buffer,
)

logger = logging.getLogger(__name__)


class NormalMode:
    """`Buffer.dispatch`: high throughput.

    Modes take contiguous bfloat16 hidden states, ids of the package's type and float32 weights, and give back
    [T, D] bfloat16.  A handle is read by the mode that made it.
    """

    def __init__(self, buffer: Any, shape: DeepEpShape) -> None:
        self.buffer, self.shape = buffer, shape

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
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
        return DispatchOutput(received_RD, local_ids_RK.long(), weights_RK, handle, has_holes=True)

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        combined_TD, _, _ = self.buffer.combine(x=expert_out.contiguous(), handle=handle)
        return combined_TD


class LowLatencyMode:
    """`Buffer.low_latency_dispatch`: at most M tokens a rank, results [C, G * M, D] of which the first rows are real.

    local expert 0   [ row row row  .   .   . ]     G * M places, recv_count of them filled,
    local expert 1   [ row  .   .   .   .   . ]     the rest is uninitialized
    """

    def __init__(self, buffer: Any, shape: DeepEpShape) -> None:
        self.buffer, self.shape = buffer, shape

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        packed_CND, counts_C, handle, _, _ = self.buffer.low_latency_dispatch(
            x=hidden_TD,
            topk_idx=ids_TK,
            num_max_dispatch_tokens_per_rank=self.shape.low_latency_tokens,
            num_experts=self.shape.num_physical_experts,
            use_fp8=False,
        )
        num_places = packed_CND.shape[1]
        is_row_CN = torch.arange(num_places, device=packed_CND.device) < counts_C.unsqueeze(1)
        rows_R = is_row_CN.flatten().nonzero().squeeze(1)
        # A copy: what arrived lies in one of two buffers that the next calls write to.
        received_RD = packed_CND.flatten(0, 1).index_select(0, rows_R)
        local_ids_RS = (rows_R // num_places).unsqueeze(1)
        return DispatchOutput(received_RD, local_ids_RS, None, (handle, ids_TK, weights_TK, rows_R, num_places))

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        packed_handle, ids_TK, weights_TK, rows_R, num_places = handle
        local_experts, hidden_size = self.shape.slots_per_rank, self.shape.hidden_size
        packed = expert_out.new_empty(local_experts * num_places, hidden_size)
        packed.index_copy_(0, rows_R, expert_out.squeeze(1))
        combined_TD, _, _ = self.buffer.low_latency_combine(
            x=packed.view(local_experts, num_places, hidden_size),
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            handle=packed_handle,
        )
        return combined_TD


Mode = NormalMode | LowLatencyMode


class DeepEpDispatcher(Dispatcher):
    """bfloat16 only.  Without a planned step it uses the mode that takes every batch.

    `library` is what `require_deep_ep` returned.  `communicator` joins the ranks among which the experts are spread, in
    their order.  `has_rdma`: this rank has an RDMA device; None: look for one.  All ranks make theirs together.

    Raises `StartupError` when the package cannot carry `shape` or cannot set its buffer up.
    """

    scatters_tokens = True
    normal_mode: type[NormalMode] = NormalMode
    low_latency_mode: type[LowLatencyMode] = LowLatencyMode

    def __init__(
        self,
        library: Any,
        communicator: Communicator,
        shape: DeepEpShape,
        has_rdma: bool | None = None,
    ) -> None:
        assert communicator.size == shape.num_ranks
        self.shape = shape
        everywhere = communicator.all_agree(has_rdma_device() if has_rdma is None else has_rdma)
        self.api, objections = choose_api(library, shape, has_rdma=everywhere)
        if len(set(communicator.gather_bytes(self.api.value.encode()))) > 1:
            raise StartupError("--moe-a2a-backend deepep needs the same release of deep_ep on all ranks")
        if objections:
            logger.info("deep_ep: %s (%s)", self.api.value, "; ".join(objections))
        self._ids_dtype: torch.dtype = getattr(library, "topk_idx_t", torch.int64)
        low_latency = self.api is DeepEpApi.NORMAL_AND_LOW_LATENCY
        try:
            self._buffer = make_buffer(library, shape, communicator, low_latency)
        except Exception as error:
            reason = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
            raise StartupError(
                f"deep_ep cannot set up {self.api.value}: {reason}; all_to_all needs none of it"
            ) from error
        self._low_latency = self.low_latency_mode(self._buffer, shape) if low_latency else None
        self._normal = self.normal_mode(self._buffer, shape)
        self._mode: Mode = self._normal
        self._max_tokens = shape.max_tokens_per_rank
        self._needs_cleaning = False

    def order_of_sums(self, has_replicas: bool) -> str | None:
        return "the size of a step picks the mode of deep_ep, and modes add in different orders"

    def plan_step(self, tokens_by_rank: Sequence[int]) -> None:
        """Low-latency mode for steps in which no rank brings more tokens than it takes.

        Ranks in different modes would wait for each other, so what a rank itself brings cannot choose.
        """
        self._max_tokens = max(tokens_by_rank)
        assert self._max_tokens <= self.shape.max_tokens_per_rank
        fits = self._max_tokens <= self.shape.low_latency_tokens
        self._mode = self._low_latency if self._low_latency is not None and fits else self._normal

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        """Ids of -1 choose nothing."""
        assert hidden_TD.shape[0] <= self._max_tokens, "more tokens than the step was planned for"
        mode = self._mode
        if mode is self._low_latency:
            self._clean()
        else:
            self._needs_cleaning = True
        work = mode.dispatch(
            hidden_TD.contiguous(), physical_ids_TK.to(self._ids_dtype).contiguous(), weights_TK.float().contiguous()
        )
        work.handle = mode, work.handle
        return work

    def combine(self, expert_out: torch.Tensor, handle: tuple[Mode, Any]) -> torch.Tensor:
        mode, inner = handle
        return mode.combine(expert_out, inner)

    def close(self) -> None:
        """Give the buffers back; on all ranks."""
        self._buffer.destroy()

    def _clean(self) -> None:
        """Low-latency kernels need zeros where normal mode may have written."""
        if self._needs_cleaning:
            shape = self.shape
            self._buffer.clean_low_latency_buffer(
                shape.low_latency_tokens, shape.hidden_size, shape.num_physical_experts
            )
            self._needs_cleaning = False
