"""A real scheduler whose weight updates a test delivers, over any transport and with any fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.local_refresh import updater_of
from tests.scheduler_harness import Harness
from weight_sync.staging import StagingMode
from weight_sync.waiting import DEFAULT_LEASE_S


class RefreshHarness(Harness):
    """`now` is the clock of the leases.  `failed` names the step that `injections` made fail since it was last asked.

    The scheduler's own clock decides when leases are checked.  `now` lies so far before it that every turn checks them.

    The sender's end of a conversation waits `sender_timeout_ms` for the engine.
    """

    sender_timeout_ms = 5000

    def __init__(self, checkpoint: Path, staging: StagingMode, scratch: Path, **settings: Any) -> None:
        super().__init__(checkpoint, weight_version="v0", weight_staging=staging, **settings)
        self.staging: str = staging
        self.scratch = scratch
        self.updater = updater_of(self)
        self.weights = self.scheduler.runner.state.model.weights
        self.now = -1e9
        self.updater._clock = lambda: self.now
        self.failed: str | None = None
        self._numbers = itertools.count(1)
        self._exit = ExitStack()

    def number(self) -> int:
        """Return a number that was not given before."""
        return next(self._numbers)

    def at_clean_up(self, call: Callable[[], Any]) -> None:
        """Call something at the clean-up; calls run in reverse order."""
        self._exit.callback(call)

    def clean_up(self) -> None:
        """Release what the transports hold."""
        self._exit.close()

    def lapse(self) -> None:
        """Let more time than a lease pass without a call."""
        self.now += 2 * DEFAULT_LEASE_S
        self.tick()

    def take_failed(self) -> str | None:
        failed, self.failed = self.failed, None
        return failed
