"""`/weights_checker`: fingerprint the weights that serve, take a snapshot, compare with it, or fill all with NaN.

`/weight_checker`, of vLLM's trainers, keeps no snapshot: it compares with the fingerprints that the caller sends.

Reading takes its turn in the weight verbs' queue and runs on their I/O thread, so no commit runs meanwhile.  Filling
with NaN happens between two steps and leaves the engine poisoned until a complete refresh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollout.control.weight_queue import Job
from rollout.core.errors import BadRequest, Conflict
from rollout.core.messages.weight_check import WeightCheckReply, WeightCheckReqInput
from rollout.core.messages.weight_replies import CheckerReply, DropSnapshotReply
from rollout.core.messages.weights import DropWeightSnapshotReqInput, WeightsCheckerReqInput
from rollout.scheduler.scheduler import Scheduler
from weight_sync.checker import (
    Difference,
    WeightSnapshot,
    compare,
    live_fingerprints,
    reset_tensors,
    resettable,
    take_snapshot,
)
from weight_sync.errors import listed
from weight_sync.fingerprint import digest, fingerprint_hex
from weight_sync.updater import WeightUpdater

RESET_REASON = "a reset by the weight checker filled them with NaN"
_REJECTED_BASELINE = "only action compare takes a baseline, and needs it: the checksums of an earlier answer, by name"


class WeightChecker:
    """Holder of the snapshot."""

    def __init__(self, scheduler: Scheduler, updater: WeightUpdater) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._state = scheduler.runner.state
        self._weights = self._state.model.weights
        self._snapshot: WeightSnapshot | None = None
        self._snapshot_version = ""
        self._actions: dict[str, Callable[[WeightsCheckerReqInput], Job]] = {
            "checksum": self._checksum,
            "snapshot": self._take_snapshot,
            "compare": self._compare,
            "reset_tensors": self._reset,
        }

    @property
    def jobs(self) -> dict[type, Callable[[Any], Job]]:
        return {
            WeightsCheckerReqInput: self._plan,
            DropWeightSnapshotReqInput: self._drop_snapshot,
            WeightCheckReqInput: self._check,
        }

    def _plan(self, verb: WeightsCheckerReqInput) -> Job:
        return self._actions[verb.action](verb)

    def _require_content(self) -> None:
        if self._scheduler.serving.content_lost:
            raise Conflict("the weights' memory is released; there is nothing to check")
        if self._updater.is_dirty:
            self._updater.require_none_open("the model holds parts of two versions")

    def _checksum(self, verb: WeightsCheckerReqInput) -> Job:
        def io() -> dict[str, int]:
            _refuse_skip(verb)
            return self._read()

        def step(fingerprints: dict[str, int]) -> tuple[str, CheckerReply]:
            expected = self._state.epoch.content_digest
            if expected is None and self._scheduler.serving.poisoned is None:
                self._updater.model.content.note_live(fingerprints)
                self._state.note_digests(self._updater.model.content.digests)
            held = self._digest(fingerprints)
            return "Success.", CheckerReply(
                checksums=_in_hex(fingerprints),
                digest=self._as_sent(held),
                held_digest=held,
                expected_digest=expected,
            )

        return Job(verb, io, step)

    def _read(self) -> dict[str, int]:
        """Return the fingerprints of the tensors in memory, by name.  Raises `Conflict`, `CopiesDifferError`."""
        self._require_content()
        return live_fingerprints(self._weights, self._updater.exchange)

    def _take_snapshot(self, verb: WeightsCheckerReqInput) -> Job:
        def io() -> WeightSnapshot:
            _refuse_skip(verb)
            self._require_content()
            self._snapshot = None  # its memory is free before the next one is taken
            return take_snapshot(self._weights, verb.keep_content, self._updater.exchange)

        def step(snapshot: WeightSnapshot) -> tuple[str, CheckerReply]:
            self._snapshot = snapshot
            self._snapshot_version = self._state.epoch.weight_version
            held = self._digest(snapshot.fingerprints)
            return "Snapshot taken.", CheckerReply(
                num_tensors=len(snapshot.fingerprints),
                num_bytes=snapshot.num_bytes,
                digest=self._as_sent(held),
                held_digest=held,
                weight_version=self._snapshot_version,
            )

        return Job(verb, io, step)

    def _compare(self, verb: WeightsCheckerReqInput) -> Job:
        def io() -> list[Difference]:
            self._require_content()
            if self._snapshot is None:
                raise Conflict("there is no snapshot to compare with; take one with action snapshot")
            return compare(self._weights, self._snapshot, verb.skip_tensor_list or (), self._updater.exchange)

        def step(differing: list[Difference]) -> tuple[str, CheckerReply]:
            num_compared = len(self._weights.metas()) - len(set(verb.skip_tensor_list or ()))
            reply = CheckerReply(
                equal=not differing,
                num_compared=num_compared,
                differing=[dataclasses.asdict(difference) for difference in differing],
                snapshot_weight_version=self._snapshot_version,
            )
            if not differing:
                return "All tensors are equal to the snapshot.", reply
            names = [", ".join([difference.name, *difference.places]) for difference in differing]
            count = f"{len(names)} of {num_compared}"
            return f"{count} tensors differ from the snapshot: {listed(names, 3)}.", reply

        return Job(verb, io, step)

    def _reset(self, verb: WeightsCheckerReqInput) -> Job:
        def step(names: list[str]) -> tuple[str, CheckerReply]:
            return self._fill(names), CheckerReply(num_tensors=len(names), poisoned=RESET_REASON)

        return Job(verb, lambda: self._resettable(verb.skip_tensor_list or ()), step)

    def _resettable(self, skip: Collection[str] = ()) -> list[str]:
        """Return the names of the tensors that may be filled now.  Raises `Conflict` and what `resettable` does."""
        if self._scheduler.serving.content_lost:
            raise Conflict("the weights' memory is released; there is nothing to reset")
        self._updater.require_none_open("the tensors cannot be reset")
        return resettable(self._weights, skip)

    def _fill(self, names: list[str]) -> str:
        """Fill the tensors with NaN, which ends all requests, and return the message for the caller."""
        with self._state.mutate("tensor reset"):
            self._scheduler.poison(RESET_REASON)
            reset_tensors(self._weights, names, self._weights.held_formats())
        return f"{len(names)} tensors hold NaN until a complete refresh."

    def _check(self, verb: WeightCheckReqInput) -> Job:
        """Plan the call of a vLLM trainer.  Raises `BadRequest`."""
        baseline = verb.baseline
        if (baseline is None) == (verb.action == "compare"):
            raise BadRequest(_REJECTED_BASELINE)

        def filled(names: list[str]) -> tuple[str, WeightCheckReply]:
            return self._fill(names), WeightCheckReply(status="reset")

        def read(fingerprints: dict[str, int]) -> tuple[str, WeightCheckReply]:
            checksums = _in_hex(fingerprints)
            if baseline is None:
                return "Success.", WeightCheckReply(checksums=checksums)
            names = sorted(name for name in {*checksums, *baseline} if checksums.get(name) != baseline.get(name))
            return f"{len(names)} tensors differ.", WeightCheckReply(match=not names, mismatches=names)

        return Job(verb, self._resettable, filled) if verb.action == "reset" else Job(verb, self._read, read)

    def _drop_snapshot(self, verb: DropWeightSnapshotReqInput) -> Job:
        def step(_: None) -> tuple[str, DropSnapshotReply]:
            held, self._snapshot = self._snapshot, None
            if held is None:
                return "There is no snapshot.", DropSnapshotReply(num_bytes=0)
            return "Snapshot dropped.", DropSnapshotReply(num_bytes=held.num_bytes)

        return Job(verb, lambda: None, step)

    def _digest(self, fingerprints: Mapping[str, int]) -> str:
        metas = self._weights.metas()
        return digest((metas[name], value) for name, value in fingerprints.items())

    def _as_sent(self, held: str) -> str:
        """Return the digest of the content as sent if `held` is the digest that it has in memory; else `held`."""
        epoch = self._state.epoch
        return epoch.content_digest if held == epoch.held_digest and epoch.content_digest is not None else held


def _in_hex(fingerprints: Mapping[str, int]) -> dict[str, str]:
    return {name: fingerprint_hex(value) for name, value in fingerprints.items()}


def _refuse_skip(verb: WeightsCheckerReqInput) -> None:
    if verb.skip_tensor_list:
        raise BadRequest(f"skip_tensor_list goes with compare and reset_tensors, not with {verb.action}")
