"""Engines of one and two ranks that are processes of their own: a rank raises, or is killed, at each step of a refresh.

Each rank is a `WeightUpdater` over the small fake model.  The ranks vote over gloo, with a deadline, and receive the
tensors over a group with the trainer, which is this process.  The bits of its memory show a rank's version.  A
rank that was killed ends its engine.  Until then the survivor must be at one version.  The new engine, started with the
old version, must take a refresh.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.announcements import bucket_fields
from tests.faults.engines import Outcome, Wrong
from tests.faults.injections import Place, hook, place_of
from tests.faults.killed import forkserver
from tests.faults.matrix import Played
from tests.logical_weights_fake import FakeWeights, version
from tests.loopback_updater import broadcast_source
from weight_sync.bucket import pack
from weight_sync.errors import TransportError, WeightSyncError
from weight_sync.process_group import GroupHandle, free_port, init_process_group
from weight_sync.receivers.distributed import FLATTENED_BUCKET
from weight_sync.staging import StagingMode
from weight_sync.transaction import WeightTransaction
from weight_sync.updater import WeightUpdater

How = Literal["raises", "killed"]
STEPS = ("begin", "first", "middle", "last", "verify", "commit", "after the vote")
_BUCKETS = ("first", "middle", "last")
_OLD, _NEW, _GOOD = 0, 1, 2  # seeds of contents, and labels
_ENGINE_TIMEOUT_S = 1.5
_DEADLINE_S = 20.0


@dataclass(frozen=True)
class RankCell:
    ranks: int
    how: How
    step: str
    staging: StagingMode

    @property
    def allowed(self) -> set[Outcome]:
        """A rank that dies after the last vote leaves the others with the new version."""
        if self.step == "after the vote":
            return {"new"} if self.ranks > 1 else {"old"}
        return {"old", "POISONED"} if self.staging == "in_place" else {"old"}


def cells(staging: StagingMode, ranks: int) -> Iterator[RankCell]:
    for how in How.__args__:  # type: ignore[attr-defined]
        for step in STEPS:
            if (how, step) != ("raises", "after the vote"):  # nothing is called there that could raise
                yield RankCell(ranks, how, step, staging)


def play(cell: RankCell) -> Played:
    start = time.perf_counter()
    outcome, wrong = None, None
    try:
        outcome = _play(cell)
    except Wrong as error:
        wrong = str(error)
    title = f"receiver rank {cell.how}"
    where = f"{cell.ranks} rank{'s' * (cell.ranks > 1)}"
    return Played(title, cell.step, where, cell.staging, outcome, wrong, time.perf_counter() - start)


def _play(cell: RankCell) -> Outcome:
    engine = RankedEngine(cell.ranks, cell.staging)
    try:
        engine.ask(cell.ranks - 1, "arm", step=cell.step, how=cell.how)
        engine.refresh(_NEW)
        for rank in engine.alive:
            with suppress(_Refused):
                engine.ask(rank, "abort")
        outcome = engine.outcome()
        if (cell.how == "killed") != (len(engine.alive) < cell.ranks):
            raise Wrong(f"{len(engine.alive)} of {cell.ranks} ranks are alive")
        if outcome is not None and outcome not in cell.allowed:
            raise Wrong(f"{outcome}, and not {' or '.join(sorted(cell.allowed))}")
        if cell.how == "killed":
            engine.close()
            engine = RankedEngine(cell.ranks, cell.staging)
            outcome = outcome or engine.outcome()
        refused = engine.refresh(_GOOD)
        if refused:
            raise Wrong(f"a good refresh is refused: {refused[0]}")
        if engine.contents() != [(_GOOD, str(_GOOD), None)] * cell.ranks:
            raise Wrong(f"after a good refresh the ranks hold {engine.contents()}")
        assert outcome is not None
        return outcome
    finally:
        engine.close()


class _Refused(Exception):
    """The rank's answer is an error."""


class _Gone(Exception):
    """The rank is dead."""


