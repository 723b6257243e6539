"""The error of the example."""

from __future__ import annotations

from rollout.core.errors import LockstepError


class FleetError(LockstepError):
    """The fleet cannot go on; the message states why."""
