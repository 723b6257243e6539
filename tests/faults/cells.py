"""The faults, where each can occur, and what may serve after it.

A cell is a fault at a point of a refresh over a transport into an engine of a staging mode.  Each fault has a verdict:

    KEPT      the old version serves, bit for bit; in mode in_place the engine may report that it is poisoned
    TAKEN     the fault must not disturb the refresh: the new version serves
    EITHER    one of the two
    TORN      the old content cannot be put back: the engine must report it
    ENDS      no rank can know whether the others have the new version: the engine must end with the reason
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

from rollout.core.messages.io_struct import (
    AbortReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
)
from tests.faults import changes, injections
from tests.faults.engines import Engine, Outcome, Wrong
from tests.faults.trainers import BUCKETS, PULL, TRANSPORTS, Point, Sabotage, Trainer
from tests.faults.transports import Damage
from weight_sync.delta.durable import locked
from weight_sync.delta.local_state import LOCK_FILE, SYNC_FOLDER
from weight_sync.staging import StagingMode

STAGINGS: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")
Verdict = Literal["KEPT", "TAKEN", "EITHER", "TORN", "ENDS"]
LATE: tuple[Point, ...] = (*BUCKETS, "between")
ENDS: tuple[Point, ...] = ("verify", "commit")


@dataclass(frozen=True)
class Fault:
    """`late`: the verdict at the point "between", when everything has been verified.

    `on_pull`: the fault where one call brings a whole version; None: it cannot occur there.
    `aborts`: the fault may abort requests.
    """

    title: str
    points: tuple[Point, ...]
    verdict: Verdict
    sabotage: Sabotage
    late: Verdict | None = None
    transports: tuple[str, ...] = TRANSPORTS
    stagings: tuple[StagingMode, ...] = STAGINGS
    on_pull: Fault | None = None
    aborts: bool = False


@dataclass(frozen=True)
class Cell:
    fault: Fault
    point: Point
    transport: str
    staging: StagingMode

    @property
    def sabotage(self) -> Sabotage:
        return replace(self.fault.sabotage, point=self.point)

    @property
    def allowed(self) -> frozenset[Outcome]:
        verdict = self.fault.verdict
        if self.point == "between" and self.fault.late is not None:
            verdict = self.fault.late
        if verdict == "TORN":
            return frozenset({"POISONED"})
        if verdict == "ENDS":
            return frozenset({"ENDED"})
        allowed: set[Outcome] = set()
        if verdict in ("TAKEN", "EITHER"):
            allowed.add("new")
        if verdict in ("KEPT", "EITHER"):
            allowed.add("old")
            if self.staging == "in_place":
                allowed.add("POISONED")
        return frozenset(allowed)

    def __str__(self) -> str:
        return f"{self.fault.title} | {self.point} | {self.transport} | {self.staging}"


# --- what happens meanwhile --------------------------------------------------------------------------------------


def _pause(mode: str) -> Callable[[Trainer], None]:
    def event(trainer: Trainer) -> None:
        trainer.engine.call(PauseGenerationReqInput, mode=mode)

    return event


def _abort_requests(trainer: Trainer) -> None:
    trainer.engine.channel.inbox.append(AbortReqInput(abort_all=True))
    trainer.engine.tick()


def _flush(trainer: Trainer) -> None:
    trainer.engine.call(FlushCacheReqInput)  # refused while a request runs, which does not concern the refresh


def _release(trainer: Trainer) -> None:
    engine = trainer.engine
    if engine.call(ReleaseMemoryOccupationReqInput, tags=["weights"]).success:
        raise Wrong("weights were released in the middle of their refresh")
    if engine.call(ReleaseMemoryOccupationReqInput, tags=["kv_cache"]).success:
        engine.call(ResumeMemoryOccupationReqInput, tags=["kv_cache"])


def _lapse(trainer: Trainer) -> None:
    trainer.engine.lapse()


def _other_begins(trainer: Trainer) -> None:
    if trainer.engine.call(BeginWeightUpdateReqInput, weight_version="another's").success:
        raise Wrong("two weight updates are open")


def _other_sends(trainer: Trainer) -> None:
    content = trainer.engine.zoo.contents[trainer.engine.in_force.content]
    answers = trainer.send(sorted(content.items())[:5], "another's")
    if any(answer.success for answer in answers):
        raise Wrong("a bucket of another version was taken")


def _other_ends(trainer: Trainer) -> None:
    if trainer.engine.call(EndWeightUpdateReqInput).success:
        raise Wrong("the update was ended by another trainer")


def _other_aborts(trainer: Trainer) -> None:
    if trainer.engine.call(AbortWeightUpdateReqInput).success:
        raise Wrong("the update was aborted by another trainer")


def _other_pulls(engine: Engine, point: str) -> AbstractContextManager[None]:
    """Hold the lock of the local checkpoint, as another process would, for longer than the engine waits."""
    return locked(engine.scratch / "local" / SYNC_FOLDER / LOCK_FILE, shared=False, timeout_s=0.0)


# --- the table ---------------------------------------------------------------------------------------------------


def _content(title: str, **what: object) -> Fault:
    """Return a fault in one bucket: the update is spoilt, unless everything was verified before."""
    sabotage = Sabotage("first", **what)  # type: ignore[arg-type]
    on_pull = Fault(title, BUCKETS, "KEPT", sabotage)
    return Fault(title, LATE, "KEPT", sabotage, late="TAKEN", on_pull=on_pull)


def _event(title: str, event: Callable[[Trainer], None], verdict: Verdict = "TAKEN", **rest: object) -> Fault:
    return Fault(title, LATE, verdict, Sabotage("first", event=event), **rest)  # type: ignore[arg-type]


def _meanwhile(title: str, event: Callable[[Trainer], None], aborts: bool = False) -> Fault:
    """Return a fault for an event that must not disturb a refresh, nor a pull that is under way."""
    fault = _event(title, event, aborts=aborts)
    return replace(fault, on_pull=replace(fault, points=("middle",)))


def _damage_on_pull(title: str, damage: Damage) -> Fault:
    return Fault(title, BUCKETS, "KEPT", Sabotage("first", damage=damage))


def _faults() -> Iterator[Fault]:
    yield from _faults_of_senders()
    yield from _faults_of_receivers()
    yield from _faults_of_others()


def _faults_of_senders() -> Iterator[Fault]:
    killed = Fault(
        "sender killed",
        BUCKETS,
        "KEPT",
        Sabotage("first", damage="killed"),
        on_pull=Fault("sender killed", ("last",), "KEPT", Sabotage("last", damage="killed")),
    )
    yield killed
    yield Fault("sender killed", ("between",), "KEPT", Sabotage("between", dies=True))
    yield _content("byte flipped", damage="flipped")
    yield _content("truncated", damage="truncated")
    repeated = Sabotage("last", twice=True)
    yield replace(_content("repeated", twice=True), on_pull=Fault("repeated", ("last",), "TAKEN", repeated))
    yield replace(_content("reordered", change=changes.exchanged), on_pull=_damage_on_pull("reordered", "reordered"))
    yield _content("renamed", change=changes.renamed)
    yield _content("NaN planted", change=changes.with_nan, announced=True)


def _faults_of_receivers() -> Iterator[Fault]:
    for title, points, inject in (
        ("receiver raises", (*BUCKETS, *ENDS), injections.raising),
        ("derived tensors raise", ("commit",), injections.derived_raising),
        ("vote lost", ENDS, injections.vote_lost),
        ("vote raises", ("verify",), injections.vote_raising),
    ):
        fault = Fault(title, points, "KEPT", Sabotage("first", inject=inject))  # type: ignore[arg-type]
        yield replace(fault, on_pull=fault)
    doubt = Fault("vote raises", ("commit",), "ENDS", Sabotage("commit", inject=injections.vote_raising))
    yield replace(doubt, on_pull=doubt)
    torn = Fault("restoring fails too", ("commit",), "TORN", Sabotage("commit", inject=injections.restore_raising))
    yield replace(torn, on_pull=torn)
    full = Fault("disk full", BUCKETS, "KEPT", Sabotage("first", inject=injections.disk_full))
    yield replace(full, stagings=("journal",))
    yield replace(full, transports=(PULL,), on_pull=full)
    vanished = _damage_on_pull("file gone before it is read", "vanished")
    yield replace(vanished, transports=("disk", PULL), on_pull=vanished)
    going = Fault("file vanishes while it is read", BUCKETS, "KEPT", Sabotage("first", inject=injections.files_vanish))
    on_pull = replace(going, points=("middle",), verdict="EITHER")  # deltas may have been read by then
    yield replace(going, transports=("disk", PULL), on_pull=on_pull)


def _faults_of_others() -> Iterator[Fault]:
    yield _event("lease runs out", _lapse, "KEPT")
    locks = Fault("two trainers: the second pulls", ("first",), "KEPT", Sabotage("first", inject=_other_pulls))
    yield replace(locks, transports=(PULL,), on_pull=locks)
    yield _event("two trainers: the second begins", _other_begins)
    yield _event("two trainers: the second sends", _other_sends)
    yield _event("two trainers: the second ends", _other_ends)
    yield _event("two trainers: the second aborts", _other_aborts)
    for mode in ("abort", "retract", "in_place"):
        yield _meanwhile(f"pause ({mode})", _pause(mode), aborts=mode == "abort")
    yield _meanwhile("abort of all requests", _abort_requests, aborts=True)
    yield _meanwhile("flush of the cache", _flush)
    yield _event("release of memory", _release)


FAULTS: tuple[Fault, ...] = tuple(_faults())


def cells(staging: StagingMode, transport: str) -> Iterator[Cell]:
    """Yield the cells that can occur."""
    for fault in FAULTS:
        if transport not in fault.transports or staging not in fault.stagings:
            continue
        here = fault.on_pull if transport == PULL else fault
        for point in () if here is None else here.points:
            yield Cell(here, point, transport, staging)  # type: ignore[arg-type]