class RankedEngine:
    """The ranks of one engine, and the trainer's end of the group with them."""

    def __init__(self, ranks: int, staging: StagingMode) -> None:
        self._pipes: list[Connection | None] = []
        self._processes = []
        vote_port = free_port()
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            arguments = (theirs, rank, ranks, staging, vote_port)
            process = forkserver().Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._ranks = ranks
        self._group = self._join()

    @property
    def alive(self) -> list[int]:
        return [rank for rank, pipe in enumerate(self._pipes) if pipe is not None]

    def refresh(self, seed: int) -> list[str]:
        """Refresh all ranks; return the refusals.  No bucket follows a refused one, but the end comes all the same."""
        named = sorted(version(seed).items(), key=lambda item: -item[1].element_size())
        refused = self.ask_all("begin", weight_version=str(seed))
        if refused:
            return refused
        for start in range(len(_BUCKETS)):
            refused += [] if refused else self._send(named[start :: len(_BUCKETS)], _BUCKETS[start])
        refused += self.ask_all("verify")
        return refused + self.ask_all("commit")

    def outcome(self) -> Outcome | None:
        """Return the version that the living ranks hold, None if there are none.  Raises `Wrong` if they disagree."""
        found = {
            "POISONED" if torn is not None else {_OLD: "old", _NEW: "new"}.get(seed, "a mixture")  # type: ignore[arg-type]
            for seed, label, torn in self.contents()
        }
        odd = [(seed, label) for seed, label, torn in self.contents() if torn is None and str(seed) != label]
        if odd or len(found) > 1 or "a mixture" in found:
            raise Wrong(f"the ranks hold (content, label, torn) {self.contents()}")
        return found.pop() if found else None  # type: ignore[return-value]

    def contents(self) -> list[tuple[int | None, str, str | None]]:
        return [self.ask(rank, "content") for rank in self.alive]

    def ask(self, rank: int, verb: str, **arguments: Any) -> Any:
        """Ask a rank and return its answer.  Raises `_Refused`, `_Gone`, or `Wrong` for no answer at all."""
        self._tell(rank, verb, arguments)
        return self._hear(rank, verb)

    def ask_all(self, verb: str, meanwhile: Callable[[], None] | None = None, **arguments: Any) -> list[str]:
        """Ask all ranks at once; return the refusals with their reasons."""
        refused = []
        asked = self.alive
        for rank in asked:
            self._tell(rank, verb, arguments)
        if meanwhile is not None:
            meanwhile()
        for rank in asked:
            try:
                self._hear(rank, verb)
            except (_Refused, _Gone) as error:
                refused.append(f"rank {rank}: {error}")
        return refused

    def close(self) -> None:
        self._group.destroy()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join(_DEADLINE_S)
            if pipe is not None:
                pipe.close()
        self._pipes = [None] * self._ranks

    def _join(self) -> GroupHandle:
        port = free_port()
        name = f"ranks-{port}"
        for rank in range(self._ranks):
            self._tell(rank, "join", {"port": port, "group_name": name})
        group = init_process_group("127.0.0.1", port, 0, 1 + self._ranks, name, "gloo", _DEADLINE_S)
        for rank in range(self._ranks):
            self._hear(rank, "join")
        return group

    def _send(self, named: list[tuple[str, torch.Tensor]], point: str) -> list[str]:
        def broadcast() -> None:
            with suppress(TransportError):  # a rank is dead: the answers show it
                self._group.finish(self._group.start_broadcast(pack(named)), time.monotonic() + _ENGINE_TIMEOUT_S)

        fields = bucket_fields(named, self._group.name, FLATTENED_BUCKET)
        return self.ask_all("receive", broadcast, point=point, fields=fields)

    def _tell(self, rank: int, verb: str, arguments: dict[str, Any]) -> None:
        pipe = self._pipes[rank]
        assert pipe is not None
        with suppress(BrokenPipeError):  # `_hear` finds out
            pipe.send((verb, arguments))

    def _hear(self, rank: int, verb: str) -> Any:
        pipe = self._pipes[rank]
        assert pipe is not None
        if not pipe.poll(_DEADLINE_S):
            raise Wrong(f"{_DEADLINE_S:g} s went by before rank {rank} answered {verb}")
        try:
            error, result = pipe.recv()
        except (EOFError, ConnectionResetError):
            pipe.close()
            self._pipes[rank] = None
            raise _Gone(f"it died in {verb}") from None
        if error is not None:
            raise _Refused(error)
        return result


