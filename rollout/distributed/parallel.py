"""`Parallel`: one rank's view of the layout and the groups that it belongs to.

tp           all ranks of the engine           inbox, token counts, experts
attn_tp      ranks that share a DP rank's tokens
attn_dp      one rank of each DP rank, all with the same attn_tp_rank
world        all ranks of the server           votes at a commit
weight_io    the same ranks, for the thread that receives weights

Tensors on the device travel within tp, attn_tp and attn_dp alone; the other two exchange words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator, DeviceEvent, PeerSums
from rollout.distributed.layout import ParallelLayout, RankPosition
from rollout.distributed.transport import Transport, gloo_transport

COLLECTIVE_TIMEOUT_S = 120.0
_HAVE_TENSORS = ("tp", "attn_tp", "attn_dp")

# Makes the transport of a group from its store, this rank in it, its size, and the seconds that a call may take.
MakeTransport = Callable[[dist.Store, int, int, float], Transport]
# Opens memory that the ranks of a group share; None on all of them where it cannot be shared.
ConnectPeers = Callable[[Communicator], PeerSums | None]


def _alone(name: str) -> Communicator:
    return Communicator(name, 0, 1)


@dataclass(frozen=True)
class Parallel:
    """The layout, position and communicators of one rank.  The default is an engine of one rank."""

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

    def wait_for(self, event: DeviceEvent) -> None:
        """Wait on the host until the device has passed `event`.  Raises `RankLostError` after a deadline."""
        self.tp.wait_for(event)

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
    device_transport: MakeTransport | None = None,
    connect_peers: ConnectPeers | None = None,
) -> Parallel:
    """Form all groups; every rank of the world calls this once with the same `store`.

    `weight_timeout_s`: deadline in `weight_io`, whose members may come as late as a bucket.  `loopback`: all ranks are
    on this machine.  `device_transport`: connects devices, where the model is not in host memory.  `connect_peers`:
    gives groups with devices memory for small sums.  Raises `StartupError` when the others do not come.
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
    host_transport = partial(gloo_transport, loopback=loopback)
    # By ranks: groups of the same ranks share a transport, and memory.
    on_devices: dict[tuple[int, ...], Transport] = {}
    in_memory: dict[tuple[int, ...], PeerSums | None] = {}

    def connected(kind: str, make: MakeTransport, ranks: list[int], seconds: float) -> Transport:
        name = f"{kind}/" + ".".join(map(str, ranks))
        return make(dist.PrefixStore(name, store), ranks.index(world_rank), len(ranks), seconds)

    def communicator(name: str, ranks: list[int]) -> Communicator:
        if len(ranks) == 1:
            return _alone(name)
        seconds = weight_timeout_s if name == "weight_io" else timeout_s
        host, device = connected(name, host_transport, ranks, seconds), None
        if device_transport is not None and name in _HAVE_TENSORS:
            if (key := tuple(ranks)) not in on_devices:
                on_devices[key] = connected(f"{name} on devices", device_transport, ranks, seconds)
            device = on_devices[key]
        made = Communicator(name, ranks.index(world_rank), len(ranks), host, device, seconds)
        if device is not None and connect_peers is not None:
            if (key := tuple(ranks)) not in in_memory:
                in_memory[key] = connect_peers(made)
            made.peers = in_memory[key]
        return made

    try:
        groups = {name: communicator(name, ranks) for name, ranks in members.items()}
    except RuntimeError as error:
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise StartupError(f"rank {world_rank} cannot reach the other ranks: {reason}") from error
    return Parallel(layout, here, **groups)
