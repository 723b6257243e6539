"""What a client call can raise, besides `rollout.core.errors.BadRequest` for arguments that cannot be sent.

ClientError                   500
+-- ServerError                    the server refused: `status_code` and `message` are its own
+-- ServerUnreachable         503  nobody answers, or the connection broke
+-- ServerTimeout             504  no answer within the deadline
+-- ResponseFormatError       502  an answer that breaks the protocol, damaged or missing routes included
"""

from __future__ import annotations

from rollout.core.errors import LockstepError


class ClientError(LockstepError):
    """Base of what a client call raises."""


class ServerError(ClientError):
    """The server refused the call; `status` is its HTTP status, `message` its reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.message = message
        self.status_code = status


class ServerUnreachable(ClientError):
    """Nobody answers, or the connection broke before the answer was complete."""

    status_code = 503


class ServerTimeout(ClientError):
    """No answer within the deadline."""

    status_code = 504


class ResponseFormatError(ClientError):
    """The answer breaks the protocol."""

    status_code = 502
