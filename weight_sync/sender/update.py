"""`WeightUpdate`: one weight version on its way to all engines at once, as a context manager.

    with sender.update("7") as update:        begin on all engines
        update.send(named_tensors)            any number of buckets, to all
                                              verify on all, commit on all; on any error: abort, never end

An engine fails by refusing, by breaking its connection or by letting a deadline pass.  Then, by choice, the whole
refresh is aborted (`abort_all`), or that engine is left out and the others go on (`leave_out`).  No engine commits
before all that take part have verified.  An engine on its own verifies and commits in one call.  One that does not
answer its commit is asked for the outcome: it may have the new version all the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any, Literal

import torch

from weight_sync.bucket import pack
from weight_sync.errors import TransactionStateError, TransportError
from weight_sync.sender.control import EngineError, refusal, was_refused
from weight_sync.sender.link import Bucket, EngineLink, Sending, split_pieces
from weight_sync.sender.report import EngineReport
from weight_sync.tensor_meta import TensorMeta

OnEngineFailure = Literal["abort_all", "leave_out"]
Progress = Callable[[int, int], None]

_POLL_S = 0.0005
_MOST_POLL_S = 0.005
_ABORT_S = 10.0
"""At most, for engines to answer an abort: one that hangs has cost a whole deadline by then."""
_ASK_S = 5.0
"""For engines in doubt to drop what they have not committed, and again to report the outcome."""


class WeightUpdate:
    """A transaction on the engines behind `links`, used once.

    `fields`: of begin, `update_id` among them.  `num_bytes`: how many will be sent, for `progress(done, total)`; None:
    not known.
    """

    def __init__(
        self,
        links: Mapping[str, EngineLink],
        on_engine_failure: OnEngineFailure,
        device: torch.device,
        fields: dict[str, Any],
        num_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._links, self._policy = links, on_engine_failure
        self._device = device
        self._fields, self._update_id = fields, fields["update_id"]
        self._num_bytes, self._progress = num_bytes, progress
        self._is_entered = False
        self._active = list(links)
        self._open: set[str] = set()  # engines that hold a transaction of ours
        self._sending: deque[tuple[Bucket, dict[str, Sending]]] = deque()  # by engine name; the oldest bucket first
        self._failures: dict[str, BaseException] = {}
        self._start = time.perf_counter()
        self.engines = {name: EngineReport() for name in links}  # final after the block
        self.bytes_sent = 0
        self.buckets_sent = 0

    def __enter__(self) -> WeightUpdate:
        self._is_entered = True
        try:
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
            while self._sending:
                self._finish()
            self._end()
        except BaseException as failure:
            self._leave(failure)
            raise
        self._leave(None)  # engines that were left out hold their transaction still

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send one bucket of tensors in the engine's dtype, on any device.  A copy is sent: they may change afterwards.

        Returns when the bucket before is there, with this one on its way.  Raises `EngineError`, `WeightRequestError`.
        """
        named = [(name, tensor.detach()) for name, tensor in named_tensors]
        named.sort(key=lambda item: -item[1].dtype.itemsize)  # so that it can be packed
        metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        self.send_bucket(Bucket(metas, split_pieces(metas, pack(named).to(self._device))))

    def send_bucket(self, bucket: Bucket) -> None:
        """As `send`; what `bucket.pieces` hold must not change until the next call returns."""
        if not self._is_entered:
            raise TransactionStateError("the weight update is over, or was never entered")
        # So an engine takes buckets in their order, and finds the next one waiting.
        _await(
            [one for _, sending in self._sending for one in sending.values()], lambda one: one.poll() or one.has_begun
        )
        label, links = self._fields["weight_version"], self._links
        self._sending.append(
            (bucket, {name: links[name].start(bucket, label, self._update_id) for name in self._active})
        )
        if len(self._sending) > 1:
            self._finish()

    # --- the transaction ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open a transaction on all engines.  Raises `EngineError`."""
        failed: dict[str, BaseException] = {
            name: TransactionStateError("not connected; connect first")
            for name, link in self._links.items()
            if not link.is_connected
        }
        self._settle(failed)  # before anything is asked of the others
        calls = {name: self._links[name].call("begin_weight_update", **self._fields) for name in self._active}
        try:
            failed = self._failed("begin_weight_update", calls)
            self._open.update(calls.keys() - failed.keys())
        finally:
            for name in calls.keys() - self._open:
                self._abort_if_begun(name, calls[name])
        self._settle(failed)

    def _finish(self) -> None:
        """Wait for the engines' answers to the oldest bucket on its way.  Raises `EngineError`."""
        bucket, sending = self._sending.popleft()
        self._settle(self._drain(sending))
        self.bytes_sent += bucket.num_bytes
        self.buckets_sent += 1
        if self._progress is not None:
            self._progress(self.bytes_sent, self.bytes_sent if self._num_bytes is None else self._num_bytes)

    def _end(self) -> None:
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
            self.engines[name].committed = True
            self.engines[name].stall_seconds = reply.get("stall_seconds")
            self.engines[name].seconds = time.perf_counter() - self._start
        self._settle(failed)

    def _leave(self, cause: BaseException | None) -> None:
        """Drop the transaction wherever it is open; what cannot be dropped is noted on `cause`.

        An interrupt does not wait for the bucket on its way, whose groups are left then.
        """
        self._is_entered = False
        if cause is not None and not isinstance(cause, Exception):
            for one in (one for _, sending in self._sending for one in sending.values()):
                one.shorten_deadline(0.0)
        while self._sending:
            self._drain(self._sending.popleft()[1])
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
            self.engines[name].num_bytes += sending[name].bucket.num_bytes
        return failed

    def _ask(self, phase: dict[str, Any]) -> tuple[dict[str, Mapping[str, Any]], dict[str, BaseException]]:
        """`end_weight_update` on all active engines: replies and failures."""
        calls = self._call("end_weight_update", self._active, **phase)
        failed = self._failed("end_weight_update", calls)
        return {name: call.result() or {} for name, call in calls.items() if name not in failed}, failed

    def _committed_of(self, failed: Mapping[str, BaseException]) -> dict[str, Mapping[str, Any]]:
        """Engines that have committed, though their answer did not come, and what it would have been.

        First they drop what they have not committed, so that it is not published later.
        """
        doubtful = [name for name, error in failed.items() if not was_refused(error)]
        self._wait("abort_weight_update", self._call("abort_weight_update", doubtful), _ASK_S)
        asked = self._call("weight_update", doubtful)
        silent = self._wait("weight_update", asked, _ASK_S)
        answers = {name: call.result() for name, call in asked.items() if name not in silent}
        for name in doubtful:
            self.engines[name].unknown = answers.get(name, {}).get("outcome") in (None, "open", "verified")
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
    """Wait until it is so of all.  Checks at once when an engine answers, else less and less often: engines on this
    machine need its cores."""
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
