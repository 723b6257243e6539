"""`ShardSender`: refreshes engines from trainer ranks that each send their own shards, all at once, as one update.

    rank 0   begin, with the manifest ---.--- its buckets ---.--- verify, commit
    rank 1                               |--- its buckets ---|
    rank 2                               `--- its buckets ---`        each in groups of its own with all engines

So no rank gathers what others have, and each needs memory for its shards and two buckets.  An engine takes the calls
in the order in which they reach it, whosever they are.  Between two buckets the ranks agree that none of them has
failed: one that fails, or is lost, ends the update on all.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from weight_sync.errors import TransactionStateError
from weight_sync.sender.carriers import Transport
from weight_sync.sender.link import Bucket
from weight_sync.sender.lists import Fingerprints, Manifest
from weight_sync.sender.ranks import TrainerRanks, device_of_group
from weight_sync.sender.report import RefreshReport
from weight_sync.sender.sender import WeightSender
from weight_sync.sender.shard import Shard, decoded, encoded, given_metas, parts_of, require_whole
from weight_sync.sender.shard_plan import ShardPlan
from weight_sync.sender.statement import RefreshStatement, digest_of_refresh
from weight_sync.sender.update import Progress, WeightUpdate
from weight_sync.tensor_meta import TensorMeta
from weight_sync.timing import Parts

T = TypeVar("T")


class ShardSender(WeightSender):
    """`engines`: as `WeightSender`, on every rank of `trainer_group` the same ones; each rank connects to all of them.

    `trainer_group` None: the default group, or this process alone where there is none.  Rank 0 of it begins and ends
    the updates.  An engine that fails ends a refresh on all of them.
    """

    def __init__(
        self,
        engines: Any,
        *,
        timeout_s: float = 300.0,
        trainer_group: dist.ProcessGroup | None = None,
        transport: Transport = "auto",
    ) -> None:
        super().__init__(engines, timeout_s=timeout_s, trainer_group=trainer_group, transport=transport)
        self._kept: _Kept | None = None

    def connect(self, *, group_name: str = "weight_update_group", **options: Any) -> None:
        """Join a group with each engine, as `WeightSender.connect`; each rank's has its number after its name."""
        ranks = self._ranks()
        rank = 0 if ranks is None else ranks.rank
        super().connect(group_name=f"{group_name}-{rank}", **options)

    def refresh_shards(
        self,
        shards: Iterable[Shard],
        weight_version: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        coverage: str = "full",
        bucket_bytes: int = 256 << 20,
        progress: Progress | None = None,
        begin_options: Mapping[str, Any] | None = None,
    ) -> RefreshReport:
        """Send one weight version as one transaction, on all trainer ranks together.

        `shards`: what this rank has; together the ranks have each element of each tensor, in boxes that are equal or do
        not overlap.  Of equal boxes, as replicas have them, one is sent.  They must not change meanwhile.  The other
        arguments mean what they mean in `WeightSender.refresh`, and are equal on all ranks.  `progress` counts this
        rank's bytes.

        Raises as `WeightSender.refresh`; what is wrong with shards is raised on every rank before an engine hears of
        it.
        """
        start, parts, given = time.perf_counter(), Parts(), list(shards)
        settings = {"dtype": dtype, "bucket_bytes": bucket_bytes, "engines": sorted(self._links)}
        options = {"weight_version": weight_version, "coverage": coverage} | dict(begin_options or {}) | settings
        ranks = self._ranks()
        with parts.timed("plan"):
            plan = self._shard_plan(given, dtype, bucket_bytes, ranks, options)
            views = plan.recipe.views([shard.tensor.detach() for shard in given])
        with contextlib.nullcontext() if ranks is None else ranks.reporting():
            with parts.timed("fingerprints"):
                values = _jointly(ranks, lambda: plan.fingerprints(views))
                values = values if ranks is None else ranks.sum_over_ranks(values)
                fingerprints = Fingerprints(values, np.ones(len(values), np.bool_))
            fields: dict[str, Any] = {
                "update_id": uuid.uuid4().hex,
                "weight_version": weight_version,
                "coverage": coverage,
            }
            fields |= dict(begin_options or {})
            if ranks is not None:
                fields["update_id"] = ranks.gather(fields["update_id"].encode())[0].decode()
            fields |= {"manifest": Manifest(plan.contents.lists, fingerprints)}
            fields |= {"prepared_s": time.perf_counter() - start}
            kind = WeightUpdate if ranks is None or ranks.is_sender else JoinedUpdate
            num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
            update = kind(self._links, self._policy, self._device, fields, num_bytes, progress, self._closing)
            self._send_shards(update, plan, views, ranks, parts)
            if ranks is not None and not ranks.is_sender:
                ranks.jointly(_nothing)  # the engines' final answers
        return RefreshReport(
            weight_version,
            num_bytes,
            time.perf_counter() - start,
            len(plan.buckets),
            fingerprints.by_name(plan.contents.lists.names),
            plan.contents.digest(fingerprints),
            update.engines,
            parts,
        )

    def close(self) -> None:
        """Leave all groups, as `WeightSender.close`."""
        self._kept = None
        super().close()

    # --- helpers ------------------------------------------------------------------------------------------------

    def _ranks(self) -> TrainerRanks | None:
        """Return the trainer ranks; None where this process is alone."""
        if self._trainer_group is None and not dist.is_initialized():
            return None
        group = self._trainer_group or dist.group.WORLD
        assert group is not None, "there is a default group"
        return TrainerRanks(group, device_of_group(group), self._timeout_s)

    def _shard_plan(
        self,
        shards: Sequence[Shard],
        dtype: torch.dtype | None,
        bucket_bytes: int,
        ranks: TrainerRanks | None,
        options: Mapping[str, Any],
    ) -> ShardPlan:
        """Return the plan, once all ranks have theirs from the same shards.

        Raises on all ranks what cannot be sent, or differs between them.
        """
        if ranks is not None:
            ranks.require_equal(
                digest_of_refresh(options, b""), lambda: RefreshStatement.of((), {}, options, ranks.meshes)
            )
        form = _form_of(shards), dtype, bucket_bytes, self._device
        kept = self._kept
        is_known = all(_agreed(ranks, kept is not None and kept.form == form))
        self._kept = kept = kept if is_known else self._new_plan(shards, dtype, bucket_bytes, ranks, form)
        assert kept is not None
        return kept.plan

    def _new_plan(
        self,
        shards: Sequence[Shard],
        dtype: torch.dtype | None,
        bucket_bytes: int,
        ranks: TrainerRanks | None,
        form: object,
    ) -> _Kept:
        def prepare() -> Any:
            if not self.connected:
                raise TransactionStateError("not connected; connect first")
            return parts_of(shards, dtype)

        parts = _jointly(ranks, prepare)
        given = _from_all(ranks, given_metas(shards))
        held = _from_all(ranks, [part.meta for part in parts])
        rank = 0 if ranks is None else ranks.rank
        tensors = [shard.tensor for shard in shards]

        def make() -> ShardPlan:
            require_whole(given)  # of fused tensors, `held` has only those experts that a rank has
            return ShardPlan(parts, tensors, held, rank, bucket_bytes, self._device)

        return _Kept(form, _jointly(ranks, make))

    def _send_shards(
        self, update: WeightUpdate, plan: ShardPlan, views: Any, ranks: TrainerRanks | None, parts: Parts
    ) -> None:
        def send(position: int) -> None:
            if position < len(plan.buckets):
                bucket = plan.buckets[position]
                room = self._room(position, bucket.num_bytes)
                pieces = room.held(bucket.pieces(views, room.content))
                update.send_bucket(Bucket(bucket.lists, pieces, bucket.num_bytes, memory=room.address))

        try:
            with self._sending, update:
                _jointly(ranks, _nothing)  # rank 0 has begun
                for position in range(plan.num_rounds):
                    _jointly(ranks, lambda: send(position))  # noqa: B023
                _jointly(ranks, update.flush)
        except BaseException:
            self._rooms.clear()  # a broadcast that was given up may still read them
            raise
        parts.update(update.parts)


