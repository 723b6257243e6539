"""Weight verbs: one queue, one at a time, in the order in which they came.

A verb has up to two parts.  The I/O part (rendezvous, receiving, checking) runs on one thread of its own while the
engine generates; the step part (commit, publish) runs between two steps on the scheduler's thread.

    verb -> queue -> [I/O thread: updater.receive_.. / verify] -> step boundary: commit -> publish -> reply

Knows when a transaction opens, settles and publishes.  What a transaction is belongs to `weight_sync`.

Clients without begin/end: paused, their first bucket opens a transaction and `continue_generation` settles it, with
full coverage; running, each call is a transaction of its own on the tensors that it names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.core.errors import Conflict, NotFound, Unavailable
from rollout.core.io_struct import ContinueGenerationReqInput, ControlReqOutput
from rollout.core.message import ControlReqInput
from rollout.core.weight_io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)
from rollout.scheduler.kv_age import abort_below, require_known_version
from rollout.scheduler.scheduler import Scheduler, failure
from rollout.scheduler.weight_sources import SOURCES
from weight_sync.errors import CommitError, UnknownTensorError
from weight_sync.updater import WeightUpdater
from weight_sync.wire import parse_manifest

Answer = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """How a verb is carried out: `io` runs on the I/O thread, `step` with its result at a step boundary.

    `step` returns message and data.
    """

    verb: ControlReqInput
    io: Callable[[], Any]
    step: Callable[[Any], tuple[str, Answer]]


class WeightControl:
    """Owner of the verb queue and the I/O thread."""

    def __init__(self, scheduler: Scheduler, updater: WeightUpdater, wake: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._wake = wake
        self._io = ThreadPoolExecutor(1, thread_name_prefix="weight-io")
        self._waiting: deque[ControlReqInput] = deque()
        self._job: Job | None = None
        self._future: Future | None = None
        self._last_status: Answer = updater.status()
        self._planners: dict[type, Callable[[Any], Job]] = {
            InitWeightsUpdateGroupReqInput: self._init_group,
            DestroyWeightsUpdateGroupReqInput: self._destroy_group,
            BeginWeightUpdateReqInput: self._begin,
            EndWeightUpdateReqInput: self._end,
            AbortWeightUpdateReqInput: self._abort,
            UpdateWeightVersionReqInput: self._relabel,
            GetWeightsByNameReqInput: self._get_by_name,
            WeightsCheckerReqInput: self._checksums,
            ContinueGenerationReqInput: self._continue,
            **dict.fromkeys(SOURCES, self._receive),
        }
        scheduler.add_verbs(dict.fromkeys(self._planners, self._enqueue))
        scheduler.add_between_steps(self.advance)

    def add_jobs(self, planners: dict[type, Callable[[Any], Job]]) -> None:
        """Further verbs that take their turn in this queue, by message type."""
        self._planners.update(planners)
        self._scheduler.add_verbs(dict.fromkeys(planners, self._enqueue))

    def status(self) -> Answer:
        """State of the open transaction as of the last verb that finished; the I/O thread may be at work on it."""
        if self._job is None:
            self._last_status = self._updater.status()
        return self._last_status | {"busy": self._job is not None}

    def advance(self) -> bool:
        """Finish the verb whose I/O is done, start the next.  True while one is under way."""
        while True:
            if self._job is None:
                if not self._waiting:
                    return False
                self._start(self._waiting.popleft())
                continue
            assert self._future is not None
            if not self._future.done():
                return True
            self._finish()

    def _enqueue(self, verb: ControlReqInput) -> None:
        self._waiting.append(verb)

    def _start(self, verb: ControlReqInput) -> None:
        try:
            self._job = self._planners[type(verb)](verb)
        except Exception as error:
            self._scheduler.reply(failure(verb.request_id, error))
            return
        self._future = self._io.submit(self._job.io)
        self._future.add_done_callback(lambda _: self._wake())

    def _finish(self) -> None:
        job, future = self._job, self._future
        assert job is not None and future is not None
        self._job = self._future = None
        try:
            message, data = job.step(future.result())
            answer = ControlReqOutput(request_id=job.verb.request_id, success=True, message=message, data=data)
        except Exception as error:
            answer = failure(job.verb.request_id, error)
        self._scheduler.reply(answer)

    # --- verbs ----------------------------------------------------------------------------------------------------

    def _init_group(self, verb: InitWeightsUpdateGroupReqInput) -> Job:
        def io() -> None:
            self._updater.init_group(
                master_address=verb.master_address,
                master_port=verb.master_port,
                rank=verb.rank_offset,
                world_size=verb.world_size,
                group_name=verb.group_name,
                backend=verb.backend,
            )

        return Job(verb, io, _says("Succeeded to initialize custom process group."))

    def _destroy_group(self, verb: DestroyWeightsUpdateGroupReqInput) -> Job:
        return Job(
            verb,
            lambda: self._updater.destroy_group(verb.group_name),
            _says("Succeeded to destroy custom process group."),
        )

    def _begin(self, verb: BeginWeightUpdateReqInput) -> Job:
        def io() -> None:
            manifest = None if verb.manifest is None else parse_manifest(msgspec.to_builtins(verb.manifest))
            self._updater.begin(verb.weight_version, verb.coverage, manifest)

        return Job(verb, io, _says("Weight update begun."))

    def _receive(self, verb: UpdateWeightsReqInput) -> Job:
        if verb.abort_all_requests:
            self._scheduler.abort(None)
        opens = not self._updater.is_open
        settles = opens and not self._scheduler.paused

        def io() -> None:
            if opens:
                self._updater.open_implicit("partial" if settles else "full")
            try:
                source = SOURCES[type(verb)](verb, self._updater)
                self._updater.receive(source, verb.weight_version)
            except Exception:
                if settles:
                    self._updater.abort()
                raise
            if settles:
                self._updater.verify()

        def step(_: Any) -> tuple[str, Answer]:
            if settles:
                return self._commit()
            return "Succeeded to receive weights.", {"weight_update": self._updater.status()}  # I/O thread is idle

        return Job(verb, io, step)

    def _end(self, verb: EndWeightUpdateReqInput) -> Job:
        if verb.phase == "verify":
            return Job(verb, self._updater.verify, _says("Weight update verified; commit or abort it."))
        return Job(verb, _nothing if verb.phase == "commit" else self._updater.verify, lambda _: self._commit())

    def _abort(self, verb: AbortWeightUpdateReqInput) -> Job:
        return Job(verb, self._updater.abort, _says("Weight update aborted; the previous weights serve."))

    def _continue(self, verb: ContinueGenerationReqInput) -> Job:
        settles = self._updater.is_open and self._updater.is_implicit

        def io() -> None:
            state = self._scheduler.runner.state
            coming = self._updater.pending_version or _successor(state.epoch.weight_version)
            require_known_version(state, verb.abort_below_weight_version, coming if settles else None)
            if settles:
                self._updater.verify()

        def step(_: Any) -> tuple[str, Answer]:
            data = self._commit()[1] if settles else {}
            aborted = abort_below(self._scheduler, verb.abort_below_weight_version)
            self._scheduler.paused = False
            return "Generation continued successfully.", data | {"paused": False, "num_aborted": aborted}

        return Job(verb, io, step)

    def _relabel(self, verb: UpdateWeightVersionReqInput) -> Job:
        def step(_: Any) -> tuple[str, Answer]:
            if verb.abort_all_requests:
                self._scheduler.abort(None)
            if self._updater.is_open:
                self._updater.set_pending_version(verb.new_version)
            else:
                state = self._scheduler.runner.state
                with state.mutate("version update"):
                    state.relabel(verb.new_version)
            return f"Weight version updated to {verb.new_version}.", {"new_version": verb.new_version}

        return Job(verb, _nothing, step)

    def _get_by_name(self, verb: GetWeightsByNameReqInput) -> Job:
        paused = self._scheduler.paused

        def io() -> Any:
            weights = self._scheduler.runner.state.model.weights
            try:
                name = weights.canonical_name(verb.name)
            except UnknownTensorError as error:
                raise NotFound(str(error)) from None
            staged = self._updater.staged(name) if paused else None
            if staged is None and self._scheduler.runner.state.content_lost:
                raise Conflict("the weights' memory is released; there is nothing to read")
            tensor = weights.read(name) if staged is None else staged
            return tensor[: max(0, verb.truncate_size)].double().tolist(), staged is not None

        def step(result: Any) -> tuple[str, Answer]:
            parameter, is_staged = result
            return "", {"parameter": parameter, "staged": is_staged}

        return Job(verb, io, step)

    def _checksums(self, verb: WeightsCheckerReqInput) -> Job:
        def io() -> Answer:
            return {"checksums": self._updater.checksums(), "digest": self._updater.content_digest()}

        return Job(verb, io, lambda data: ("Success.", data))

    # --- step part ------------------------------------------------------------------------------------------------

    def _commit(self) -> tuple[str, Answer]:
        """Write, publish version and epoch in one assignment, and close the old epoch's prefixes to new requests."""
        scheduler = self._scheduler
        state = scheduler.runner.state
        with state.mutate("weight refresh"):
            try:
                result = self._updater.commit()
            except CommitError as error:
                if not error.restored:
                    state.poison(str(error))
                    scheduler.abort(None, Unavailable(f"the weights are poisoned: {error}"))
                raise
            if len(result.names) == len(state.model.weights.metas()):
                state.heal()
            version = result.weight_version or _successor(state.epoch.weight_version)
            state.publish_weights(version, None)
        scheduler.cache.prefix_cache.retire(state.epoch.weight_epoch)
        return f"Succeeded to update parameter online. Weight version updated to {version}.", {
            "weight_version": version,
            "weight_epoch": state.epoch.weight_epoch,
            "num_tensors": len(result.names),
            "num_bytes": result.num_bytes,
            "stall_seconds": result.seconds,
        }


def _successor(version: str) -> str:
    """A label for new content whose sender gave none: `v` -> `v+1` -> `v+2`, never the label of other content."""
    stem, plus, count = version.rpartition("+")
    if plus and count.isdigit():
        return f"{stem}+{int(count) + 1}"
    return f"{version}+1"


def _nothing() -> None:
    """The I/O part of a verb that has none; it still takes its turn in the queue."""


def _says(message: str) -> Callable[[Any], tuple[str, Answer]]:
    return lambda _: (message, {})
