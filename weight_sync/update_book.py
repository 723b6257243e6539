"""`UpdateBook`: how the last weight updates of a rank ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weight_sync.errors import TransactionStateError

_REMEMBERED = 256
_ENDS_REMEMBERED = 16


@dataclass(frozen=True, kw_only=True)
class EndedUpdate:
    """The end of one update; times in seconds.  `weight_epoch`: the one that it published, `reason`: why it did not.

    `prepared_s`: before its opening, by the sender.  `staging_s`: from its opening until its commit began, or it
    was dropped; `receiving_s` of them in calls that bring tensors, and in the rest it waited for the sender.
    `steps_held`: no step ran while its tensors came.  `stall_s`: of the step thread in the commit.  `ended_at`: since
    1970.
    """

    update_id: str | None
    kind: Literal["committed", "lost", "aborted"]
    weight_version: str | None
    weight_epoch: int | None = None
    reason: str | None = None
    num_tensors: int
    num_bytes: int
    prepared_s: float | None = None
    staging_s: float
    receiving_s: float = 0.0
    stall_s: float = 0.0
    steps_held: bool
    ended_at: float = field(default_factory=time.time)
    target: str = "model"


@dataclass(frozen=True)
class UpdateFailure:
    """Why a weight update was not published.  `time`: seconds since 1970."""

    reason: str
    weight_version: str | None
    time: float


@dataclass(frozen=True)
class Outcome:
    """The state of an update; `reason`: why it failed.  `answer`: the reply that the sender of a committed one got.

    `lost`: dropped, and not in answer to a call.
    """

    kind: Literal["open", "verified", "committed", "lost", "aborted", "unknown"]
    reason: str | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)


class UpdateBook:
    """The record of the last updates.  `loss`: why the last one was lost, until a sender starts anew.

    A *loss* is an update, or a pause in which one could have been, that ended without a commit and not by a call that
    carried its id: its lease expired, its pause timed out, a call of unknown origin ended it.  Its sender may go on
    sending buckets.  Outside of an update each of them would be one of its own: a mixture of two versions.

    `last_failure`: of the last update that failed, until one is committed.  `ended`: the last that ended, oldest first.
    """

    def __init__(self) -> None:
        self.ended: deque[EndedUpdate] = deque(maxlen=_ENDS_REMEMBERED)
        self.loss: str | None = None
        self.last_failure: UpdateFailure | None = None
        self._is_reported = True
        self._outcomes: dict[str, Outcome] = {}

    def note(self, update_id: str | None, outcome: Outcome) -> None:
        """Remember the outcome of an update that is over."""
        if update_id is not None:
            self._outcomes[update_id] = outcome
        if len(self._outcomes) > _REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]

    def note_drop(self, ended: EndedUpdate, reason: str) -> None:
        """Remember an update that ended without a commit, for `reason`."""
        self.note(ended.update_id, Outcome(ended.kind, reason))
        self.ended.append(ended)

    def outcome(self, update_id: str) -> Outcome:
        """Return the outcome of an update that is over; `unknown` for an id that was never used, or too long ago."""
        return self._outcomes.get(update_id, Outcome("unknown"))

    def note_failure(self, reason: str, weight_version: str | None) -> None:
        self.last_failure = UpdateFailure(reason, weight_version, time.time())

    def record_loss(self, reason: str, *, reported: bool) -> None:
        """Record a loss.  `reported`: in the answer to a call, which may be its sender's."""
        self.loss, self._is_reported = reason, reported

    def clear_loss(self) -> None:
        """Forget the loss, as a sender starts anew: what comes from now on is taken for its own."""
        self.loss, self._is_reported = None, True

    def report_loss(self) -> str | None:
        """Return the loss, if no answer has reported it yet; the caller's answer does."""
        loss = None if self._is_reported else self.loss
        self._is_reported = True
        return loss

    def loss_error(self) -> TransactionStateError | None:
        """Return why a call outside of an update cannot be an update of its own; None where nothing was lost."""
        if self.loss is None:
            return None
        self.report_loss()
        return TransactionStateError(
            f"an earlier weight update was dropped ({self.loss}), and this call may belong to it: "
            "begin, pause or abort first"
        )

    def nothing_open(self, verb: str) -> TransactionStateError:
        """Return the error of a call that needs an open update, where there is none."""
        self.report_loss()
        last = self.loss or (self.last_failure.reason if self.last_failure is not None else None)
        because = "" if last is None else f"; the last one failed: {last}"
        return TransactionStateError(f"cannot {verb}: no weight update is open{because}")
