"""`LostUpdates`: updates that were begun and are over without a commit, so that what is left of them is recognised.

A sender whose update was dropped behind its back (its lease ran out, another sender aborted it) goes on with its
buckets.  Outside of begin and end each of them would be an update of its own: a mixture of two versions.

Knows labels.  Does not know transactions.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 64


class LostUpdates:
    """The last labels that were lost; of an update without a label, whether its sender has been told."""

    def __init__(self) -> None:
        self._labels: deque[str] = deque(maxlen=_REMEMBERED)
        self._untold = False

    def note(self, label: str | None, *, told: bool) -> None:
        """An update is over without a commit.  `told`: as the answer to a call of its sender's."""
        if label is None:
            self._untold = self._untold or not told
        elif label not in self._labels:
            self._labels.append(label)

    def tell(self, verb: str) -> None:
        """The sender of `verb` learns that no update is open."""
        self._untold = self._untold and verb == "receive"

    def forget(self, label: str | None) -> None:
        """An update with this label is begun, or committed; whoever was not told of a loss has been overtaken."""
        self._untold = False
        if label is not None and label in self._labels:
            self._labels.remove(label)

    def reason_against(self, label: str | None) -> str | None:
        """Why a call outside of begin and end cannot be an update of its own; None if it can."""
        if label is None:
            return "an update without a label was dropped: begin it again, or abort it" if self._untold else None
        return f"the update of version {label!r} was dropped: begin it again" if label in self._labels else None
