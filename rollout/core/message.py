"""The base of every message between the main process and the scheduler."""

from __future__ import annotations

import msgspec

from rollout.core.errors import DeadlinePassed

CHANNEL_SECRET = "LOCKSTEP_CHANNEL_SECRET"
"""Environment variable in which ranks get what proves that a message over the network is theirs."""


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Tagged with the name of its class, so that a union of messages can be decoded."""


class ControlReqInput(Message, kw_only=True):
    """Base of the control verbs.

    `deadline`: when nobody waits for the answer any more, in seconds of the monotonic clock that the main process and
    rank 0 share; what has passed it when its turn comes is not done.  None: never.
    """

    request_id: str
    deadline: float | None = None

    def require_in_time(self, now: float) -> None:
        """Raises `DeadlinePassed`."""
        if self.deadline is not None and now >= self.deadline:
            raise DeadlinePassed("its turn came after its deadline; nothing was done")
