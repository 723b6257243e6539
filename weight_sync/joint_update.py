"""`JointUpdate`: one weight version on many engines, all of it or nothing: begin, the end in two phases, abort.

An engine fails by refusing, by breaking its connection or by letting a deadline pass.  Then, by choice, the whole
refresh is aborted (`abort_all`), or that engine is left out and the others go on (`leave_out`).  No engine commits
before all that take part have verified.  An engine on its own verifies and commits in one call.  One that does not
answer its commit is asked for the outcome: it may have the new version all the same.

How content reaches the engines is another's business.  Needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from weight_sync.engine_control import EngineCalls, EngineError, gave_no_answer, refusal, was_refused
from weight_sync.errors import TransactionStateError, TransportError
from weight_sync.timing import Parts

OnEngineFailure = Literal["abort_all", "leave_out"]

ABORT_S = 10.0
"""At most, for engines to answer an abort: one that hangs has cost a whole deadline by then."""
_ASK_S = 5.0
"""For engines in doubt to drop what they have not committed, and again to report the outcome."""


@dataclass
class EngineReport:
    """One engine's share of a refresh."""

    num_bytes: int = 0  # that it took
    seconds: float = 0.0  # from begin until it answered for the last time
    staging_seconds: float | None = None  # from its begin to its commit, as it reports
    receiving_seconds: float | None = None  # of those, in calls that bring tensors; the rest it waited for the sender
    stall_seconds: float | None = None  # for which the commit held its steps, as it reports
    committed: bool = False
    unknown: bool = False  # it may have committed all the same: it did not answer
    error: str | None = None  # why it was left out
    transport: str = ""  # how its buckets came; "broadcast" with the reason why not through shared memory


