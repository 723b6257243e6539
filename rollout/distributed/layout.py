"""`ParallelLayout`: the groups of each rank, as arithmetic on rank numbers.

world     every worker process of the server: `num_replicas` engines of `tp_size` ranks each
replica   one engine: its ranks step together and share the experts; several replicas exist only without DP attention
attention within a replica, rank = attn_dp_rank * attn_tp_size + attn_tp_rank
experts   within a replica, rank = ep_rank * moe_tp_size + moe_tp_rank

tp_size 4, DP attention, dp_size 2, ep_size 2        rank 0     rank 1     rank 2     rank 3
                                 attention dp.tp      0.0        0.1        1.0        1.1
                                 experts   ep.tp      0.0        0.1        1.0        1.1
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError

MAX_RANKS = 64  # of a server, with all its replicas


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes as on the command line.  Raises `StartupError` for sizes that do not divide."""

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    enable_dp_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size", "ep_size"):
            if getattr(self, name) < 1:
                raise StartupError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.world_size > MAX_RANKS:
            raise StartupError(
                f"--tp-size {self.tp_size} --dp-size {self.dp_size} need {self.world_size} ranks; a server has at most "
                f"{MAX_RANKS}"
            )
        if self.tp_size % self.ep_size:
            raise StartupError(f"--ep-size {self.ep_size} does not divide --tp-size {self.tp_size}")
        if self.enable_dp_attention and self.tp_size % self.dp_size:
            raise StartupError(
                f"--dp-size {self.dp_size} does not divide --tp-size {self.tp_size}. With --enable-dp-attention "
                "the attention of an engine is split into dp-size groups of tp-size / dp-size ranks."
            )

    @property
    def num_replicas(self) -> int:
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def world_size(self) -> int:
        return self.num_replicas * self.tp_size

    @property
    def attn_dp_size(self) -> int:
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def attn_tp_size(self) -> int:
        return self.tp_size // self.attn_dp_size

    @property
    def moe_tp_size(self) -> int:
        return self.tp_size // self.ep_size

    def position(self, world_rank: int) -> RankPosition:
        replica, tp_rank = divmod(world_rank, self.tp_size)
        attn_dp_rank, attn_tp_rank = divmod(tp_rank, self.attn_tp_size)
        ep_rank, moe_tp_rank = divmod(tp_rank, self.moe_tp_size)
        return RankPosition(world_rank, replica, tp_rank, attn_dp_rank, attn_tp_rank, ep_rank, moe_tp_rank)


@dataclass(frozen=True)
class RankPosition:
    """The place of one rank in the layout.  `tp_rank` is its rank in the replica."""

    world_rank: int = 0
    replica: int = 0
    tp_rank: int = 0
    attn_dp_rank: int = 0
    attn_tp_rank: int = 0
    ep_rank: int = 0
    moe_tp_rank: int = 0

    @property
    def is_tp_leader(self) -> bool:
        """True for the rank that receives the main process's messages for its replica."""
        return self.tp_rank == 0

    @property
    def dp_rank(self) -> int:
        """Its data-parallel rank: of attention groups, or else of independent engines."""
        return max(self.attn_dp_rank, self.replica)

    @property
    def is_dp_leader(self) -> bool:
        """True for the ranks that send results to the main process: the first attention-TP rank of each DP rank."""
        return self.attn_tp_rank == 0


def layout_of(args: ServerArgs) -> ParallelLayout:
    """Return the layout that the settings ask for.  Raises `StartupError` in one line."""
    layout = ParallelLayout(args.tp_size, args.dp_size, args.ep_size, args.enable_dp_attention)
    if layout.world_size % args.nnodes:
        raise StartupError(f"--nnodes {args.nnodes} does not divide the {layout.world_size} ranks")
    if args.nnodes > 1 and layout.num_replicas > 1:
        raise StartupError(
            "--dp-size without --enable-dp-attention runs independent engines on one machine: "
            "start a server on each machine instead of --nnodes"
        )
    if args.moe_a2a_backend != "none" and args.ep_size != args.tp_size:
        raise StartupError(
            f"--moe-a2a-backend {args.moe_a2a_backend} sends tokens to whole experts, so it needs --ep-size equal to "
            f"--tp-size, got {args.ep_size} and {args.tp_size}"
        )
    return layout
