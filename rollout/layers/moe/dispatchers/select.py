"""Which dispatcher a model gets, and how many tokens each rank brings to it.

A dispatcher is a file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.core.errors import StartupError
from rollout.distributed.communicator import share_sizes
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from rollout.layers.moe.dispatchers.base import Dispatcher
from rollout.layers.moe.dispatchers.local import LocalDispatcher
from rollout.layers.moe.dispatchers.none import AllTokensDispatcher

# --moe-a2a-backend -> made of the rank's view and the number of physical experts of a layer
DISPATCHERS: dict[str, Callable[[Parallel, int], Dispatcher]] = {
    "none": AllTokensDispatcher,
    "all_to_all": AllToAllDispatcher,
}


def select_dispatcher(name: str, parallel: Parallel, num_physical_experts: int) -> Dispatcher:
    """One for all MoE layers of a rank.  With one rank nothing moves, whatever the name.

    Raises `StartupError` for a name that is not registered, and what the dispatcher raises.
    """
    if name not in DISPATCHERS:
        raise StartupError(f"--moe-a2a-backend {name!r} is not known; choose from {', '.join(DISPATCHERS)}")
    if parallel.layout.tp_size == 1:
        return LocalDispatcher()
    return DISPATCHERS[name](parallel, num_physical_experts)


def tokens_by_rank(layout: ParallelLayout, tokens_by_dp_rank: Sequence[int], *, scattered: bool) -> list[int]:
    """What each rank of the engine brings to a MoE layer: its attention-DP rank's tokens, or its share of them."""
    size = layout.attn_tp_size
    shares = [share_sizes(tokens, size) if scattered else [tokens] * size for tokens in tokens_by_dp_rank]
    return [tokens for of_dp_rank in shares for tokens in of_dp_rank]
