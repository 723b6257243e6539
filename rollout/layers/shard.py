"""`Shard`: the part of a layer's features, heads or rows that this rank has; and the rule for attention heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import AttentionSpec, GatedDeltaSpec, LatentAttentionSpec
from rollout.distributed.communicator import share_sizes
from rollout.distributed.parallel import Parallel


@dataclass(frozen=True)
class Shard:
    """A rank's part: `length` of `total`, from `start` on; with `sections`, the same share of each of them."""

    total: int
    start: int
    length: int
    sections: tuple[int, ...] = ()

    @classmethod
    def whole(cls, total: int) -> Shard:
        return cls(total, 0, total)

    @classmethod
    def equal(cls, total: int, rank: int, parts: int, what: str) -> Shard:
        """Return one of `parts` equal shards.  Raises `StartupError`: `what` names the size and its flags."""
        if total % parts:
            raise StartupError(f"{what}: {total} does not divide over {parts} ranks")
        return cls(total, total // parts * rank, total // parts)

    @classmethod
    def even(cls, total: int, rank: int, parts: int) -> Shard:
        """Return one of `parts` shards whose lengths differ by one at most, the longer ones first."""
        lengths = share_sizes(total, parts)
        return cls(total, sum(lengths[:rank]), lengths[rank])

    @property
    def is_whole(self) -> bool:
        return self.length == self.total

    def times(self, size: int) -> Shard:
        """Return the same shard in smaller units, `size` of which make one of these."""
        assert not self.sections
        return Shard(self.total * size, self.start * size, self.length * size)

    def of_sections(self, sizes: Sequence[int]) -> Shard:
        """Return the same share of each of several sections with these sizes, which lie one after the other."""
        total = sum(sizes)
        return Shard(total, total * self.start // self.total, total * self.length // self.total, tuple(sizes))


def query_heads(spec: AttentionSpec | LatentAttentionSpec, parallel: Parallel) -> Shard:
    """Return the query heads of this rank.  Raises `StartupError` where they do not divide over the ranks."""
    ranks, rank = parallel.layout.attn_tp_size, parallel.position.attn_tp_rank
    return Shard.equal(spec.num_heads, rank, ranks, f"--tp-size {_sizes(parallel)}: attention heads")


def kv_heads(spec: AttentionSpec, parallel: Parallel) -> Shard:
    """Return the KV heads that this rank's query heads read.

    With more ranks than KV heads, `ranks / heads` neighbours have the same one.  Raises `StartupError`.

        8 query heads, 2 KV heads     rank 0      rank 1      rank 2      rank 3
                            query     0 1         2 3         4 5         6 7
                            KV        0           0           1           1
    """
    total = spec.num_kv_heads
    ranks, rank = parallel.layout.attn_tp_size, parallel.position.attn_tp_rank
    if total % ranks == 0:
        return Shard(total, total // ranks * rank, total // ranks)
    if ranks % total == 0:
        return Shard(total, rank // (ranks // total), 1)
    raise StartupError(
        f"--tp-size {_sizes(parallel)}: key-value heads: {total} and {ranks} ranks must divide each other"
    )


def delta_heads(spec: GatedDeltaSpec, parallel: Parallel) -> Shard:
    """Return this rank's key heads of the gated delta rule.  Raises `StartupError` where they do not divide."""
    ranks, rank = parallel.layout.attn_tp_size, parallel.position.attn_tp_rank
    return Shard.equal(spec.num_key_heads, rank, ranks, f"--tp-size {_sizes(parallel)}: linear key heads")


def _sizes(parallel: Parallel) -> str:
    layout = parallel.layout
    return f"{layout.tp_size}" + (f" --dp-size {layout.dp_size}" if layout.enable_dp_attention else "")