# --- a rank ------------------------------------------------------------------------------------------------------


class _Trap:
    """Springs once, at the step for which it is set."""

    def __init__(self) -> None:
        self.step: str | None = None
        self.how: How = "raises"

    def at(self, step: str) -> None:
        if self.step != step:
            return
        self.step = None
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"{step} was made to fail")


class _Rank:
    def __init__(self, rank: int, ranks: int, staging: StagingMode, vote_port: int) -> None:
        self.trap = _Trap()
        self.label = str(_OLD)
        self.bucket = ""
        self._number = rank
        self._ranks = ranks
        self._weights = FakeWeights(_OLD)
        self._votes = self._vote_group(vote_port) if ranks > 1 else None
        self._set_traps(staging)
        self._updater = WeightUpdater(
            self._weights, device="cpu", timeout_s=_ENGINE_TIMEOUT_S, vote=self._vote, staging=staging
        )
        self._updater.groups._timeout_s = _DEADLINE_S  # torch may take seconds to look up a host's name

    def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        if verb == "arm":
            self.trap.step, self.trap.how = arguments["step"], arguments["how"]
        elif verb == "join":
            self._updater.groups.init(
                "127.0.0.1", arguments["port"], 1 + self._number, 1 + self._ranks, arguments["group_name"], "gloo"
            )
        elif verb == "receive":
            self.bucket = arguments["point"]
            self._updater.receive(broadcast_source(self._updater, **arguments["fields"]))
        elif verb == "commit":
            self.label = self._updater.commit().weight_version or ""
            self.trap.at("after the vote")
        elif verb == "content":
            return self._content(), self.label, self._updater.torn
        else:
            getattr(self._updater, verb)(**arguments)
        return None

    def _content(self) -> int | None:
        held = self._weights.snapshot()
        return next((seed for seed in (_OLD, _NEW, _GOOD) if FakeWeights(seed).snapshot() == held), None)

    def _vote(self, mine: bool) -> bool:
        if self._votes is None:
            return mine
        ballot = torch.tensor([int(mine)])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        options.timeout = datetime.timedelta(seconds=_ENGINE_TIMEOUT_S)
        assert self._votes.process_group is not None
        try:
            self._votes.process_group.allreduce([ballot], options).wait()
        except RuntimeError:
            os._exit(1)  # in doubt, as the engine is
        return bool(ballot.item())

    def _vote_group(self, port: int) -> GroupHandle:
        return init_process_group("127.0.0.1", port, self._number, self._ranks, f"votes-{port}", "gloo", _DEADLINE_S)

    def _set_traps(self, staging: StagingMode) -> None:
        """Set the traps for the life of the process."""
        hook(WeightTransaction, "__init__", lambda _: self.trap.at("begin")).start()
        for step, now in (("first", lambda: self.bucket), ("verify", lambda: "verify"), ("commit", lambda: "commit")):
            self._trap(place_of(step, staging), now)

    def _trap(self, place: Place, step: Callable[[], str]) -> None:
        hook(place.owner, place.name, lambda number: self.trap.at(step()) if number >= place.call else None).start()


def _rank_main(pipe: Connection, rank: int, ranks: int, staging: StagingMode, vote_port: int) -> None:
    torch.set_num_threads(1)
    me = _Rank(rank, ranks, staging, vote_port)
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, me.answer(verb, arguments)))
        except (WeightSyncError, RuntimeError) as error:
            pipe.send((f"{type(error).__name__}: {error}", None))
