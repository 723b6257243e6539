"""`StepProfiler`: a trace of torch's profiler over some steps, one file for each rank.

The trace is taken by `torch.autograd.profiler.profile`, on which `torch.profiler.profile` is built.  The latter imports
torch's compiler when it starts: each rank would keep 140 MB for good, and no step would run for seconds.

    start_profile ... steps ... stop_profile, or the last of `num_steps` -> PREFIX-ID-rank-R.trace.json.gz

A trace is held in memory until it is written, so it ends by itself after `MAX_PROFILED_STEPS`.  It is written while
steps run; a second one is refused until then.  Steps count when they are finished.  So if they overlap, the trace has
the launch of one more.

The ranks of an engine begin, end and finish writing in the same turns.  A fault of one rank fails the call on all.
"""

from __future__ import annotations

import ctypes
import gc
import gzip
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity, supported_activities

from rollout.control.rank_consensus import PeerRankError
from rollout.core.args.named_folders import NamedFolders
from rollout.core.console import say
from rollout.core.errors import BadRequest, Conflict, status_of
from rollout.core.messages.message import failure
from rollout.core.messages.profile import (
    MAX_PROFILED_STEPS,
    ProfileReply,
    StartProfileReqInput,
    StopProfileReqInput,
)
from rollout.scheduler.scheduler import Scheduler, VerbHandler

T = TypeVar("T")
_ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


@dataclass(frozen=True)
class _Trace:
    """A recorder, the `files` of all ranks, and this rank's own."""

    recorder: profile
    files: list[str]
    own_file: str

    def start(self) -> None:
        """Record from now on."""
        self.recorder.__enter__()

    def stop(self) -> None:
        """Stop recording and gather the events."""
        self.recorder.__exit__(None, None, None)

    def write(self) -> None:
        """Write this rank's file, in the format of Chrome and Perfetto.  Raises `OSError` if it cannot be written."""
        folder, name = Path(self.own_file).parent, Path(self.own_file).name
        with tempfile.NamedTemporaryFile(dir=folder, prefix=name, suffix=".json") as plain:
            self.recorder.export_chrome_trace(plain.name)
            with open(plain.name, "rb") as trace, gzip.open(self.own_file, "wb", compresslevel=1) as packed:
                shutil.copyfileobj(trace, packed)  # torch puts a new file in the place of the temporary one


