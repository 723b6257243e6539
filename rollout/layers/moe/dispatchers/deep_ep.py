"""Tokens travel through DeepEP's buffers, between the GPUs of expert-parallel ranks.

The CUDA path has not been run: there was no GPU with `deep_ep` to run it on.  It is written to the interfaces of
`deep_ep.Buffer` in DeepEP 1.2.1 and 2.1.0 and of `deep_ep.ElasticBuffer` in 2.1.0.  Its contract tests run against a
stand-in of the package on a CPU (`tests/deepep_stand_in.py`).

    --deepep-mode   steps of at most M tokens a rank        larger steps
    auto            low-latency, or elastic of fixed rows   normal, or elastic
    normal          normal, or elastic                      the same
    low_latency     low-latency, or elastic of fixed rows   there are none

`deep_ep_modes` describes the modes.  In normal and elastic mode the experts' sum over a token's slots on one rank is
rounded to bfloat16.  The ranks' sums are then added in float32 and rounded once more.  Low-latency mode adds weighted
outputs in float32 in the order of the K choices and rounds once.  So the last bits differ from the bits that one rank
computes, and between low-latency and normal mode.

Waits end by deep_ep's own time-outs: 100 s on the device, up to 300 s on the host.

Shapes: T tokens of this rank, D hidden, K top-k.
"""

from __future__ import annotations

import logging
import os
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
    shows_communicator,
)
from rollout.layers.moe.dispatchers.deep_ep_modes import (
    DeepEpMode,
    ElasticMode,
    FixedElasticMode,
    LowLatencyMode,
    NormalMode,
)

logger = logging.getLogger(__name__)