class JoinedUpdate(WeightUpdate):
    """An update that another trainer rank begins and ends.  An error in the block aborts it all the same."""

    def _begin(self) -> None:
        self._require_connected()
        self._open.update(self._links)

    def _end(self) -> None:
        self.flush()
        self._open.clear()


class _Kept(NamedTuple):
    """A plan, and the form of the shards that it is for."""

    form: object
    plan: ShardPlan


def _form_of(shards: Sequence[Shard]) -> list[tuple[object, ...]]:
    return [
        (name, tuple(shape), box, tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        for name, shape, box, tensor in shards
    ]


def _jointly(ranks: TrainerRanks | None, work: Callable[[], T]) -> T:
    return work() if ranks is None else ranks.jointly(work)


def _from_all(ranks: TrainerRanks | None, mine: Sequence[TensorMeta]) -> list[list[TensorMeta]]:
    """Return what each rank has."""
    content = encoded(mine)
    return [decoded(each) for each in ([content] if ranks is None else ranks.gather(content))]


def _agreed(ranks: TrainerRanks | None, mine: bool) -> list[bool]:
    """Return the answer of each rank."""
    return [mine] if ranks is None else [content == b"1" for content in ranks.gather(b"1" if mine else b"0")]


def _nothing() -> None:
    """Do nothing, as the work of a rank that only waits for the others."""
