"""Each (token, expert) pair goes to the rank that holds the expert, and its output comes back.

    counts        how many pairs every rank sends to every rank; the only thing that the host waits for
    there         [hidden | local expert | adapter] of each pair, by rank, in the order of tokens and their choices
    back          the unweighted output of each pair, the same way

A token's sum runs at home, in the order of its K choices, as on one rank.

Shapes: T tokens of this rank, D hidden, K top-k, G ranks, A = T * K pairs, R pairs that this rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.core.errors import StartupError
from rollout.distributed.communicator import pack_rows, unpack_rows
from rollout.distributed.parallel import Parallel
from rollout.kernels.operators.fused_experts import weighted_sum
from rollout.layers.moe.dispatchers.base import Dispatcher, DispatchOutput, adapters_of_rows


@dataclass(frozen=True, slots=True)
class _Sent:
    """The destinations of pairs: `order_A` are flat (token, choice) indices in the order in which they were sent."""

    weights_TK: torch.Tensor
    order_A: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]


class AllToAllDispatcher(Dispatcher):
    """Slots are P / tp_size on each rank.  Raises `StartupError` where ranks split experts between them."""

    scatters_tokens = True

    def __init__(self, parallel: Parallel, num_physical_experts: int, device: torch.device | str = "cpu") -> None:
        layout = parallel.layout
        if layout.ep_size != layout.tp_size:
            raise StartupError(
                f"--moe-a2a-backend all_to_all sends tokens to whole experts: it needs --ep-size equal to --tp-size, "
                f"got {layout.ep_size} and {layout.tp_size}"
            )
        self._tp = parallel.tp
        self._ranks_G = torch.arange(layout.ep_size, device=device)
        self._num_local_experts = num_physical_experts // layout.ep_size

    def capture_obstacle(self, tokens_by_rank: Sequence[int]) -> str | None:
        return "the all_to_all dispatcher waits for the counts of all ranks in each layer"

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapters_T: torch.Tensor | None = None,
    ) -> DispatchOutput:
        ids_A = physical_ids_TK.flatten()
        ranks_A = ids_A // self._num_local_experts
        order_A = ranks_A.argsort(stable=True)
        # bincount would read its largest value on the host first.  The host waits once, for the counts of all ranks.
        to_each_G = (ranks_A.unsqueeze(1) == self._ranks_G).sum(dim=0)
        counts_GG = self._tp.all_gather(to_each_G).tolist()
        send_counts, receive_counts = counts_GG[self._tp.rank], [counts[self._tp.rank] for counts in counts_GG]
        local_ids_A1 = (ids_A % self._num_local_experts).index_select(0, order_A).to(torch.int32).unsqueeze(1)
        tokens_A = order_A // physical_ids_TK.shape[1]
        sent = [hidden_TD.index_select(0, tokens_A), local_ids_A1]
        if adapters_T is not None:
            sent.append(adapters_T.index_select(0, tokens_A).unsqueeze(1))
        received = self._tp.all_to_all(pack_rows(sent), send_counts, receive_counts)
        hidden_RD, local_ids_R1, *adapters_R1 = unpack_rows(received, sent)
        handle = _Sent(weights_TK, order_A, send_counts, receive_counts)
        return DispatchOutput(hidden_RD, local_ids_R1.long(), None, handle, adapters_R=adapters_of_rows(adapters_R1))

    def combine(self, expert_out: torch.Tensor, handle: _Sent) -> torch.Tensor:
        back_AD = self._tp.all_to_all(expert_out.squeeze(1), handle.receive_counts, handle.send_counts)
        out_AD = torch.empty_like(back_AD).index_copy_(0, handle.order_A, back_AD)
        num_tokens, top_k = handle.weights_TK.shape
        return weighted_sum(out_AD.view(num_tokens, top_k, out_AD.shape[-1]), handle.weights_TK)
