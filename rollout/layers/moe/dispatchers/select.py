"""The choice of a model's dispatcher, and the number of tokens that each rank brings to it.

A dispatcher is a file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollout.core.errors import StartupError
from rollout.distributed.communicator import share_sizes
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from rollout.layers.moe.dispatchers.all_tokens import AllTokensDispatcher
from rollout.layers.moe.dispatchers.base import Dispatcher, LocalDispatcher
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher
from rollout.layers.moe.dispatchers.deep_ep_library import DeepEpModeName, DeepEpShape, require_deep_ep


@dataclass(frozen=True)
class MoeBackend:
    """The settings of the dispatcher.  `max_step_tokens` limits the tokens of one attention-DP rank in a step."""

    name: str = "none"
    max_step_tokens: int = 16384
    deepep_mode: DeepEpModeName = "auto"


@dataclass(frozen=True, kw_only=True)
class DispatcherNeeds:
    """The inputs that a dispatcher is made from: sizes of the model, and this rank."""

    parallel: Parallel
    backend: MoeBackend
    num_physical_experts: int  # experts of a layer, on all ranks
    hidden_size: int
    top_k: int
    dtype: torch.dtype
    device: torch.device


def _deepep(needs: DispatcherNeeds) -> Dispatcher:
    layout = needs.parallel.layout
    shape = DeepEpShape(
        hidden_size=needs.hidden_size,
        num_physical_experts=needs.num_physical_experts,
        top_k=needs.top_k,
        dtype=needs.dtype,
        num_ranks=layout.tp_size,
        max_tokens_per_rank=-(-needs.backend.max_step_tokens // layout.attn_tp_size),
        mode=needs.backend.deepep_mode,
    )
    return DeepEpDispatcher(require_deep_ep(needs.device), needs.parallel.tp, shape)


# --moe-a2a-backend -> its dispatcher
DISPATCHERS: dict[str, Callable[[DispatcherNeeds], Dispatcher]] = {
    "none": lambda needs: AllTokensDispatcher(needs.parallel, needs.num_physical_experts),
    "all_to_all": lambda needs: AllToAllDispatcher(needs.parallel, needs.num_physical_experts, needs.device),
    "deepep": _deepep,
}


def select_dispatcher(needs: DispatcherNeeds) -> Dispatcher:
    """Select the dispatcher of all MoE layers of a rank.  With one rank nothing moves, under any name.

    Raises `StartupError` for a name that is not registered or that this machine does not have, and the errors of the
    dispatcher.
    """
    name = needs.backend.name
    if name not in DISPATCHERS:
        raise StartupError(f"--moe-a2a-backend {name!r} is not known; choose from {', '.join(DISPATCHERS)}")
    if name == "deepep":
        require_deep_ep(needs.device)
    if needs.parallel.layout.tp_size == 1:
        return LocalDispatcher()
    return DISPATCHERS[name](needs)


def tokens_by_rank(layout: ParallelLayout, tokens_by_dp_rank: Sequence[int], *, scattered: bool) -> list[int]:
    """Return the tokens that each rank brings to a MoE layer: its attention-DP rank's, or its share of them."""
    size = layout.attn_tp_size
    shares = [share_sizes(tokens, size) if scattered else [tokens] * size for tokens in tokens_by_dp_rank]
    return [tokens for of_dp_rank in shares for tokens in of_dp_rank]
