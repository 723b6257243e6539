"""`UpdateBook`: whose call it is, what became of the last updates, and the loss that nobody has made good yet.

    a call with the id of the open update     is of it, and from then on all its calls must carry it (it is *bound*)
    a call with another id                    is foreign
    a call without                            is of the open update, unless that is bound or has another label

A *loss* is an update, or a pause in which one could have been, that ended without a commit and not by a call that said
that it is of it: its lease ran out, its pause ended by itself, a call of unknown origin ended it.  Its sender may go on
with its buckets.  Outside of an update each of them would be one of its own: a mixture of two versions.
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
    """What one commit put into force."""

    weight_version: str | None  # None: the sender named none
    names: list[str]  # logical tensors written
    num_bytes: int
    seconds: float  # time that the step thread spent
    content_digest: str | None = None  # of the whole content now, as far as it is known
    update_id: str | None = None


@dataclass(frozen=True)
class UpdateFailure:
    """Why a weight update did not come into force.  `time`: seconds since 1970."""

    reason: str
    weight_version: str | None
    time: float


@dataclass(frozen=True)
class Outcome:
    """What became of an update; `reason`: why not well.  `answer`: what the sender of a committed one was told.

    `lost`: dropped, and not in answer to a call.
    """

    kind: Literal["open", "verified", "committed", "lost", "aborted", "unknown"]
    reason: str | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)


class UpdateBook:
    """`open_id`: of the open update.  `loss`: why the last one was lost, until somebody starts anew.

    `last_failure`: of the last update that failed, until one is committed.
    """

    def __init__(self) -> None:
        self.open_id: str | None = None
        self.is_bound = False
        self.loss: str | None = None
        self.last_failure: UpdateFailure | None = None
        self._is_told = True
        self._outcomes: dict[str, Outcome] = {}

    # --- the open update -----------------------------------------------------------------------------------------

    def open(self, update_id: str | None, *, bound: bool) -> None:
        """An update begins; None: nobody can name it."""
        self.open_id, self.is_bound = update_id, bound

    def close(self, outcome: Outcome) -> None:
        """It is over."""
        self.note(self.open_id, outcome)
        self.open_id, self.is_bound = None, False

    def bind(self, update_id: str | None) -> None:
        """A call is of it."""
        self.is_bound = self.is_bound or update_id is not None

    def foreign(
        self, update_id: str | None, weight_version: str | None, pending: str | None
    ) -> TransactionStateError | None:
        """Why a call is not of the open update, whose label is `pending`.

        None where it is, or where none is open and it names none.
        """
        if update_id is not None and update_id != self.open_id:
            ended = self.outcome(update_id)
            because = "" if ended.reason is None else f": {ended.reason}"
            return TransactionStateError(f"the weight update {update_id!r} is {ended.kind}, not open{because}")
        if update_id is None and self.is_bound:
            return TransactionStateError("the open weight update takes only calls that carry its update_id")
        if update_id is None and None not in (pending, weight_version) and pending != weight_version:
            return other_version(weight_version, pending)
        return None

    # --- those before --------------------------------------------------------------------------------------------

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


def other_version(weight_version: str | None, pending: str | None) -> TransactionStateError:
    """A bucket of one version came where another is received."""
    return TransactionStateError(f"the bucket is of version {weight_version!r}, the open weight update of {pending!r}")
