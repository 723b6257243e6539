"""`UpdateBook`: outcomes of the last updates, and whether the last one was lost.

A *loss* is an update, or a pause in which one could have been, that ended without a commit and not by a call that said
that it is of it: its lease expired, its pause timed out, a call of unknown origin ended it.  Its sender may go on
sending buckets.  Outside of an update each of them would be one of its own: a mixture of two versions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weight_sync.errors import TransactionStateError

_REMEMBERED = 256


@dataclass(frozen=True)
class CommitResult:
    """What one commit published."""

    weight_version: str | None  # None: the sender named none
    names: list[str]  # logical tensors written
    num_bytes: int
    seconds: float  # time that the step thread spent
    content_digest: str | None = None  # of the whole content now, as far as it is known
    update_id: str | None = None


@dataclass(frozen=True)
class UpdateFailure:
    """Why a weight update was not published.  `time`: seconds since 1970."""

    reason: str
    weight_version: str | None
    time: float


@dataclass(frozen=True)
class Outcome:
    """How an update ended; `reason`: why it failed.  `answer`: the reply that the sender of a committed one got.

    `lost`: dropped, and not in answer to a call.
    """

    kind: Literal["open", "verified", "committed", "lost", "aborted", "unknown"]
    reason: str | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)


class UpdateBook:
    """`loss`: why the last update was lost, until a sender starts anew.

    `last_failure`: of the last update that failed, until one is committed.
    """

    def __init__(self) -> None:
        self.loss: str | None = None
        self.last_failure: UpdateFailure | None = None
        self._is_told = True
        self._outcomes: dict[str, Outcome] = {}

    def note(self, update_id: str | None, outcome: Outcome) -> None:
        """Of one that is over."""
        if update_id is not None:
            self._outcomes[update_id] = outcome
        if len(self._outcomes) > _REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]

    def outcome(self, update_id: str) -> Outcome:
        """Of one that is over; `unknown` for an id that was never used, or too long ago."""
        return self._outcomes.get(update_id, Outcome("unknown"))

    def note_failure(self, reason: str, weight_version: str | None) -> None:
        self.last_failure = UpdateFailure(reason, weight_version, time.time())

    def lose(self, reason: str, *, told: bool) -> None:
        """`told`: in an answer to somebody, who may be its sender."""
        self.loss, self._is_told = reason, told

    def forget_loss(self) -> None:
        """Somebody starts anew: what comes from now on is taken for theirs."""
        self.loss, self._is_told = None, True

    def tell(self) -> str | None:
        """The loss, if no answer has told of it yet; the caller's does."""
        untold = None if self._is_told else self.loss
        self._is_told = True
        return untold

    def against_loss(self) -> TransactionStateError | None:
        """Why a call outside of an update cannot be one of its own."""
        if self.loss is None:
            return None
        self.tell()
        return TransactionStateError(
            f"a weight update was lost, and this may be of it ({self.loss}): begin, pause or abort first"
        )

    def nothing_open(self, verb: str) -> TransactionStateError:
        """What a call is told that wants an open update, where there is none."""
        self.tell()
        last = self.loss or (self.last_failure.reason if self.last_failure is not None else None)
        because = "" if last is None else f"; the last one failed: {last}"
        return TransactionStateError(f"cannot {verb}: no weight update is open{because}")