class StepProfiler:
    """Takes at most one trace at a time.  A thread writes it while steps run.  `folders`: where its files may be.

    Ranks communicate only while there is a trace.
    """

    def __init__(self, scheduler: Scheduler, folders: NamedFolders) -> None:
        self._scheduler = scheduler
        self._folders = folders
        self._trace: _Trace | None = None
        self._steps_left = 0
        self._num_steps = 0  # of this rank, at the last check
        self._writing: _Trace | None = None
        self._asked: StopProfileReqInput | None = None  # the call that waits for the trace being written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="profiler")
        self._file: Future[None] | None = None  # done once that trace is written

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        return {StartProfileReqInput: self._start, StopProfileReqInput: self._stop}

    def _start(self, verb: StartProfileReqInput) -> None:
        """Start a trace.  The answer comes when the next step will be recorded on all ranks."""
        if self._trace is not None or self._file is not None:
            raise Conflict("another profile is running or being written")
        trace, error = _attempt(lambda: self._planned(verb))
        error = self._anywhere(error)
        if error is not None:
            raise error
        assert trace is not None
        _, mine = _attempt(trace.start)
        error = self._anywhere(mine)
        if error is not None:
            if mine is None:
                _attempt(trace.stop)
            raise error
        self._trace, self._num_steps = trace, self._scheduler.stats.num_steps
        self._steps_left = min(verb.num_steps or MAX_PROFILED_STEPS, MAX_PROFILED_STEPS)
        self._scheduler.agenda.call(self.advance)
        self._scheduler.reply(verb.answer(ProfileReply(files=trace.files), "Profile started."))

    def _planned(self, verb: StartProfileReqInput) -> _Trace:
        """Return the trace that this rank will record.  Raises `BadRequest`."""
        activities = {_ACTIVITIES[name] for name in verb.activities} & supported_activities()
        if not activities:
            raise BadRequest(f"nothing of {', '.join(verb.activities) or 'no activity'} can be recorded here")
        folder = _writable(verb.output_dir, self._folders)
        position, layout = self._scheduler.parallel.position, self._scheduler.parallel.layout
        name = f"{folder}/{verb.profile_prefix}-{verb.request_id}-rank"
        files = [f"{name}-{rank}.trace.json.gz" for rank in range(layout.world_size)]
        recorder = profile(
            use_cpu=ProfilerActivity.CPU in activities,
            use_device="cuda" if ProfilerActivity.CUDA in activities else None,
            use_kineto=True,
            record_shapes=verb.record_shapes,
            with_stack=verb.with_stack,
        )
        return _Trace(recorder, files, files[position.world_rank])

    def _stop(self, verb: StopProfileReqInput) -> None:
        """Stop the trace; the answer comes when the files of all ranks are there."""
        if self._trace is not None:
            self._end(self._trace, verb)
        elif self._writing is not None and self._asked is None:
            self._asked = verb
        else:
            raise Conflict("no profile is running")

    def _end(self, trace: _Trace, verb: StopProfileReqInput | None) -> None:
        self._trace, self._writing, self._asked = None, trace, verb
        _, error = _attempt(trace.stop)
        self._file = self._thread.submit(_write, trace, error)

    def _written(self, mine: BaseException | None) -> None:
        trace, verb = self._writing, self._asked
        assert trace is not None
        self._writing = self._asked = None
        error = self._anywhere(mine)
        if verb is None:
            say(f"wrote a profile to {trace.own_file}" if error is None else f"no profile was written: {error}")
        elif error is not None:
            self._scheduler.reply(failure(verb.request_id, error))
        else:
            self._scheduler.reply(verb.answer(ProfileReply(files=trace.files), "Profile written."))
        del trace  # so that nothing holds it
        self._thread.submit(_give_memory_back)

    def advance(self) -> None:
        """Count steps, end the trace after the last of them, and answer once it is written."""
        if self._trace is not None and self._is_over():
            self._end(self._trace, None)
        if self._file is not None and self._scheduler.parallel.tp.all_agree(self._file.done()):
            file, self._file = self._file, None
            self._written(file.exception())
        if self._trace is not None or self._file is not None:
            self._scheduler.agenda.call(self.advance)

    def _is_over(self) -> bool:
        """Return whether the last step has run.  A step counts on all data-parallel ranks if one had tokens for it."""
        before, self._num_steps = self._num_steps, self._scheduler.stats.num_steps
        self._steps_left -= self._scheduler.parallel.attn_dp.any_of(self._num_steps > before)
        return self._steps_left <= 0

    def _anywhere(self, mine: BaseException | None) -> Exception | None:
        """Return the error of the first rank that has one.  All ranks call this in one turn, and get the same error."""
        tp, position = self._scheduler.parallel.tp, self._scheduler.parallel.position
        if tp.size == 1 and (mine is None or isinstance(mine, Exception)):
            return mine
        reason = "" if mine is None else f"rank {position.world_rank}: {mine or type(mine).__name__}"
        status = 200 if mine is None else status_of(mine)
        found = [msgspec.msgpack.decode(data) for data in tp.gather_bytes(msgspec.msgpack.encode([reason, status]))]
        return next((PeerRankError(reason, status) for reason, status in found if reason), None)


def _attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `call`, or the error that it raises."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def _write(trace: _Trace, error: Exception | None) -> None:
    """Write the trace.  `error`: why there is nothing to write."""
    if error is not None:
        raise error
    trace.write()


def _give_memory_back() -> None:
    """Free a profile: a cycle of references to millions of small events, some hundred megabytes that would stay."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _writable(output_dir: str | None, folders: NamedFolders) -> str:
    """Return the folder, made if it is not there.  Raises `BadRequest`."""
    if output_dir is not None and not Path(output_dir).is_absolute():
        raise BadRequest("output_dir must be an absolute path")
    try:
        folder = Path(tempfile.gettempdir()) if output_dir is None else folders.writable(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
    except (OSError, ValueError, BadRequest) as error:
        raise BadRequest(f"output_dir: {error}") from None
    return str(folder)
