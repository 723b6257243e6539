"""The engine's error tree.  Each class has its HTTP status.

    LockstepError                 500  anything of ours that reached a caller
    +-- StartupError              500  the server cannot start; the message names the remedy
    +-- FatalError                500  the engine cannot go on; leaves the loop, and the server ends with it
    |   +-- InvariantError        500  a count or a place that must hold does not
    +-- BadRequest                400  the request is wrong; nothing was changed
    |   +-- UnsupportedFeature    400  well-formed, but this server or model cannot do it
    |   +-- AdapterError          400  an adapter that cannot be served
    +-- NotFound                  404  an unknown name
    +-- Conflict                  409  right request, wrong state (end without begin, duplicate rid)
    +-- TooLarge                  413  over a documented cap
    +-- Unavailable               503  not serving: starting, stopping, poisoned
    +-- DeadlinePassed            504  its turn came too late

Leaf libraries (`weight_sync`, `capture`, `eplb`) have trees of their own whose classes carry the same
`status_code` attribute; `status_of` reads it from either.
"""

from __future__ import annotations


class LockstepError(Exception):
    """Base of every error that the engine raises on purpose."""

    status_code = 500

    @property
    def kind(self) -> str:
        """The name of the class, which is the `type` of an error in an answer."""
        return type(self).__name__


class StartupError(LockstepError):
    """The server cannot start."""


class FatalError(LockstepError):
    """The engine cannot go on: its ranks, or its own parts, may disagree.  The server exits with the reason."""


class InvariantError(FatalError, AssertionError):
    """An assertion that stays on: what follows would be computed on wrong state."""


class BadRequest(LockstepError):
    """The request is wrong; nothing was changed."""

    status_code = 400


class UnsupportedFeature(BadRequest):
    """The request is well formed, but this server or model cannot do what it asks."""


class AdapterError(BadRequest):
    """The adapter is damaged, of another model, or of a kind that is not served; nothing was changed."""


class NotFound(LockstepError):
    """A name that this server does not know."""

    status_code = 404


class Conflict(LockstepError):
    """The request does not fit the state that the server is in."""

    status_code = 409


class TooLarge(LockstepError):
    """The request is over a documented cap."""

    status_code = 413


class Unavailable(LockstepError):
    """The server does not serve at present."""

    status_code = 503


class DeadlinePassed(LockstepError):
    """The caller's wait has timed out before the verb's turn came, so it is not carried out any more."""

    status_code = 504


def status_of(error: BaseException) -> int:
    """Return the HTTP status for any exception: its own `status_code` where it has one, else 500."""
    status = getattr(error, "status_code", 500)
    return status if isinstance(status, int) else 500
