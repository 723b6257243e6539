"""`Refresh`: one call of `WeightSender.refresh` on one rank: what it sends, and who was lost in earlier attempts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from weight_sync.digest_plan import hex_digits
from weight_sync.engine_control import EngineError
from weight_sync.errors import TransportError
from weight_sync.joint_update import EngineReport
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import WholeBucket
from weight_sync.sender.link import Bucket
from weight_sync.sender.lists import Fingerprints, Manifest
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.sender.refresh_plan import RefreshPlan
from weight_sync.sender.report import RefreshReport
from weight_sync.sender.rooms import Ahead, Room
from weight_sync.sender.shard import ShardPlan
from weight_sync.sender.source import Source
from weight_sync.sender.update import WeightUpdate
from weight_sync.timing import Parts

_PLAIN_FIELDS = {"weight_version", "coverage", "manifest"}


@dataclass
class Refresh:
    """`fields`: of begin.  `ranks`: of this attempt; None where this one sends alone."""

    plan: RefreshPlan | ShardPlan
    source: Source
    ranks: TrainerRanks | None
    fields: dict[str, Any]
    with_manifest: bool
    start: float
    parts: Parts
    num_bytes: int
    lost: dict[str, BaseException] = field(default_factory=dict)
    engines: Mapping[str, EngineReport] = field(default_factory=dict)
    num_buckets: int | None = None  # None: as `plan` has them
    _prints: Fingerprints | None = None
    _fingerprints: dict[str, str] = field(default_factory=dict)
    _digest: str | None = None
    _is_repeated: bool = False

    @property
    def is_sender(self) -> bool:
        return self.ranks is None or self.ranks.is_sender

    def prepare(self) -> Gatherer:
        """Make the fingerprints, together with the other trainer ranks; return the gatherer of the buckets."""
        with self.parts.timed("plan"):
            gatherer, contents = self.plan.gatherer(self.source, self.ranks), self.plan.contents
        if self.with_manifest:
            with self.parts.timed("fingerprints"):
                fingerprints = self._prints = gatherer.fingerprints()
            with self.parts.timed("manifest"):
                self.fields["manifest"] = Manifest(contents.lists, fingerprints)
                self._fingerprints = fingerprints.by_name(contents.lists.names)
                if not isinstance(self.fields.get("adapters"), list):  # else engines have a digest of each target
                    self._digest = contents.digest(fingerprints)
        return gatherer

    def begin_fields(self) -> dict[str, Any]:
        return {"manifest": None} | self.fields | {"prepared_s": time.perf_counter() - self.start}

    def whole_update(self) -> dict[str, Any] | None:
        """Return the fields of an update that is one call: `whole_update.WholeUpdate`.

        None where it has other than one bucket, or fields that belong to a begin of its own.
        """
        layout, prints = self.plan.layout, self._prints
        label, coverage = self.fields["weight_version"], self.fields["coverage"]
        is_plain = self.fields.keys() <= _PLAIN_FIELDS and isinstance(label, str | None)
        is_one = len(layout.buckets) == 1 and isinstance(layout.buckets[0], WholeBucket)
        # An end must not take an update whose bucket never came: one that is partial states what comes.
        is_stated = coverage == "full" if prints is None else coverage in ("full", "partial") and prints.known.all()
        if not (is_plain and is_one and is_stated):
            return None
        stated = {} if prints is None else {"fingerprints": hex_digits(prints.values[layout.order])}
        return {"coverage": coverage, "prepared_s": time.perf_counter() - self.start} | stated

    def begins_again(self, update: WeightUpdate | None, failure: BaseException) -> bool:
        """Return whether all trainer ranks make another attempt after a failure, which they have agreed on.

        Each further attempt is without an engine, but for one: there may be no engine to blame, once.
        """
        again = False
        if update is not None and isinstance(failure, EngineError):
            again = update.begins_again() and bool(update.lost or not self._is_repeated)
            self._is_repeated |= not update.lost
            self.lost |= update.lost
        if self.ranks is None:
            return again
        with contextlib.suppress(TransportError):
            return bool(self.ranks.sum_over_ranks(np.array([again], dtype=np.uint64))[0])
        return False

    def lead(self, update: WeightUpdate, gatherer: Gatherer, room: Callable[[int, int], Room]) -> None:
        """Send all buckets in `update`, on the rank that sends.  `room(number, bytes)`: to pack a bucket in."""
        buckets, parts = self.plan.layout.buckets, self.parts

        def packed(position: int) -> tuple[Room, Iterator[torch.Tensor]]:
            place = room(position, buckets[position].num_bytes)
            return place, place.held(gatherer.gather(buckets[position], place.content))

        try:
            early = Ahead(())
            ahead: tuple[Room, Iterator[torch.Tensor]] | None = None
            if buckets and isinstance(buckets[0], WholeBucket):  # ranks gather theirs together, once engines have begun
                place, pieces = packed(0)
                ahead = place, (early := Ahead(pieces))
                update.meanwhile = early.pack_one
            with update:
                for position, bucket in enumerate(buckets):
                    with parts.timed("pack"):  # the bucket before is on its way meanwhile
                        (place, pieces), ahead = ahead or packed(position), None
                    filled = early.num_bytes if pieces is early else 0
                    sent = Bucket(bucket.lists, pieces, bucket.num_bytes, memory=place.address, filled=filled)
                    update.send_bucket(sent)
        finally:
            parts.add(update.parts)

    def report(self) -> RefreshReport:
        """Return the report of an attempt that succeeded."""
        return RefreshReport(
            self.fields["weight_version"],
            self.num_bytes,
            time.perf_counter() - self.start,
            len(self.plan.layout.buckets) if self.num_buckets is None else self.num_buckets,
            self._fingerprints,
            self._digest,
            dict(self.engines),
            self.parts,
        )
