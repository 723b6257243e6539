"""`Parallel`: one rank's view of the layout and the groups that it belongs to.

tp           all ranks of the engine           inbox, token counts, experts
attn_tp      ranks that share a DP rank's tokens
attn_dp      one rank of each DP rank: those with the same attn_tp_rank
world        all ranks of the server           votes at a commit
weight_io    the same ranks, for the thread that receives weights
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch.distributed as dist

from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator
from rollout.distributed.layout import ParallelLayout, RankPosition

COLLECTIVE_TIMEOUT_S = 120.0


def _alone(name: str) -> Communicator:
    return Communicator(name, 0, 1)


@dataclass(frozen=True)
class Parallel:
    """Of one rank.  The default is an engine of one rank."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    position: RankPosition = field(default_factory=RankPosition)
    tp: Communicator = field(default_factory=lambda: _alone("tp"))
    attn_tp: Communicator = field(default_factory=lambda: _alone("attn_tp"))
    attn_dp: Communicator = field(default_factory=lambda: _alone("attn_dp"))
    world: Communicator = field(default_factory=lambda: _alone("world"))
    weight_io: Communicator = field(default_factory=lambda: _alone("weight_io"))

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        return self.tp, self.attn_tp, self.attn_dp, self.world, self.weight_io

    def require_whole(self) -> None:
        """Raise the `RankLostError` of a group that has failed, also if it was caught before."""
        for communicator in self.communicators:
            if communicator.broken is not None:
                raise communicator.broken


def join(
    layout: ParallelLayout,
    world_rank: int,
    store: dist.Store,
    *,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    weight_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    loopback: bool = True,
) -> Parallel:
    """Form all groups; every rank of the world calls this once with the same `store`.

    `weight_timeout_s`: deadline in `weight_io`, whose members may come as late as a bucket.  `loopback`: all ranks are
    on this machine.  Raises `StartupError` when the others do not come.
    """
    here = layout.position(world_rank)
    replica = [here.replica * layout.tp_size + rank for rank in range(layout.tp_size)]
    positions = [layout.position(rank) for rank in replica]
    world = list(range(layout.world_size))
    members = {
        "tp": replica,
        "attn_tp": [p.world_rank for p in positions if p.attn_dp_rank == here.attn_dp_rank],
        "attn_dp": [p.world_rank for p in positions if p.attn_tp_rank == here.attn_tp_rank],
        "world": world,
        "weight_io": world,
    }
    try:
        groups = {
            name: _communicator(
                name, ranks, world_rank, store, weight_timeout_s if name == "weight_io" else timeout_s, loopback
            )
            for name, ranks in members.items()
        }
    except RuntimeError as error:
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise StartupError(f"rank {world_rank} cannot reach the other ranks: {reason}") from error
    return Parallel(layout, here, **groups)


def _communicator(
    name: str, ranks: list[int], world_rank: int, store: dist.Store, timeout_s: float, loopback: bool
) -> Communicator:
    rank = ranks.index(world_rank)
    if len(ranks) == 1:
        return Communicator(name, 0, 1)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if loopback
        else dist.ProcessGroupGloo.create_default_device()
    ]
    prefix = f"{name}/" + ".".join(map(str, ranks))
    group = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, len(ranks), options)
    return Communicator(name, rank, len(ranks), group, timeout_s)  # type: ignore[arg-type]
