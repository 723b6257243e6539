"""The errors that a client call can raise, besides `rollout.core.errors.BadRequest` for arguments that cannot be sent.

ClientError                   500
+-- ServerError                    the server refused: `status_code` and `message` are its own
+-- ServerUnreachable         503  no server answers, or the connection broke
+-- ServerTimeout             504  no answer within the deadline
+-- ResponseFormatError       502  an answer that breaks the protocol, damaged or missing routes included
+-- FleetError                502  engines of a fleet failed what was asked of all
+-- JoinError                 502  parts of a resumed sample that do not belong together
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout.core.errors import LockstepError


class ClientError(LockstepError):
    """Base of what a client call raises."""


class ServerError(ClientError):
    """The server refused the call; `status` is its HTTP status, `message` its reason.

    `retry_after_s`: in how many seconds it wants to be asked again, if it states that.
    """

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.status_code = status


class ServerUnreachable(ClientError):
    """The server did not answer, or the connection broke before the answer was complete.

    `was_sent`: false if no connection was made, so that the server cannot have heard of the call.
    """

    status_code = 503

    def __init__(self, message: str, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class ServerTimeout(ClientError):
    """The error of a call without an answer within the deadline."""

    status_code = 504


class ResponseFormatError(ClientError):
    """The answer breaks the protocol."""

    status_code = 502


class JoinError(ClientError):
    """Parts of a resumed sample do not belong together."""

    status_code = 502


class FleetError(ClientError):
    """Engines of a fleet failed what was asked of all; `failures` has the error of each by its URL."""

    status_code = 502

    def __init__(self, failures: Mapping[str, BaseException]) -> None:
        super().__init__("; ".join(f"{url}: {type(error).__name__}: {error}" for url, error in failures.items()))
        self.failures = dict(failures)
