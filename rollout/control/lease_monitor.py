"""`LeaseMonitor`: ends a weight update or a pause whose lease expired, and reports torn weights.

    its lease expired                -> the transaction is dropped
    a pause that nobody continued    -> the transaction is dropped, the old version serves again (`--pause-timeout`)
    tensors of it in the model       -> no step runs until it is over; requests wait
    weights neither old nor new      -> poisoned: requests end with 503 and the reason

Called between steps while no weight verb is under way.
"""

from __future__ import annotations

from rollout.core.console import say
from rollout.scheduler.scheduler import Scheduler
from weight_sync.updater import WeightUpdater
from weight_sync.waiting import Lease


class LeaseMonitor:
    """`pause_timeout_s`: None for never; every weight verb restarts it."""

    def __init__(self, scheduler: Scheduler, updater: WeightUpdater, pause_timeout_s: float | None) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._pause_timeout_s = pause_timeout_s
        self._pause: Lease | None = None
        self._is_checked = True  # no verb has run since the last check
        self._torn: str | None = None

    @property
    def pause_left_s(self) -> float | None:
        """Seconds until the pause ends by itself; None if it does not."""
        return None if self._pause is None or not self._scheduler.serving.is_paused else self._pause.left_s

    def on_pause(self) -> None:
        """Generation is paused, perhaps once more."""
        if self._pause_timeout_s is not None:
            self._pause = Lease(self._pause_timeout_s, lambda: self._scheduler.now)

    def on_verb(self) -> None:
        """A weight verb ran: renew the lease of the pause."""
        self._is_checked = False
        if self._pause is not None:
            self._pause.renew()

    def check(self) -> None:
        expired, pause_ended = self._updater.expire(), self._end_pause()
        if expired or pause_ended or not self._is_checked:
            self._torn, self._is_checked = self._torn_anywhere(), True
        self._scheduler.serving.write(self._updater.is_dirty)
        if self._torn is not None and self._scheduler.serving.poisoned is None:
            self._scheduler.poison(self._torn)

    def _torn_anywhere(self) -> str | None:
        """Why some rank's weights are neither old nor new."""
        reasons = self._scheduler.parallel.tp.gather_bytes((self._updater.torn or "").encode())
        return next((text.decode() for text in reasons if text), None)

    def _end_pause(self) -> bool:
        """Whether the pause ended by itself."""
        if not self._scheduler.serving.is_paused:
            self._pause = None
        if self._pause is None or not self._pause.expired:
            return False
        reason = f"nobody continued the pause within {self._pause.seconds:g} s (--pause-timeout)"
        say(f"{reason}; serving again")
        if self._updater.is_open:
            self._updater.drop(reason)
        else:
            self._updater.book.record_loss(reason, reported=False)
        self._pause = None
        self._scheduler.serving.resume()
        return True
