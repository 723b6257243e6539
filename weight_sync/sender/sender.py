"""`WeightSender`: refreshes engines from a trainer's model, state dict or sharded model.

Needs torch only.  Engines are reached through `EngineControl`, which an HTTP client satisfies.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weight_sync.engine_control import EngineControl, EngineError
from weight_sync.errors import TransactionStateError, WeightRequestError
from weight_sync.joint_update import EngineReport, OnEngineFailure
from weight_sync.process_group import resolve_backend
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import SharedBucket, WholeBucket
from weight_sync.sender.link import Bucket, EngineLink
from weight_sync.sender.lists import Manifest
from weight_sync.sender.plan import TensorSource
from weight_sync.sender.ranks import TrainerRanks, device_of_group
from weight_sync.sender.refresh_plan import KeptPlans, RefreshPlan, Settings
from weight_sync.sender.report import RefreshReport
from weight_sync.sender.source import Source
from weight_sync.sender.statement import digest_of_refresh
from weight_sync.sender.update import Progress, WeightUpdate
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
    """

    def __init__(
        self,
        engines: EngineControl | Mapping[str, EngineControl],
        *,
        timeout_s: float = 300.0,
        on_engine_failure: OnEngineFailure = "abort_all",
        trainer_group: dist.ProcessGroup | None = None,
    ) -> None:
        if on_engine_failure not in ("abort_all", "leave_out"):
            raise WeightRequestError(f"on_engine_failure must be abort_all or leave_out, got {on_engine_failure!r}")
        self._links: dict[str, EngineLink] = {}
        self._timeout_s = timeout_s
        for name, control in (engines if isinstance(engines, Mapping) else {"engine": engines}).items():
            self.add_engine(name, control)
        self._policy = on_engine_failure
        self._trainer_group = trainer_group
        self._device = torch.device("cpu")
        self._areas: list[torch.Tensor] = []
        self._plans = KeptPlans()
        self._sending = threading.RLock()  # held by a refresh and by `connect`
        self._closing = threading.Event()

    @property
    def connected(self) -> list[str]:
        """Names of the engines that share a group with this process."""
        return [name for name, link in self._links.items() if link.is_connected]

    def add_engine(self, name: str, control: EngineControl) -> None:
        """Have one more engine take part, such as the replacement of one that died; `connect` joins it.

        Raises `WeightRequestError` for a name that is in use.
        """
        if name in self._links:
            raise WeightRequestError(f"there is an engine {name!r} already")
        self._links[name] = EngineLink(name, control, self._timeout_s)

    def remove_engine(self, name: str) -> None:
        """Have an engine take part no more, dead or alive: both sides leave its group, within some seconds.

        Raises `WeightRequestError` for an unknown name.
        """
        if name not in self._links:
            raise WeightRequestError(f"there is no engine {name!r}")
        self._links.pop(name).leave_failed()

    def connect(
        self,
        *,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        engine_world_size: int | None = None,
        group_name: str = "weight_update_group",
        backend: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Join a group with each engine that is not connected: this process is rank 0, the engine's ranks follow.

        Call it again for engines that were lost.  `master_address`: where engines reach this process.  `master_port`:
        of the first engine, the following ones take the ports after it; None: free ones.  Each engine states how many
        ranks it has; one with another number than `engine_world_size`, if that is given, is refused.  `group_name`: of
        the only engine; of several, each adds `-` and its own name.  `device`: where the tensors to send live; decides
        the backend where None is given.

        Raises `EngineError`, which names the engines that did not join; the others are connected.
        """
        missing = [link for link in self._links.values() if not link.is_connected]
        if self._links and not missing:
            raise TransactionStateError("already connected; close first")
        failed: dict[str, BaseException] = {}
        with self._sending:
            for position, link in enumerate(self._links.values()):
                if link not in missing:
                    continue
                try:
                    link.connect(
                        master_address=master_address,
                        master_port=None if master_port is None else master_port + position,
                        engine_world_size=engine_world_size,
                        group_name=group_name if len(self._links) == 1 else f"{group_name}-{link.name}",
                        backend=backend,
                        device=device,
                    )
                except Exception as error:
                    failed[link.name] = error
        self._device = torch.device("cpu" if resolve_backend(backend, device) == "gloo" else device)
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
        begin_options: Mapping[str, Any] | None = None,
    ) -> RefreshReport:
        """Send one weight version as one transaction; returns when the engines have committed it.

        `source`: a model, a state dict, or (name, tensor) pairs, on any device, whole or sharded (DTensor); it must not
        change meanwhile.  `dtype`: the engine's, to which floating-point tensors are cast on the way.
        `progress(bytes done, bytes in all)` is called after each bucket.  `with_manifest`: state names, dtypes, shapes
        and fingerprints first, so that a wrong refresh is refused before anything is sent and a flipped bit is noticed.
        `split_experts`: see `split_fused_experts`; without it fused tensors go as they are, with no fingerprint.
        `begin_options`: further fields of `begin_weight_update`.

        The next bucket is gathered and packed while this one is broadcast.  Memory on the sending rank: two buckets,
        and a third where tensors are sharded; a bucket is `bucket_bytes`, or the largest tensor if that is larger.

        Raises `EngineError` with each failed engine's error; `WeightRequestError`; `TransportError` when trainer
        ranks lost one another.  Unless `EngineError.committed` states otherwise no engine has the new version then, and
        all that could be reached have dropped it; the error carries notes on the others.
        """
        start, parts = time.perf_counter(), Parts()
        options = {
            "weight_version": weight_version,
            "coverage": coverage,
            "bucket_bytes": bucket_bytes,
            "with_manifest": with_manifest,
            "split_experts": split_experts,
        } | dict(begin_options or {})
        with parts.timed("plan"):
            listed = Source(source)
            ranks = self._trainer_ranks(listed)
            plan = self._planned(listed, dtype, ranks, options)
            gatherer = plan.gatherer(listed, ranks)
        engines: dict[str, EngineReport] = {}
        contents, buckets = plan.contents, plan.layout.buckets
        with contextlib.nullcontext() if ranks is None else ranks.reporting():
            with parts.timed("fingerprints"):
                fingerprints = gatherer.fingerprints() if with_manifest else None
            with parts.timed("manifest"):
                manifest = None if fingerprints is None else Manifest(contents.lists, fingerprints)
                values = {} if fingerprints is None else fingerprints.by_name(contents.lists.names)
                digest = None if fingerprints is None else contents.digest(fingerprints)
            if ranks is None or ranks.is_sender:
                fields = {"weight_version": weight_version, "coverage": coverage, "manifest": manifest}
                fields |= dict(begin_options or {}) | {"prepared_s": time.perf_counter() - start}
                update = self._new_update(fields, contents.num_bytes, progress)
                self._lead(update, gatherer, buckets, parts)
                engines = update.engines
            else:
                with parts.timed("pack"):
                    for bucket in buckets:
                        gatherer.gather(bucket, None)
                with parts.timed("end"):
                    ranks.jointly(_nothing)  # the engines' final answers
        return RefreshReport(
            weight_version,
            contents.num_bytes,
            time.perf_counter() - start,
            len(buckets),
            values,
            digest,
            engines,
            parts,
        )

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
        verifies and commits; an exception aborts.  Raises as `refresh`.
        """
        entries = None if manifest is None else [dict(entry) for entry in manifest]
        fields = {"weight_version": weight_version, "coverage": coverage, "manifest": entries}
        return self._new_update(fields | dict(begin_options or {}), None, progress)

    def close(self) -> None:
        """Leave all groups and have the engines leave them.

        A refresh that runs on another thread ends first, and raises: it is aborted with the bucket on its way, or after
        the call that it waits for.  So may a `finally` do after Ctrl-C.
        Raises `EngineError` with what engines refused; the groups are left anyway.
        """
        failed: dict[str, BaseException] = {}
        self._closing.set()
        with self._sending:
            self._closing.clear()
            for link in self._links.values():
                try:
                    link.leave()
                except Exception as error:
                    failed[link.name] = error
            self._areas.clear()
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
            plan = self._plans.find(source, settings, ranks)
            self._require_role(ranks)
            return plan

        if ranks is None:
            return plan_here()
        plan = ranks.jointly(plan_here)
        state = lambda: plan.statement(source, dict(options))  # noqa: E731
        ranks.require_equal(digest_of_refresh(options, plan.tensors_digest), state)
        return plan

    def _require_role(self, ranks: TrainerRanks | None) -> None:
        """Raise where this rank lacks engines to send to, or has some and does not send."""
        sends = ranks is None or ranks.is_sender
        if sends and not self.connected:
            raise TransactionStateError("not connected; connect first")
        if not sends and self._links:
            raise WeightRequestError("only rank 0 of the trainer group sends; give no engines on the other ranks")

    def _new_update(self, fields: dict[str, Any], num_bytes: int | None, progress: Progress | None) -> WeightUpdate:
        if not self._links:
            raise TransactionStateError("there are no engines to update")
        fields = {"update_id": uuid.uuid4().hex} | fields
        return WeightUpdate(self._links, self._policy, self._device, fields, num_bytes, progress, self._closing)

    def _lead(
        self, update: WeightUpdate, gatherer: Gatherer, buckets: Sequence[WholeBucket | SharedBucket], parts: Parts
    ) -> None:
        try:
            with self._sending, update:
                for position, bucket in enumerate(buckets):
                    with parts.timed("pack"):
                        flat = self._area(position, bucket.num_bytes)
                        pieces = gatherer.gather(bucket, flat)  # the bucket before is on its way meanwhile
                    update.send_bucket(Bucket(bucket.lists, pieces))
        except BaseException:
            self._areas.clear()  # a broadcast that was given up may still read them
            raise
        parts.update(update.parts)
        if any(engine.error is not None for engine in update.engines.values()):
            self._areas.clear()

    def _area(self, position: int, num_bytes: int) -> torch.Tensor:
        """Return room for a bucket, uint8 [num_bytes]: two areas by turns, kept from refresh to refresh."""
        turn = position % 2
        while len(self._areas) <= turn:
            self._areas.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._areas[turn].numel() < num_bytes or self._areas[turn].device != self._device:
            self._areas[turn] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._areas[turn][:num_bytes]


def _nothing() -> None:
    """Do nothing, as the work of a rank that only waits for the others."""
