"""`WholeUpdate`: a weight update of one bucket that one engine gets in one call.

    three calls    begin, the bucket, end: each waits for the answer to the one before
    one call       the engine gets begin and end with the bucket, and carries the three out one after the other

A small refresh takes less time than the calls around it.  The same is refused.  But a bucket whose begin is refused has
been sent by then, and is dropped.  An interrupt may come too late to keep the engine from its end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from weight_sync.engine_control import EngineError
from weight_sync.errors import TransactionStateError
from weight_sync.sender.link import Bucket, EngineLink
from weight_sync.sender.update import CLOSING_S, Progress, WeightUpdate, await_all, nothing


class WholeUpdate(WeightUpdate):
    """An update whose begin has the fields `whole` besides the ones of its bucket.  `send_bucket` is called once."""

    def __init__(self, whole: dict[str, Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._whole = whole

    def send_bucket(self, bucket: Bucket | Mapping[str, Bucket]) -> None:
        """Send the only bucket, as `WeightUpdate.send_bucket` does."""
        assert isinstance(bucket, Bucket), "there is one engine"
        (link,) = self._links.values()
        more = {**bucket.more, "whole_update": self._whole}
        # Verify and commit come before the answer.
        super().send_bucket(dataclasses.replace(bucket, more=more, answer_s=link.timeout_s))

    def _begin(self) -> None:
        self._require_connected()
        self._open.update(self._active)  # an abort is due from now on

    def _end(self) -> None:
        (sending,) = self._sending[0]  # there is one bucket, and one group
        closed: TransactionStateError | None = None
        with self.parts.timed("send"):
            try:
                await_all([sending], lambda one: one.poll() or one.is_sent, self._require_open)
            except TransactionStateError as error:  # the engine may have all of it by now: wait for its answer
                closed = error
                sending.shorten_deadline(CLOSING_S)
        with self.parts.timed("end"):
            failed = self._drain([sending], nothing)
            self._sending.clear()
            replies = sending.answers() | self._committed_of(failed)
        if closed is not None and not replies:
            for name in failed:
                if self.engines[name].unknown:
                    closed.add_note(f"engine {name}: it is not known whether it has committed")
            raise closed
        self._conclude(replies, failed)

    def _leave(self, cause: BaseException | None) -> None:
        """Leave the update.  An interrupt is too late for an end that an engine has begun: it is noted on `cause`."""
        doubtful = [] if cause is None or isinstance(cause, EngineError) else list(self._open)
        super()._leave(cause)
        for name in self._committed_among(doubtful):
            assert cause is not None
            self.engines[name].committed = True
            cause.add_note(f"engine {name}: it had committed version {self._fields['weight_version']!r} by then")


def kind_of_update(
    links: Mapping[str, EngineLink], progress: Progress | None, whole: dict[str, Any] | None
) -> Callable[..., WeightUpdate]:
    """Return what makes an update: of one call if it has the fields `whole` and its only engine takes such calls.

    A caller that learns of progress may still end the update when all is sent.  So its end is a call of its own.
    """
    groups = [link.group for link in links.values()]
    is_able = len(groups) == 1 and groups[0] is not None and groups[0].takes_whole_updates
    return functools.partial(WholeUpdate, whole) if whole is not None and progress is None and is_able else WeightUpdate
