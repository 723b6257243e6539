"""`StepProfiler`: a trace of torch's profiler over some steps, one file for each rank.

    start_profile ... steps ... stop_profile, or the last of `num_steps` -> PREFIX-ID-rank-R.trace.json.gz

A trace is held in memory until it is written, so it ends by itself after `MAX_PROFILED_STEPS`.  It is written beside
the steps; a second one is refused until then.

Knows the profiler's verbs and files.  Does not know what a step does.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
    """`files`: of all ranks."""

    profile: torch.profiler.profile
    files: list[str]
    own_file: str


class StepProfiler:
    """At most one trace at a time.  What takes long is done beside the steps, on a thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._trace: _Trace | None = None
        self._until = 0  # the step after which it ends
        self._writing: _Trace | None = None
        self._asked: StopProfileReqInput | None = None  # who waits for what is being written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="profiler")
        self._beside: tuple[Future[Any], Callable[[BaseException | None], None]] | None = None
        scheduler.add_verbs({StartProfileReqInput: self._start, StopProfileReqInput: self._stop})
        scheduler.add_between_steps(self._advance)

    def _start(self, verb: StartProfileReqInput) -> None:
        """Answered when the next step will be recorded."""
        if self._trace is not None or self._beside is not None:
            raise Conflict("a profile is under way, or being written")
        activities = {_ACTIVITIES[name] for name in verb.activities} & supported_activities()
        if not activities:
            raise BadRequest(f"nothing of {', '.join(verb.activities) or 'no activity'} can be recorded here")
        folder = _writable(verb.output_dir)
        position, layout = self._scheduler.parallel.position, self._scheduler.parallel.layout
        name = f"{folder}/{verb.prefix}-{verb.request_id}-rank"
        files = [f"{name}-{rank}.trace.json.gz" for rank in range(layout.world_size)]
        profile = torch.profiler.profile(
            activities=activities, record_shapes=verb.record_shapes, with_stack=verb.with_stack
        )
        trace = _Trace(profile, files, files[position.world_rank])
        self._beside = self._thread.submit(_import_early), lambda _: self._begin(trace, verb)

    def _begin(self, trace: _Trace, verb: StartProfileReqInput) -> None:
        try:
            trace.profile.start()
        except Exception as error:
            self._scheduler.reply(failure(verb.request_id, error))
            return
        num_steps = min(verb.num_steps or MAX_PROFILED_STEPS, MAX_PROFILED_STEPS)
        self._trace, self._until = trace, self._scheduler.stats.num_steps + num_steps
        self._scheduler.reply(_answer(verb.request_id, "Profile started.", trace))

    def _stop(self, verb: StopProfileReqInput) -> None:
        """Answered when the file is there."""
        if self._trace is not None:
            self._end(self._trace, verb)
        elif self._writing is not None and self._asked is None:
            self._asked = verb
        else:
            raise Conflict("no profile is under way")

    def _end(self, trace: _Trace, verb: StopProfileReqInput | None) -> None:
        self._trace, self._writing, self._asked = None, trace, verb
        trace.profile.stop()
        self._beside = self._thread.submit(trace.profile.export_chrome_trace, trace.own_file), self._written

    def _written(self, error: BaseException | None) -> None:
        trace, verb = self._writing, self._asked
        assert trace is not None
        self._writing = self._asked = None
        if verb is None:
            said = f"wrote a profile to {trace.own_file}" if error is None else f"no profile was written: {error}"
            print(f"lockstep: {said}", file=sys.stderr, flush=True)
        elif isinstance(error, Exception):
            self._scheduler.reply(failure(verb.request_id, error))
        else:
            self._scheduler.reply(_answer(verb.request_id, "Profile written.", trace))

    def _advance(self) -> bool:
        if self._trace is not None and self._scheduler.stats.num_steps >= self._until:
            self._end(self._trace, None)
        if self._beside is not None and self._beside[0].done():
            (future, then), self._beside = self._beside, None
            then(future.exception())
        return self._beside is not None


def _import_early() -> None:
    """torch's profiler imports torch's compiler when it first starts: seconds in which no step could run."""
    with suppress(ImportError):
        importlib.import_module("torch._inductor.config")


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
