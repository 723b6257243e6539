"""`WeightQueue`: the weight verbs, one at a time, in the order in which they came.

A verb has up to two parts.  The I/O part (rendezvous, receiving, checking) runs on a thread of its own while the
engine generates.  The step part (commit, publish) runs between two steps on the scheduler's thread.  The thread that
moves bytes gets less of the processor than steps (`io_thread`); a thread that holds the interpreter for long gets as
much.

    verb -> queue -> [I/O thread: receive / verify] -> step boundary: commit -> publish -> reply

On several ranks every rank has a queue.  A verb that one rank cannot plan, or whose I/O fails there, has failed on all.
The step parts run on all ranks of an engine in the same turn.  A verb whose deadline has passed when its turn comes is
not planned.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from rollout.control.io_thread import IoThread
from rollout.control.rank_consensus import RankConsensus, VerbMark
from rollout.core.errors import FatalError
from rollout.core.messages.message import ControlReqInput, Reply, failure
from rollout.scheduler.scheduler import Scheduler, VerbHandler
from weight_sync.waiting import Patience


def _on_threads(count: int, call: Callable[[], Any]) -> Any:
    """Call `call` with `count` threads for the operators of this one."""
    torch.set_num_threads(count)
    return call()


@dataclass(frozen=True)
class Job:
    """The parts of a verb: `io` runs on the I/O thread, then `step` with its result at a step boundary.

    `step` returns the message and the reply.  `holds_steps`: no step may run during `io`.  `roll_back(reason)`, on the
    I/O thread, undoes `io` after it failed on another rank.  `waits`: the job's wait for a sender, which is cut short
    for a later verb that must not wait as long.  `is_brief`: `io` takes some tenths of a second at most, nearly all in
    the interpreter, and launches no work on a device.  `starts_threads`: `io` starts threads that stay, and will
    work next to steps.
    """

    verb: ControlReqInput[Any]
    io: Callable[[], Any]
    step: Callable[[Any], tuple[str, Reply]]
    holds_steps: bool = False
    roll_back: Callable[[str], None] | None = None
    waits: Patience | None = None
    is_brief: bool = False
    starts_threads: bool = False


class WeightQueue:
    """Calls `starting(verb)` before each verb is planned, and `finished(verb, succeeded)` after its job.

    `settle(waiting)` is called before each job and after it, with the verbs that wait and the times at which they
    came.  It returns the time of its next call, if no verb comes.  All of them run on the scheduler's thread.
    `wait_limit(verb, job)`: the seconds that the job before may wait for its sender while `verb` waits; None: no limit.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        wake: Callable[[], None],
        consensus: RankConsensus,
        *,
        starting: Callable[[ControlReqInput[Any]], None],
        finished: Callable[[ControlReqInput[Any], bool], None],
        settle: Callable[[Iterable[tuple[float, ControlReqInput[Any]]]], float],
        wait_limit: Callable[[ControlReqInput[Any], Job], float | None],
    ) -> None:
        self._scheduler = scheduler
        self._wake = wake
        self._consensus = consensus
        self._starting = starting
        self._finished = finished
        self._settle = settle
        self._wait_limit = wait_limit
        self._num_threads = torch.get_num_threads()  # also fixes this thread's own number
        device = scheduler.cache.pool.table.device
        self._io = IoThread(device)
        # A thread that waits for a processor may hold the interpreter, and then steps wait with it.  So it must not
        # wait for longer than steps would.
        self._brief = ThreadPoolExecutor(1, thread_name_prefix="weight-brief")
        self._planners: dict[type, Callable[[Any], Job]] = {}
        self._waiting: deque[tuple[float, ControlReqInput[Any]]] = deque()  # with the times at which they came
        self._num_started = 0
        self._job: Job | None = None
        self._future: Future[object] | None = None

    @property
    def busy(self) -> bool:
        """True while a job is under way: its I/O thread owns the data that it works on."""
        return self._job is not None

    @property
    def is_empty(self) -> bool:
        """True while no verb is under way or waits for its turn."""
        return self._job is None and not self._waiting

    def add(self, planners: dict[type, Callable[[Any], Job]]) -> None:
        """Add verbs that take their turn here, by message type."""
        self._planners.update(planners)

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        return dict.fromkeys(self._planners, self.put)

    def put(self, verb: ControlReqInput[Any]) -> None:
        """Put the verb into the queue."""
        self._waiting.append((self._scheduler.now, verb))
        self.call()

    def call(self) -> None:
        """Let `advance` run at the next step boundary.  May be called from any thread."""
        self._scheduler.agenda.call(self.advance)

    def advance(self) -> None:
        """Finish the job whose I/O is done, start the next."""
        while True:
            if self._job is None:
                deadline = self._settle(self._waiting)
                if not self._waiting:
                    self._scheduler.agenda.call_at(self.advance, deadline)
                    return
                self._start(self._waiting.popleft()[1])
                continue
            if not self._is_done():
                self._end_waits(self._job)
                if self._asks_each_turn(self._job):
                    self.call()
                return
            self._finish()

    def _asks_each_turn(self, job: Job) -> bool:
        """Return whether `advance` must run in every turn, not only at the end of the I/O.

        It must if ranks have to agree on that end, or if a verb may cut the I/O short.
        """
        return self._scheduler.parallel.tp.size > 1 or (job.waits is not None and bool(self._waiting))

    def _end_waits(self, job: Job) -> None:
        if job.waits is None:
            return
        for came, verb in self._waiting:
            seconds = self._wait_limit(verb, job)
            if seconds is not None and self._scheduler.now >= came + seconds:
                job.waits.give_up(f"{type(verb).__name__.removesuffix('ReqInput')} came {seconds:g} s ago or earlier")

    @property
    def _published(self) -> tuple[str, int]:
        epoch = self._scheduler.runner.state.epoch
        return epoch.weight_version, epoch.weight_epoch

    def _is_done(self) -> bool:
        """Return whether the I/O part is over on all ranks of this engine."""
        assert self._future is not None
        mine = self._future.done()
        everywhere = self._scheduler.parallel.tp.all_agree(mine)
        self._scheduler.poll_quickly(mine and not everywhere)
        return everywhere

    def _start(self, verb: ControlReqInput[Any]) -> None:
        self._num_started += 1
        self._starting(verb)
        try:
            job = self._plan(verb)
        except FatalError:
            raise
        except Exception as error:
            if self._consensus.is_alone:
                self._scheduler.reply(failure(verb.request_id, error))
                return
            job = _refused(verb, error)  # another replica may have planned it
        if job.holds_steps:
            self._scheduler.serving.write(True)
        self._job = job
        if job.waits is not None:
            job.waits.renew()
        epoch = self._scheduler.runner.state.epoch
        mark = VerbMark(self._num_started, verb.request_id, epoch.weight_version, epoch.weight_epoch)
        # While steps run, one thread: two teams that want the same cores wait for each other most of the time.
        count = 1 if self._scheduler.has_work else self._num_threads
        io = functools.partial(_on_threads, count, job.io)
        work = functools.partial(self._consensus.run, mark, io, job.roll_back)
        gives_way = self._scheduler.has_work or job.starts_threads
        self._future = self._brief.submit(work) if job.is_brief else self._io.submit(work, gives_way=gives_way)
        self._future.add_done_callback(self._on_done)

    def _on_done(self, _: Future[Any]) -> None:
        """Note the end of the I/O part, on its thread."""
        self.call()
        self._wake()

    def _plan(self, verb: ControlReqInput[Any]) -> Job:
        verb.require_in_time(self._scheduler.now)
        return self._planners[type(verb)](verb)

    def _finish(self) -> None:
        job, future = self._job, self._future
        assert job is not None and future is not None
        self._job = self._future = None
        published = self._published
        try:
            try:
                result = future.result()
            finally:
                del future  # its error would hold this frame, and this frame the error
            message, reply = job.step(result)
            answer = job.verb.answer(reply, message)
        except FatalError:
            raise
        except Exception as error:
            if self._published != published:  # a failure would mean that nothing changed
                version, kind = self._published[0], type(error).__name__
                raise FatalError(f"weight version {version!r} was published, and then {kind}: {error}") from error
            answer = failure(job.verb.request_id, error)
        self._finished(job.verb, answer.success)
        self._settle(self._waiting)
        self._scheduler.reply(answer)


def nothing() -> None:
    """Do nothing, as the I/O part of a verb that has none; it still takes its turn in the queue."""


def replies(message: str, reply: Reply) -> Callable[[Any], tuple[str, Reply]]:
    """Return the step part of a verb that only answers."""
    return lambda _: (message, reply)


def _refused(verb: ControlReqInput[Any], error: Exception) -> Job:
    """Return the job of a verb that this rank cannot plan.  The others learn of it as of any failure."""

    def io() -> None:
        raise error

    def step(_: Any) -> tuple[str, Reply]:
        raise AssertionError("it has failed")

    return Job(verb, io, step)
