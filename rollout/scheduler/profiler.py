"""`StepProfiler`: a trace of torch's profiler over some steps, one file for each rank.

    start_profile ... steps ... stop_profile, or the last of `num_steps` -> PREFIX-ID-rank-R.trace.json.gz

A trace is held in memory until it is written, so it ends by itself after `MAX_PROFILED_STEPS`.  It is written beside
the steps; a second one is refused until then.

Knows the profiler's verbs and files.  Does not know what a step does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, supported_activities

from rollout.core.errors import BadRequest, Conflict
from rollout.core.io_struct import MAX_PROFILED_STEPS, ControlReqOutput, StartProfileReqInput, StopProfileReqInput
from rollout.scheduler.scheduler import Scheduler, failure

_ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


@dataclass(frozen=True)
class _Trace:
    """`until`: the step after which it ends."""

    profile: torch.profiler.profile
    files: list[str]  # of all ranks
    own_file: str
    until: int


class StepProfiler:
    """At most one trace at a time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._trace: _Trace | None = None
        self._writing: tuple[_Trace, Future[None], StopProfileReqInput | None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="profile-writer")
        scheduler.add_verbs({StartProfileReqInput: self._start, StopProfileReqInput: self._stop})
        scheduler.add_between_steps(self._advance)

    def _start(self, verb: StartProfileReqInput) -> ControlReqOutput:
        if self._trace is not None or self._writing is not None:
            raise Conflict("a profile is under way, or being written")
        activities = {_ACTIVITIES[name] for name in verb.activities} & supported_activities()
        if not activities:
            raise BadRequest(f"nothing of {', '.join(verb.activities) or 'no activity'} can be recorded here")
        folder = _writable(verb.output_dir)
        position, layout = self._scheduler.parallel.position, self._scheduler.parallel.layout
        files = [
            f"{folder}/{verb.prefix}-{verb.request_id}-rank-{rank}.trace.json.gz" for rank in range(layout.world_size)
        ]
        profile = torch.profiler.profile(
            activities=activities, record_shapes=verb.record_shapes, with_stack=verb.with_stack
        )
        until = self._scheduler.stats.num_steps + min(verb.num_steps or MAX_PROFILED_STEPS, MAX_PROFILED_STEPS)
        self._trace = _Trace(profile, files, files[position.world_rank], until)
        profile.start()
        return _answer(verb.request_id, "Profile started.", self._trace)

    def _stop(self, verb: StopProfileReqInput) -> None:
        """Answered when the file is there."""
        if self._writing is not None and self._writing[2] is None:
            trace, future, _ = self._writing
            self._writing = trace, future, verb
        elif self._trace is not None:
            self._end(self._trace, verb)
        else:
            raise Conflict("no profile is under way")

    def _end(self, trace: _Trace, verb: StopProfileReqInput | None) -> None:
        self._trace = None
        trace.profile.stop()
        future = self._writer.submit(trace.profile.export_chrome_trace, trace.own_file)
        self._writing = trace, future, verb

    def _advance(self) -> bool:
        if self._trace is not None and self._scheduler.stats.num_steps >= self._trace.until:
            self._end(self._trace, None)
        if self._writing is not None and self._writing[1].done():
            trace, future, verb = self._writing
            self._writing = None
            error = future.exception()
            if verb is None:
                said = f"wrote a profile to {trace.own_file}" if error is None else f"no profile was written: {error}"
                print(f"lockstep: {said}", file=sys.stderr, flush=True)
            elif isinstance(error, Exception):
                self._scheduler.reply(failure(verb.request_id, error))
            else:
                self._scheduler.reply(_answer(verb.request_id, "Profile written.", trace))
        return self._writing is not None


def _answer(request_id: str, message: str, trace: _Trace) -> ControlReqOutput:
    data: dict[str, Any] = {"files": trace.files}
    return ControlReqOutput(request_id=request_id, success=True, message=message, data=data)


def _writable(output_dir: str | None) -> str:
    """The folder, made if it is not there.  Raises `BadRequest`."""
    folder = Path(output_dir or tempfile.gettempdir())
    if not folder.is_absolute():
        raise BadRequest("output_dir must be an absolute path")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
    except (OSError, ValueError) as error:
        raise BadRequest(f"output_dir: {error}") from None
    return str(folder)