class DeepEpDispatcher(Dispatcher):
    """The dispatcher through DeepEP, for bfloat16.  Without a planned step it uses the mode that takes every batch.

    `library` comes from `require_deep_ep`.  `communicator` joins the ranks among which the experts are spread, in their
    order.  `has_rdma`: this rank has an RDMA device; None: look for one.  All ranks make their dispatchers together.

    Raises `StartupError` when the package cannot carry `shape` or cannot set its buffer up.
    """

    scatters_tokens = True
    # The mode for any step, and the mode for steps of few tokens.
    modes: dict[DeepEpApi, tuple[type[DeepEpMode] | None, type[DeepEpMode] | None]] = {
        DeepEpApi.ELASTIC: (ElasticMode, FixedElasticMode),
        DeepEpApi.NORMAL_AND_LOW_LATENCY: (NormalMode, LowLatencyMode),
        DeepEpApi.NORMAL: (NormalMode, None),
        DeepEpApi.LOW_LATENCY: (None, LowLatencyMode),
    }

    def __init__(
        self,
        library: Any,
        communicator: Communicator,
        shape: DeepEpShape,
        has_rdma: bool | None = None,
    ) -> None:
        assert communicator.size == shape.num_ranks
        self.shape = shape
        self.api = _agreed_api(library, communicator, shape, has_rdma_device() if has_rdma is None else has_rdma)
        self._ids_dtype: torch.dtype = getattr(library, "topk_idx_t", torch.int64)
        try:
            self._buffer = make_buffer(library, self.api, shape, communicator)
        except Exception as error:
            reason = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
            raise StartupError(
                f"deep_ep cannot set up {self.api.value}: {reason}; all_to_all needs none of it"
            ) from error
        for_any, for_few = self.modes[self.api]
        if shape.mode == "normal":
            for_few = None
        if shape.mode == "low_latency":
            for_any = None
        made = [None if mode is None else mode(self._buffer, shape, communicator) for mode in (for_any, for_few)]
        self._for_any, self._for_few = made
        self._max_tokens = shape.max_tokens_per_rank
        self._all_tokens: int | None = None  # of all ranks, in the planned step
        self._needs_cleaning = False
        self._mode = self._mode_for(self._max_tokens)

    def capture_obstacle(self, tokens_by_rank: Sequence[int]) -> str | None:
        if self._mode_for(max(tokens_by_rank)).has_fixed_rows:
            return None
        return f"deep_ep waits on the host for the number of rows, in steps of {max(tokens_by_rank)} tokens a rank"

    def order_of_sums(self, has_replicas: bool) -> str | None:
        if self.api is DeepEpApi.NORMAL_AND_LOW_LATENCY and self._for_any and self._for_few:
            return "the size of a step picks the mode of deep_ep, and modes add in different orders"
        if self.api is DeepEpApi.LOW_LATENCY or not has_replicas:
            return None
        return "expert outputs are added rank by rank, and a token's row in the batch picks among replicas on ranks"

    def plan_step(self, tokens_by_rank: Sequence[int]) -> None:
        """Choose the mode for few tokens if no rank brings more than it takes.

        Ranks in different modes would wait for each other, so each rank chooses by the tokens of all ranks.  The buffer
        is cleaned here, where no graph is captured: a replayed `dispatch` runs nothing on the host.
        """
        self._max_tokens, self._all_tokens = max(tokens_by_rank), sum(tokens_by_rank)
        assert self._max_tokens <= self.shape.max_tokens_per_rank
        self._mode = self._mode_for(self._max_tokens)
        if isinstance(self._mode, LowLatencyMode):
            self._clean()

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapters_T: torch.Tensor | None = None,
    ) -> DispatchOutput:
        """Send tokens to the ranks that hold their experts.  An id of -1 chooses no expert.

        A rank expects its share of the choices of all ranks, or without a planned step as many as it sends.
        """
        assert hidden_TD.shape[0] <= self._max_tokens, "more tokens than the step was planned for"
        mode = self._mode
        self._needs_cleaning |= isinstance(mode, NormalMode)
        sent = (
            hidden_TD.contiguous(),
            physical_ids_TK.to(self._ids_dtype).contiguous(),
            weights_TK.float().contiguous(),
        )
        work = mode.dispatch(*sent) if adapters_T is None else mode.dispatch_adapted(*sent, adapters_T)
        work.handle = mode, work.handle
        all_tokens = len(hidden_TD) * self.shape.num_ranks if self._all_tokens is None else self._all_tokens
        work.expected = all_tokens * physical_ids_TK.shape[1] // self.shape.num_ranks
        return work

    def combine(self, expert_out: torch.Tensor, handle: tuple[DeepEpMode, Any]) -> torch.Tensor:
        mode, inner = handle
        return mode.combine(expert_out, inner)

    def close(self) -> None:
        """Give the buffers back; on all ranks."""
        self._buffer.destroy()

    def _mode_for(self, max_tokens: int) -> DeepEpMode:
        few = self._for_few is not None and max_tokens <= self.shape.low_latency_tokens
        mode = self._for_few if few else self._for_any
        assert mode is not None
        return mode

    def _clean(self) -> None:
        """Clear the buffer where normal mode may have written, because low-latency kernels need zeros there."""
        if self._needs_cleaning:
            shape = self.shape
            self._buffer.clean_low_latency_buffer(
                shape.low_latency_tokens, shape.hidden_size, shape.num_physical_experts
            )
            self._needs_cleaning = False


def _agreed_api(library: Any, communicator: Communicator, shape: DeepEpShape, has_rdma: bool) -> DeepEpApi:
    """Choose the best API that works on all ranks.  Raises `StartupError` for none, or for different releases."""
    starts_networks = has_rdma or os.environ.get("EP_DISABLE_GIN") == "1"  # NCCL's networks, from the device
    api, objections = choose_api(
        library,
        shape,
        has_rdma=communicator.all_agree(has_rdma),
        has_elastic_group=communicator.all_agree(starts_networks and shows_communicator(communicator)),
    )
    if len(set(communicator.gather_bytes(api.value.encode()))) > 1:
        raise StartupError("--moe-a2a-backend deepep needs the same release of deep_ep on all ranks")
    if objections:
        logger.info("deep_ep: %s (%s)", api.value, "; ".join(objections))
    return api
