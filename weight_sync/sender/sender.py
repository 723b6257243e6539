"""`WeightSender`: refreshes engines from a trainer's model, state dict or sharded model.

Needs torch only.  Engines are reached through `EngineControl`, which an HTTP client satisfies.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weight_sync.engine_control import EngineControl, EngineError
from weight_sync.errors import TransactionStateError, WeightRequestError
from weight_sync.joint_update import OnEngineFailure
from weight_sync.process_group import resolve_backend
from weight_sync.sender.carriers import TRANSPORTS, Transport
from weight_sync.sender.link import EngineLink, leave_all, leave_failed
from weight_sync.sender.lora import lora_of, with_adapters_or_error
from weight_sync.sender.meeting import MeetingPlace
from weight_sync.sender.plan import TensorSource
from weight_sync.sender.rank_groups import EngineRanks
from weight_sync.sender.rank_refresh import RankRefresh
from weight_sync.sender.ranks import TrainerRanks, device_of_group
from weight_sync.sender.refresh import Refresh
from weight_sync.sender.refresh_plan import KeptPlans, RefreshPlan, Settings
from weight_sync.sender.report import RefreshReport
from weight_sync.sender.rooms import Room, Rooms
from weight_sync.sender.source import Source
from weight_sync.sender.statement import digest_of_refresh
from weight_sync.sender.update import Progress, WeightUpdate
from weight_sync.sender.whole_update import kind_of_update
from weight_sync.timing import Parts


class WeightSender:
    """`engines`: one engine's control, or many by name.  Not thread-safe, but for `close`.

    With a model that is sharded over trainer ranks every rank has a `WeightSender` and calls `refresh` with the same
    arguments; rank 0 of `trainer_group` (None: the default group) sends, and the others give no engines.  The ranks of
    a given `trainer_group` do so for whole tensors, too.

    `timeout_s`: deadline of a rendezvous, of a bucket, of a call, and of what trainer ranks do together.  A refresh
    that an engine holds up fails within it, plus at most 15 s in which engines are asked why and requested to abort.
    `on_engine_failure`: one engine that fails ends the refresh on all (`abort_all`), or is left out and reported, while
    the others take the new version (`leave_out`).
    `per_rank`: each rank of an engine is sent what it keeps of the tensors, in a group of its own with the sender.  It
    pays where ranks keep different experts or shards (`--ep-size`, `--tp-size`): of 8 expert-parallel ranks each is
    sent an eighth of the experts.  Where all ranks keep everything one broadcast to all costs less.
    `transport`: "auto" sends through shared memory to engines on this machine that can read this process's, and by
    broadcast to others; "broadcast" and "shared_memory" leave no choice.
    """

    def __init__(
        self,
        engines: EngineControl | Mapping[str, EngineControl],
        *,
        timeout_s: float = 300.0,
        on_engine_failure: OnEngineFailure = "abort_all",
        trainer_group: dist.ProcessGroup | None = None,
        per_rank: bool = False,
        transport: Transport = "auto",
    ) -> None:
        if transport not in TRANSPORTS:
            raise WeightRequestError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if on_engine_failure not in ("abort_all", "leave_out"):
            raise WeightRequestError(f"on_engine_failure must be abort_all or leave_out, got {on_engine_failure!r}")
        self._links: dict[str, EngineLink] = {}
        self._timeout_s, self._per_rank = timeout_s, per_rank
        for name, control in (engines if isinstance(engines, Mapping) else {"engine": engines}).items():
            self.add_engine(name, control)
        self._policy: OnEngineFailure = on_engine_failure
        self._transport: Transport = transport
        self._trainer_group = trainer_group
        self._device = torch.device("cpu")
        self._rooms = Rooms()
        self._plans = KeptPlans()
        self._place: MeetingPlace | None = None  # of the last `connect`
        self._sending = threading.RLock()  # held by a refresh and by `connect`
        self._closing = threading.Event()

    @property
    def connected(self) -> list[str]:
        """Names of the engines that the next refresh reaches: in a group with this process, or about to join one."""
        return [name for name, link in self._links.items() if link.group is not None or link.rejoins]

    def add_engine(self, name: str, control: EngineControl) -> None:
        """Have one more engine take part, such as the replacement of one that died; `connect` joins it.

        Raises `WeightRequestError` for a name that is in use.
        """
        if name in self._links:
            raise WeightRequestError(f"there is an engine {name!r} already")
        self._links[name] = EngineLink(name, control, self._timeout_s, EngineRanks() if self._per_rank else None)

    def remove_engine(self, name: str) -> None:
        """Have an engine take part no more, dead or alive: both sides leave its group, within some seconds.

        Raises `WeightRequestError` for an unknown name.
        """
        if name not in self._links:
            raise WeightRequestError(f"there is no engine {name!r}")
        leave_failed([self._links.pop(name)])

    def connect(
        self,
        *,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        engine_world_size: int | None = None,
        group_name: str = "weight_update_group",
        backend: str | None = None,
        device: torch.device | str = "cpu",
        shared: bool = False,
    ) -> None:
        """Join a group with each engine that is not connected: this process is rank 0, the engine's ranks follow.

        Call it again for engines that were lost.  All are asked at once.  `master_address`: where engines reach this
        process.  `master_port`: of the first engine, the following ones take the ports after it; None: free ones.  Each
        engine states how many ranks it has; one with another number than `engine_world_size`, if that is given, is
        refused.  `group_name`: of the only engine; of several, each adds `-` and its own name.  `device`: where the
        tensors to send live; decides the backend where None is given.

        `shared`: one group of all engines, so that a broadcast reaches all of them.  Groups from before are left, and
        engines that do not come are left out.  From then on engines that are left of it, after one failed or was
        removed, join a new one at the next refresh: its name adds `#` and a number.

        Raises `EngineError`, which names the engines that did not join; the others are connected.  Raises
        `WeightRequestError` for another backend than that of engines that stay connected.
        """
        links = self._links
        groups = {link.group for link in links.values()}
        if links and None not in groups and (len(groups) == 1 or not shared):
            raise TransactionStateError("already connected; close first")
        if self._per_rank and (shared or master_port is not None):
            raise WeightRequestError(
                "per_rank has a group for each rank, at free ports: leave out shared and master_port"
            )
        resolved = resolve_backend(backend, device)
        if not shared and any(groups) and self._place is not None and self._place.backend != resolved:
            raise WeightRequestError(f"engines are connected over {self._place.backend}, not {resolved}; close first")
        size, how = engine_world_size, self._transport
        place = MeetingPlace(master_address, master_port, group_name, resolved, size, shared, how)
        with self._sending:
            if shared:
                leave_failed(links.values())
            failed = place.join(links, [name for name, link in links.items() if link.group is None])
        self._device = torch.device("cpu" if resolved == "gloo" else device)
        self._place = place
        for name in failed:
            links[name].rejoins = False
        if failed:
            raise EngineError(failed) from next(iter(failed.values()))

    def refresh(
        self,
        source: TensorSource,
        weight_version: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        coverage: str = "full",
        bucket_bytes: int = 256 << 20,
        progress: Progress | None = None,
        with_manifest: bool = True,
        split_experts: bool = True,
        adapters: Mapping[str, torch.nn.Module] | None = None,
        draft: bool = False,
        begin_options: Mapping[str, Any] | None = None,
    ) -> RefreshReport:
        """Send one weight version as one transaction; returns when the engines have committed it.

        `source`: a model, a state dict, or (name, tensor) pairs, on any device, whole or sharded (DTensor); it must not
        change meanwhile.  `dtype`: the engine's, to which floating-point tensors are cast on the way.
        `progress(bytes done, bytes in all)` is called after each bucket.  `with_manifest`: state names, dtypes, shapes
        and fingerprints first, so that a wrong refresh is refused before anything is kept and a flipped bit is noticed.
        `split_experts`: see `split_fused_experts`; without it fused tensors go as they are, with no fingerprint.
        `adapters`: by the engines' names, models of PEFT whose adapters come into force with it (`with_adapters`).
        `draft`: they are the draft's, which alone changes.  `begin_options`: further fields of `begin_weight_update`.

        The next bucket is gathered and packed while this one is broadcast.  Memory on the sending rank: two buckets,
        and a third where tensors are sharded; a bucket is `bucket_bytes`, or the largest tensor if that is larger.

        Raises `EngineError` with each failed engine's error; `WeightRequestError`; `TransportError` when trainer
        ranks lost one another.  Unless `EngineError.committed` states otherwise no engine has the new version then, and
        all that could be reached have dropped it; the error carries notes on the others.
        """
        start, parts = time.perf_counter(), Parts()
        lacks: Exception | None = None
        more: dict[str, Any] = ({"target": {"draft": True}} if draft else {}) | dict(begin_options or {})
        if adapters:
            if self._per_rank:
                raise WeightRequestError("a sender per rank sends no adapters: use refresh_adapter of another sender")
            source, targets, lacks = with_adapters_or_error(source, adapters)
            more = {"adapters": targets} | more
        options = {
            "weight_version": weight_version,
            "coverage": coverage,
            "bucket_bytes": bucket_bytes,
            "with_manifest": with_manifest,
            "split_experts": split_experts,
            "per_rank": self._per_rank,
        } | more
        with parts.timed("plan"):
            listed = Source(source, lacks)
            ranks = self._trainer_ranks(listed)
            plan = self._planned(listed, dtype, ranks, options)
        fields = {"weight_version": weight_version, "coverage": coverage} | more
        refresh = Refresh(plan, listed, ranks, fields, with_manifest, start, parts, plan.contents.num_bytes)
        while not self._attempt(refresh, progress):
            refresh.ranks = self._trainer_ranks(listed)  # the ones before have agreed on a failure
        return refresh.report()

    def refresh_adapter(
        self, name: str, model: torch.nn.Module, adapter: str = "default", **options: Any
    ) -> RefreshReport:
        """Send the LoRA adapter that PEFT calls `adapter` in `model` as the next version of the engines' `name`.

        Nothing of the base model is sent.  `options`: further arguments of `refresh`.  Raises as `refresh`, and
        `WeightRequestError` for a model without that adapter.
        """
        ranks = self._trainer_ranks(Source(model))
        lora = lora_of(model, adapter) if ranks is None else ranks.jointly(lambda: lora_of(model, adapter))
        begin = {"target": lora.target(name)} | dict(options.pop("begin_options", None) or {})
        return self.refresh(lora.tensors, begin_options=begin, **options)

    def update(
        self,
        weight_version: str | None = None,
        *,
        coverage: str = "full",
        manifest: Iterable[Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
        begin_options: Mapping[str, Any] | None = None,
    ) -> WeightUpdate:
        """Return a transaction of the caller's buckets: `with sender.update("7") as update: update.send(tensors)`.

        `manifest`: entries of `name`, `dtype`, `shape` and optionally `fingerprint`.  Leaving the block normally
        verifies and commits; an exception aborts.  Raises as `refresh`, and `WeightRequestError` for a sender per rank.
        """
        if self._per_rank:
            raise WeightRequestError("a sender per rank plans the tensors of each rank: use refresh")
        entries = None if manifest is None else [dict(entry) for entry in manifest]
        fields = {"weight_version": weight_version, "coverage": coverage, "manifest": entries}
        return self._new_update(fields | dict(begin_options or {}), None, progress)

    def close(self) -> None:
        """Leave all groups and have the engines leave them.

        A refresh that runs on another thread ends first, and raises: it is aborted with the bucket on its way, or after
        the call that it waits for.  So may a `finally` do after Ctrl-C.
        Raises `EngineError` with what engines refused; the groups are left anyway.
        """
        self._closing.set()
        with self._sending:
            self._closing.clear()
            try:
                failed = leave_all(dict.fromkeys(filter(None, (link.group for link in self._links.values()))))
            finally:
                for link in self._links.values():
                    link.rejoins = False
                self._rooms.clear()
                self._plans.clear()
        if failed:
            raise EngineError(failed) from next(iter(failed.values()))

    # --- helpers ------------------------------------------------------------------------------------------------

    def _trainer_ranks(self, source: Source) -> TrainerRanks | None:
        """Return the ranks that take part; None where this one sends alone."""
        if source.is_sharded:
            sharded = next(it for whole, it in zip(source.tensors, source.locals) if isinstance(whole, DTensor))
            return TrainerRanks(self._trainer_group, sharded.device, self._timeout_s)
        if self._trainer_group is not None:
            return TrainerRanks(self._trainer_group, device_of_group(self._trainer_group), self._timeout_s)
        if not self._links and dist.is_initialized() and dist.get_rank() > 0:
            raise WeightRequestError(
                f"trainer rank {dist.get_rank()} has no engines and no sharded tensors, so it has nothing to send. "
                "Call refresh on rank 0 only, shard the model on all ranks, or give trainer_group."
            )
        return None

    def _planned(
        self, source: Source, dtype: torch.dtype | None, ranks: TrainerRanks | None, options: Mapping[str, Any]
    ) -> RefreshPlan:
        """Return the plan, once all trainer ranks have the same.

        Raises on all ranks what cannot be sent, or differs between them.
        """
        members = None if ranks is None else ranks.members
        settings = Settings(dtype, options["split_experts"], options["bucket_bytes"], self._device, members)

        def plan_here() -> RefreshPlan:
            if source.lacks is not None:
                raise source.lacks
            plan = self._plans.find(source, settings, ranks)
            self._require_role(ranks)
            return plan

        if ranks is None:
            return plan_here()
        plan = ranks.jointly(plan_here)
        state = lambda: plan.statement(source, dict(options), ranks)  # noqa: E731
        ranks.require_equal(digest_of_refresh(options, plan.tensors_digest), state)
        return plan

    def _require_role(self, ranks: TrainerRanks | None) -> None:
        """Raise where this rank lacks engines to send to, or has some and does not send."""
        sends = ranks is None or ranks.is_sender
        if sends and not self.connected:
            raise TransactionStateError("not connected; connect first")
        if not sends and self._links:
            raise WeightRequestError("only rank 0 of the trainer group sends; give no engines on the other ranks")

    def _new_update(
        self,
        fields: dict[str, Any],
        num_bytes: int | None,
        progress: Progress | None,
        lost: Mapping[str, BaseException] | None = None,
        whole: dict[str, Any] | None = None,
    ) -> WeightUpdate:
        if not self._links:
            raise TransactionStateError("there are no engines to update")
        lost = self._rejoin() | dict(lost or {})
        fields = {"update_id": uuid.uuid4().hex} | fields
        rooms = Rooms() if self._reads_memory else None  # an engine may read them while a refresh is refused
        links, device, closing = self._links, self._device, self._closing
        new = kind_of_update(links, progress, whole)
        return new(links, self._policy, device, fields, num_bytes, progress, closing, lost, rooms)

    def _rejoin(self) -> dict[str, BaseException]:
        """Join what is left of a shared group that ended; return the errors of engines that did not come."""
        with self._sending:
            names = [name for name, link in self._links.items() if link.rejoins]
            failed = self._place.join(self._links, names) if names and self._place is not None else {}
            for name in failed:
                self._links[name].rejoins = False
        return failed

    def _attempt(self, refresh: Refresh, progress: Progress | None) -> bool:
        """Send once.  Returns whether all was sent; if not, the engines that are left take it all again."""
        update, ranks, parts = None, refresh.ranks, refresh.parts
        try:
            with contextlib.nullcontext() if ranks is None else ranks.reporting():
                gatherer = refresh.prepare()
                if self._per_rank:
                    new = lambda num_bytes, lost: self._new_update(  # noqa: E731
                        refresh.begin_fields(), num_bytes, progress, lost
                    )
                    with self._leading(refresh):
                        leaves_out = self._policy == "leave_out"
                        RankRefresh(self._links, refresh, self._room, leaves_out=leaves_out).run(new)
                elif refresh.is_sender:
                    whole = refresh.whole_update()
                    update = self._new_update(refresh.begin_fields(), refresh.num_bytes, progress, refresh.lost, whole)
                    with self._leading(refresh):
                        refresh.engines = update.engines
                        refresh.lead(update, gatherer, self._room)
                else:
                    assert ranks is not None
                    with parts.timed("pack"):
                        for bucket in refresh.plan.layout.buckets:
                            gatherer.gather(bucket, None)
                    with parts.timed("end"):
                        ranks.jointly(lambda: None)  # the engines' final answers
        except BaseException as error:
            if refresh.begins_again(update, error):
                return False
            raise
        return True

    @contextlib.contextmanager
    def _leading(self, refresh: Refresh) -> Iterator[None]:
        """Send in this block.  Areas that a broadcast which was given up may still read are let go."""
        try:
            with self._sending:
                yield
        except BaseException:
            self._rooms.clear()
            raise
        if any(engine.error is not None for engine in refresh.engines.values()):
            self._rooms.clear()

    @property
    def _reads_memory(self) -> bool:
        """True if an engine reads buckets where they are packed."""
        return any(link.group is not None and link.group.carrier.reads_memory for link in self._links.values())

    def _room(self, position: int, num_bytes: int) -> Room:
        """Return room for a bucket.  Raises `TransportError`."""
        return self._rooms.take(position, num_bytes, self._device, shared=self._reads_memory)
