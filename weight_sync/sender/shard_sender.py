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
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weight_sync.errors import TransactionStateError, WeightRequestError
from weight_sync.sender.carriers import Transport
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.link import Bucket
from weight_sync.sender.plan import Part
from weight_sync.sender.ranks import TrainerRanks, device_of_group
from weight_sync.sender.refresh import Refresh
from weight_sync.sender.report import RefreshReport
from weight_sync.sender.sender import WeightSender
from weight_sync.sender.shard import Shard, ShardPlan, decoded, encoded, given_metas, parts_of, require_whole
from weight_sync.sender.source import Source
from weight_sync.sender.statement import RefreshStatement, digest_of_refresh
from weight_sync.sender.update import Progress, WeightUpdate
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
        self._kept: tuple[object, ShardPlan] | None = None
        """A plan, and the form of the shards that it is for."""

    def connect(self, *, group_name: str = "weight_update_group", **options: Any) -> None:
        """Join a group with each engine, as `WeightSender.connect`; each rank's has its number after its name.

        Raises `WeightRequestError` for `shared` on several trainer ranks, before an engine hears of it.  All of them
        must pass the same `shared`: if only some pass it, these raise, and the others wait for them in the next
        refresh.
        """
        ranks = self._ranks()
        rank = 0 if ranks is None else ranks.rank
        if options.get("shared") and ranks is not None and ranks.world_size > 1:
            raise WeightRequestError(
                "engines of a shared group may wait for one another, as calls of several trainer ranks come in any "
                "order: leave out shared"
            )
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
        fields = {"weight_version": weight_version, "coverage": coverage} | dict(begin_options or {})
        options = fields | {"dtype": dtype, "bucket_bytes": bucket_bytes, "engines": sorted(self._links)}
        ranks = self._ranks()
        with parts.timed("plan"):
            plan = self._shard_plan(given, dtype, bucket_bytes, ranks, options)
            source = Source([(shard.name, shard.tensor.detach()) for shard in given])
        num_bytes = sum(bucket.num_bytes for bucket in plan.layout.buckets)
        refresh = Refresh(plan, source, ranks, fields, True, start, parts, num_bytes)
        with contextlib.nullcontext() if ranks is None else ranks.reporting():
            gatherer = refresh.prepare()
            lost = _jointly(ranks, self._rejoin)  # each rank its own groups, before rank 0 begins
            fields = {"update_id": uuid.uuid4().hex} | refresh.begin_fields()
            fields["update_id"] = _from_all(ranks, fields["update_id"].encode())[0].decode()
            kind = WeightUpdate if refresh.is_sender else JoinedUpdate
            update = kind(self._links, self._policy, self._device, fields, num_bytes, progress, self._closing, lost)
            self._send_shards(update, refresh, plan, gatherer)
            if not refresh.is_sender:
                _jointly(ranks, _nothing)  # the engines' final answers
        refresh.engines = update.engines
        return refresh.report()

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
        is_known = kept is not None and kept[0] == form
        answers = _from_all(ranks, b"1" if is_known else b"0")
        if kept is None or any(answer != b"1" for answer in answers):
            self._kept = kept = form, self._new_plan(shards, dtype, bucket_bytes, ranks)
        return kept[1]

    def _new_plan(
        self, shards: Sequence[Shard], dtype: torch.dtype | None, bucket_bytes: int, ranks: TrainerRanks | None
    ) -> ShardPlan:
        def prepare() -> list[Part]:
            if not self.connected:
                raise TransactionStateError("not connected; connect first")
            return parts_of(shards, dtype)

        parts = _jointly(ranks, prepare)
        given, held = (
            list(map(decoded, _from_all(ranks, encoded(metas))))
            for metas in (given_metas(shards), [part.meta for part in parts])
        )
        rank = 0 if ranks is None else ranks.rank
        tensors = [shard.tensor for shard in shards]

        def make() -> ShardPlan:
            require_whole(given)  # of fused tensors, `held` has only those experts that a rank has
            return ShardPlan(parts, tensors, held, rank, bucket_bytes, self._device)

        return _jointly(ranks, make)

    def _send_shards(self, update: WeightUpdate, refresh: Refresh, plan: ShardPlan, gatherer: Gatherer) -> None:
        def send(position: int) -> None:
            if position < len(plan.layout.buckets):
                bucket = plan.layout.buckets[position]
                room = self._room(position, bucket.num_bytes)
                pieces = room.held(gatherer.gather(bucket, room.content))
                update.send_bucket(Bucket(bucket.lists, pieces, bucket.num_bytes, memory=room.address))

        with self._leading(refresh), update:
            _jointly(refresh.ranks, _nothing)  # rank 0 has begun
            for position in range(plan.num_rounds):
                _jointly(refresh.ranks, lambda: send(position))  # noqa: B023
            _jointly(refresh.ranks, update.flush)
        refresh.parts.add(update.parts)


class JoinedUpdate(WeightUpdate):
    """An update that another trainer rank begins and ends.  An error in the block aborts it all the same."""

    def _begin(self) -> None:
        self._require_connected()
        self._open.update(self._links)

    def _end(self) -> None:
        self.flush()
        self._open.clear()


def _form_of(shards: Sequence[Shard]) -> list[tuple[object, ...]]:
    return [
        (name, tuple(shape), box, tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        for name, shape, box, tensor in shards
    ]


def _jointly(ranks: TrainerRanks | None, work: Callable[[], T]) -> T:
    return work() if ranks is None else ranks.jointly(work)


def _from_all(ranks: TrainerRanks | None, mine: bytes) -> list[bytes]:
    """Return the contents of all ranks, by rank."""
    return [mine] if ranks is None else ranks.gather(mine)


def _nothing() -> None:
    """Do nothing, as the work of a rank that only waits for the others."""
