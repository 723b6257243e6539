"""Errors of weight refresh.  `status_code` is the HTTP status under which an engine reports them.

WeightSyncError               500
+-- WeightRequestError        400  the call itself is wrong; nothing was changed
|   +-- UnknownTensorError    400
|   +-- ShapeMismatchError    400
|   +-- DtypeMismatchError    400
|   +-- ContentError          400  short bucket, NaN, wrong fingerprint, conflicting alias
|   +-- CoverageError         400  tensors missing or sent twice
|   +-- UnknownGroupError     404
+-- TransactionStateError     409  begin while open, end without begin, end of a failed transaction
|   +-- BaseMismatchError     409  the serving weights are not the ones that the sender starts from
|   +-- CopiesDifferError     409  places that must hold the same content do not
|   +-- LostVoteError         409  another rank refused; the caller gets that rank's reason
+-- TransportError            502  rendezvous or receive failed or ran into its deadline
+-- LocalCheckpointError      500  a local checkpoint folder could not be written
+-- StagingError              500  old content cannot be kept, or restored
+-- CommitError               500  the write failed; the message states whether the old weights were restored
"""

from __future__ import annotations

from collections.abc import Sequence


class WeightSyncError(Exception):
    """Base of every error of this library."""

    status_code = 500


class WeightRequestError(WeightSyncError):
    """The call is wrong; nothing was changed."""

    status_code = 400


class UnknownTensorError(WeightRequestError):
    """A tensor name that the model does not have.  `name`: for which the nearest one that it has would help."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class ShapeMismatchError(WeightRequestError):
    """A known tensor with another shape."""


class DtypeMismatchError(WeightRequestError):
    """A known tensor with another dtype."""


class ContentError(WeightRequestError):
    """Content that cannot be right: a short bucket, a value that is not finite, a fingerprint that differs."""


class CoverageError(WeightRequestError):
    """Tensors that are missing, or that came more than once."""


class UnknownGroupError(WeightRequestError):
    """A process group that was never joined."""

    status_code = 404


class TransactionStateError(WeightSyncError):
    """The call does not fit the state of the transaction."""

    status_code = 409


class BaseMismatchError(TransactionStateError):
    """The serving weights are not the ones that the sender starts from."""


class CopiesDifferError(TransactionStateError):
    """Replicas on one rank, or copies on several, that must hold the same content do not."""


class LostVoteError(TransactionStateError):
    """This rank was ready, and another one was not.  That one has the reason."""


class TransportError(WeightSyncError):
    """A rendezvous or a receive failed or took too long."""

    status_code = 502


class LocalCheckpointError(WeightSyncError):
    """A local checkpoint folder could not be written; it is at its old version, or the next pull settles it."""


class StagingError(WeightSyncError):
    """Old content could not be kept before a write, or not be restored after one."""


class CommitError(WeightSyncError):
    """The write itself failed.  `restored`: the old weights are back, bit for bit; if not, nothing may be served."""

    def __init__(self, message: str, *, restored: bool) -> None:
        super().__init__(message)
        self.restored = restored


MAX_NAME_SHOWN = 200
SHOWN = 3
"""Tensors that a message names where more are wrong in the same way: a message is read, and its sender knows all."""


def shown(name: str) -> str:
    """Return a name for an error message, in quotes: what a caller made up may be of any length."""
    return repr(unquoted(name))


def unquoted(name: str) -> str:
    """Return the same without quotes."""
    return name if len(name) <= MAX_NAME_SHOWN else f"{name[:MAX_NAME_SHOWN]}..."


def listed(items: Sequence[str], limit: int = SHOWN) -> str:
    """Return the items for an error message; beyond `limit` only their number."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
