"""`Fleet`: a transaction on many engines at once.

    begin on all -> buckets to all -> verify on all -> commit on all

An engine fails by refusing, by breaking its connection or by letting a deadline pass.  Then, by choice, the whole
refresh is aborted (`abort_all`), or that engine is left out and the others go on (`leave_out`).  No engine commits
before all that take part have verified.  An engine on its own verifies and commits in one call.  One that does not
answer to its commit is asked what became of it: it may have the new version all the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Literal

from weight_sync.errors import TransactionStateError, TransportError
from weight_sync.sender.control import EngineError, refusal, was_refused
from weight_sync.sender.link import Bucket, EngineLink, Sending
from weight_sync.sender.report import EngineReport

OnEngineFailure = Literal["abort_all", "leave_out"]

_POLL_S = 0.0005
_MOST_POLL_S = 0.005
_ABORT_S = 10.0
"""At most, for engines to answer an abort: one that hangs has cost a whole deadline by then."""
_ASK_S = 5.0
"""For engines in doubt to drop what they have not committed, and again to say what became of it."""


class Fleet:
    """One refresh over `links`, once.  `abort` is the way out of every failure, of one in here and of any other."""

    def __init__(self, links: Mapping[str, EngineLink], on_engine_failure: OnEngineFailure, update_id: str) -> None:
        self._links = links
        self._update_id = update_id
        self._policy = on_engine_failure
        self._active = list(links)
        self._open: set[str] = set()  # engines that hold a transaction of ours
        self._sending: deque[dict[str, Sending]] = deque()  # by engine name; the oldest bucket first
        self._failures: dict[str, BaseException] = {}
        self._start = time.perf_counter()
        self.reports = {name: EngineReport() for name in links}

    def begin(self, **fields: Any) -> None:
        """Open a transaction on all engines.  Raises `EngineError`."""
        failed: dict[str, BaseException] = {
            name: TransactionStateError("not connected; connect first")
            for name, link in self._links.items()
            if not link.is_connected
        }
        self._settle(failed)  # before anything is asked of the others
        calls = {name: self._links[name].call("begin_weight_update", **fields) for name in self._active}
        try:
            failed = self._failed("begin_weight_update", calls)
            self._open.update(calls.keys() - failed.keys())
        finally:
            for name in calls.keys() - self._open:
                self._abort_if_begun(name, calls[name])
        self._settle(failed)

    def start(self, bucket: Bucket, weight_version: str | None) -> None:
        """Send a bucket to all engines, without waiting for it, after `await_begun`.

        So an engine takes buckets in their order, and finds the next one waiting.
        """
        self._sending.append(
            {name: self._links[name].start(bucket, weight_version, self._update_id) for name in self._active}
        )

    def await_begun(self) -> None:
        """Wait until the engines have taken up the buckets on their way."""
        everything = [one for sending in self._sending for one in sending.values()]
        _await(everything, lambda one: one.poll() or one.has_begun)

    def finish(self) -> None:
        """Wait for the engines' answers to the oldest bucket on its way.  Raises `EngineError`."""
        self._settle(self._drain(self._sending.popleft()))

    def end(self) -> None:
        """Verify on all engines, then commit on all.  Raises `EngineError`."""
        phase: dict[str, Any] = {}
        if len(self._active) > 1:
            self._settle(self._ask({"phase": "verify"})[1])
            phase = {"phase": "commit"}
        replies, failed = self._ask(phase)
        replies |= self._committed_of(failed)
        failed = {name: error for name, error in failed.items() if name not in replies}
        for name, reply in replies.items():
            self._open.discard(name)
            self.reports[name].committed = True
            self.reports[name].stall_seconds = reply.get("stall_seconds")
            self.reports[name].seconds = time.perf_counter() - self._start
        self._settle(failed)

    def abort(self, cause: BaseException | None = None) -> None:
        """Drop the transaction wherever it is open; what cannot be dropped is noted on `cause`.

        An interrupt does not wait for the bucket on its way, whose groups are left then.
        """
        if cause is not None and not isinstance(cause, Exception):
            for one in (one for sending in self._sending for one in sending.values()):
                one.hurry(0.0)
        while self._sending:
            self._drain(self._sending.popleft())
        calls = self._call("abort_weight_update", self._open)
        for name, error in self._failed("abort_weight_update", calls, _ABORT_S).items():
            if cause is not None and not was_refused(error):
                cause.add_note(f"engine {name}: aborting the weight update failed as well: {_described(error)}")
        self._open.clear()

    # --- helpers ------------------------------------------------------------------------------------------------

    def _drain(self, sending: dict[str, Sending]) -> dict[str, BaseException]:
        """Wait for a bucket on its way; which engines failed, and with what."""
        _await(sending.values(), Sending.poll)
        failed = {name: one.failure for name, one in sending.items() if one.failure is not None}
        for name in sending.keys() - failed.keys():
            self.reports[name].num_bytes += sending[name].bucket.num_bytes
        return failed

    def _ask(self, phase: dict[str, Any]) -> tuple[dict[str, Mapping[str, Any]], dict[str, BaseException]]:
        """`end_weight_update` on all active engines: replies and failures."""
        calls = self._call("end_weight_update", self._active, **phase)
        failed = self._failed("end_weight_update", calls)
        return {name: call.result() or {} for name, call in calls.items() if name not in failed}, failed

    def _committed_of(self, failed: Mapping[str, BaseException]) -> dict[str, Mapping[str, Any]]:
        """Engines that have committed, though their answer did not come, and what it would have been.

        First they drop what they have not committed, so that it does not come into force later.
        """
        doubtful = [name for name, error in failed.items() if not was_refused(error)]
        self._wait("abort_weight_update", self._call("abort_weight_update", doubtful), _ASK_S)
        asked = self._call("weight_update", doubtful)
        silent = self._wait("weight_update", asked, _ASK_S)
        answers = {name: call.result() for name, call in asked.items() if name not in silent}
        for name in doubtful:
            self.reports[name].unknown = answers.get(name, {}).get("outcome") in (None, "open", "verified")
            self._open.discard(name)
        return {name: answer for name, answer in answers.items() if answer.get("outcome") == "committed"}

    def _call(self, verb: str, names: Collection[str], **fields: Any) -> dict[str, Future[Any]]:
        return {name: self._links[name].call(verb, update_id=self._update_id, **fields) for name in names}

    def _failed(
        self, verb: str, calls: Mapping[str, Future[Any]], within_s: float = float("inf")
    ) -> dict[str, BaseException]:
        """Wait for calls until the deadline; who failed, and with what."""
        return self._wait(verb, calls, min([within_s, *(self._links[name].timeout_s for name in calls)]))

    def _wait(self, verb: str, calls: Mapping[str, Future[Any]], timeout_s: float) -> dict[str, BaseException]:
        if not calls:
            return {}
        wait(calls.values(), timeout=timeout_s)
        failed: dict[str, BaseException] = {}
        for name, call in calls.items():
            error = refusal(call) if call.done() else TransportError(f"no answer to {verb} within {timeout_s:g} s")
            if error is not None:
                failed[name] = error
        return failed

    def _settle(self, failed: Mapping[str, BaseException]) -> None:
        """Raise, or go on without the engines that failed.  One that failed before is told once."""
        failed = {name: error for name, error in failed.items() if name in self._active}
        if not failed:
            return
        self._failures.update(failed)
        for name, error in failed.items():
            self._active.remove(name)
            self.reports[name].error = _described(error)
            self.reports[name].seconds = time.perf_counter() - self._start
        committed = [name for name, report in self.reports.items() if report.committed]
        unknown = [name for name, report in self.reports.items() if report.unknown]
        if self._policy == "abort_all" or not self._active:
            first = next(iter(failed.values()))
            raise EngineError(self._failures, committed, unknown, self._update_id) from first

    def _abort_if_begun(self, name: str, call: Future[Any]) -> None:
        """Should it be open after all."""

        def abort(begun: Future[Any]) -> None:
            error = begun.exception()
            if error is None or not was_refused(error):
                self._call("abort_weight_update", [name])

        call.add_done_callback(abort)


def _await(everything: Collection[Sending], is_so: Callable[[Sending], bool]) -> None:
    """Until it is so of all.  Looks at once when an engine answers, else more and more seldom: engines on this machine
    want its cores."""
    poll_s = _POLL_S
    while pending := [one for one in everything if not is_so(one)]:
        unanswered = [one.call for one in pending if not one.call.done()]
        if unanswered:
            wait(unanswered, timeout=poll_s, return_when=FIRST_COMPLETED)
        else:
            time.sleep(poll_s)
        poll_s = min(1.1 * poll_s, _MOST_POLL_S)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