class JointUpdate:
    """A transaction on `engines`, used once, as a context manager.  `fields`: of begin, `update_id` among them."""

    def __init__(
        self, engines: Mapping[str, EngineCalls], on_engine_failure: OnEngineFailure, fields: dict[str, Any]
    ) -> None:
        self._calls, self._policy = engines, on_engine_failure
        self._fields, self._update_id = fields, fields["update_id"]
        self._is_entered = False
        self._active = list(engines)
        self._open: set[str] = set()  # engines that hold a transaction of ours
        self._failures: dict[str, BaseException] = {}
        self._silent: set[str] = set()  # engines that gave no answer to an abort, or by the time of an interrupt
        self._start = time.perf_counter()
        self.parts = Parts()  # seconds: `begin`, `end`
        self.engines = {name: EngineReport() for name in engines}  # final after the block

    def __enter__(self) -> Self:
        self._is_entered = True
        try:
            with self.parts.timed("begin"):
                self._begin()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave(error)
            return
        try:
            self._end()
        except BaseException as failure:
            self._leave(failure)
            raise
        self._leave(None)  # engines that were left out hold their transaction still

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Make a call that belongs to this update, on all engines that take part; return their answers.  Raises
        `EngineError`.
        """
        if not self._is_entered:
            raise TransactionStateError("the weight update has ended or was not entered")
        calls = self._call(verb, self._active, **fields)
        failed = self._failed(verb, calls)
        self._settle(failed)
        return {name: call.result() for name, call in calls.items() if name not in failed}

    # --- the transaction ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open a transaction on all engines.  Raises `EngineError`, and what `_while_begins` raises."""
        calls = {name: self._calls[name].call("begin_weight_update", **self._fields) for name in self._active}
        wrong: Exception | None = None
        try:
            try:
                self._while_begins(calls.values())
            except Exception as error:
                wrong = error  # raised once it is known where a transaction is open, which is dropped then
            failed = self._failed("begin_weight_update", calls)
            self._open.update(calls.keys() - failed.keys())
        finally:
            for name in calls.keys() - self._open:
                self._abort_if_begun(name, calls[name])
        if wrong is not None:
            raise wrong
        self._settle(failed)

    def _while_begins(self, calls: Collection[Future[Any]]) -> None:
        """Do what can be done before engines have answered these calls."""

    def _end(self) -> None:
        """Verify on all engines, then commit on all.  Raises `EngineError`."""
        with self.parts.timed("end"):
            phase: dict[str, Any] = {}
            if len(self._active) > 1:
                self._settle(self._ask({"phase": "verify"})[1])
                phase = {"phase": "commit"}
            replies, failed = self._ask(phase)
            replies |= self._committed_of(failed)
        self._conclude(replies, failed)

    def _conclude(self, replies: Mapping[str, Mapping[str, Any]], failed: Mapping[str, BaseException]) -> None:
        """Note the engines that have committed, and what they report.  Raises `EngineError` as the others have failed.

        An engine in both has committed.
        """
        failed = {name: error for name, error in failed.items() if name not in replies}
        for name, reply in replies.items():
            self._open.discard(name)
            self.engines[name].committed = True
            for field in ("staging_seconds", "receiving_seconds", "stall_seconds"):
                setattr(self.engines[name], field, reply.get(field))
            self.engines[name].seconds = time.perf_counter() - self._start
        self._settle(failed)

    def _leave(self, cause: BaseException | None) -> None:
        """Drop the transaction wherever it is open; what cannot be dropped is noted on `cause`."""
        self._is_entered = False
        calls = self._call("abort_weight_update", self._open)
        for name, error in self._failed("abort_weight_update", calls, ABORT_S).items():
            if gave_no_answer(error):
                self._silent.add(name)
            if cause is not None and not was_refused(error):
                cause.add_note(f"engine {name}: aborting the weight update failed as well: {_described(error)}")
        self._open.clear()

    # --- helpers ------------------------------------------------------------------------------------------------

    def _ask(self, phase: dict[str, Any]) -> tuple[dict[str, Mapping[str, Any]], dict[str, BaseException]]:
        """Call `end_weight_update` on all active engines; return replies and failures."""
        calls = self._call("end_weight_update", self._active, **phase)
        failed = self._failed("end_weight_update", calls)
        return {name: call.result() or {} for name, call in calls.items() if name not in failed}, failed

    def _committed_of(self, failed: Mapping[str, BaseException]) -> dict[str, Mapping[str, Any]]:
        """Return the engines that have committed, though their answer did not come, and what it would have been.

        First they drop what they have not committed, so that it is not published later.
        """
        doubtful = [name for name, error in failed.items() if not was_refused(error)]
        self._wait("abort_weight_update", self._call("abort_weight_update", doubtful), _ASK_S)
        return self._committed_among(doubtful)

    def _committed_among(self, names: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Return the engines that state that they have committed, with their answers.  Notes the ones in doubt."""
        asked = self._call("weight_update", names)
        silent = self._wait("weight_update", asked, _ASK_S)
        answers = {name: call.result() for name, call in asked.items() if name not in silent}
        for name in names:
            self.engines[name].unknown = answers.get(name, {}).get("outcome") in (None, "open", "verified")
            self._open.discard(name)
        return {name: answer for name, answer in answers.items() if answer.get("outcome") == "committed"}

    def _call(self, verb: str, names: Collection[str], /, **fields: Any) -> dict[str, Future[Any]]:
        return {name: self._calls[name].call(verb, update_id=self._update_id, **fields) for name in names}

    def _failed(
        self, verb: str, calls: Mapping[str, Future[Any]], within_s: float = float("inf")
    ) -> dict[str, BaseException]:
        """Wait for calls until the deadline; who failed, and with what."""
        return self._wait(verb, calls, min([within_s, *(self._calls[name].timeout_s for name in calls)]))

    def _wait(self, verb: str, calls: Mapping[str, Future[Any]], timeout_s: float) -> dict[str, BaseException]:
        if not calls:
            return {}
        try:
            wait(calls.values(), timeout=timeout_s)
        except BaseException:
            self._silent |= {name for name, call in calls.items() if not call.done()}
            raise
        failed: dict[str, BaseException] = {}
        for name, call in calls.items():
            error = refusal(call) if call.done() else TransportError(f"no answer to {verb} within {timeout_s:g} s")
            if error is not None:
                failed[name] = error
        return failed

    def _settle(self, failed: Mapping[str, BaseException]) -> None:
        """Raise, or go on without the engines that failed.  One that failed before is reported once."""
        failed = {name: error for name, error in failed.items() if name in self._active}
        if not failed:
            return
        self._failures.update(failed)
        for name, error in failed.items():
            self._active.remove(name)
            self.engines[name].error = _described(error)
            self.engines[name].seconds = time.perf_counter() - self._start
        committed = [name for name, report in self.engines.items() if report.committed]
        unknown = [name for name, report in self.engines.items() if report.unknown]
        if self._ends_all():
            first = next(iter(failed.values()))
            raise EngineError(self._failures, committed, unknown, self._update_id) from first

    def _ends_all(self) -> bool:
        """Return whether a failure ends the refresh on all engines."""
        return self._policy == "abort_all" or not self._active

    def _abort_if_begun(self, name: str, call: Future[Any]) -> None:
        """Abort on this engine, should it be open after all."""

        def abort(begun: Future[Any]) -> None:
            error = begun.exception()
            if error is None or not was_refused(error):
                self._call("abort_weight_update", [name])

        call.add_done_callback(abort)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
