"""`OpenUpdate`: the one open transaction, and which calls are of it.

A transaction has an id.  A call that is not of the open transaction (`foreign`) is refused and changes nothing:

    a call with the id of the open one     is of it, and from then on all its calls must carry the id (it is *bound*)
    a call with another id                 is foreign
    a call without                         is of the open one, unless that is bound or has another version
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weight_sync.errors import TransactionStateError
from weight_sync.tensor_meta import Part
from weight_sync.transaction import TransactionState, WeightTransaction
from weight_sync.update_book import Outcome, UpdateBook


class OpenUpdate:
    """`book`: how the last updates ended."""

    def __init__(self) -> None:
        self.book = UpdateBook()
        self._transaction: WeightTransaction | None = None

    @property
    def is_open(self) -> bool:
        return self._transaction is not None

    @property
    def open_id(self) -> str | None:
        """Id of the open transaction; None: it has none, or none is open."""
        return None if self._transaction is None else self._transaction.update_id

    @property
    def is_bound(self) -> bool:
        """True if every call must carry the open transaction's id."""
        return self._transaction is not None and self._transaction.is_bound

    @property
    def is_implicit(self) -> bool:
        """True if the open transaction was opened by `open_implicit`."""
        return self._transaction is not None and self._transaction.is_implicit

    @property
    def is_complete(self) -> bool:
        """True if all tensors of the open transaction have come."""
        return self._transaction is not None and not self._transaction.missing

    @property
    def pending_version(self) -> str | None:
        """The version that the open transaction will publish, where it is known."""
        return self._transaction.weight_version if self._transaction is not None else None

    @property
    def way_out(self) -> str:
        """The open transaction's `way_out`; before one is open, how the one about to open is settled."""
        if self._transaction is None:
            return "(it begins): wait for its answer, or end it with abort_weight_update"
        return self._transaction.way_out

    def foreign(self, update_id: str | None, weight_version: str | None = None) -> TransactionStateError | None:
        """Return why a call does not belong to the open transaction; None if it does.

        A call that names no transaction is not foreign while none is open.
        """
        if update_id is not None and update_id != self.open_id:
            ended = self.outcome(update_id)
            because = "" if ended.reason is None else f": {ended.reason}"
            other = "" if self._transaction is None else f"; another one is open {self.way_out}"
            return TransactionStateError(f"the weight update {update_id!r} is {ended.kind}, not open{because}{other}")
        return None if self._transaction is None else self._transaction.foreign(update_id, weight_version)

    def require_own(self, update_id: str | None) -> None:
        """Raise the error that `foreign` returns, if it returns one."""
        if (foreign := self.foreign(update_id)) is not None:
            raise foreign

    def require_none_open(self, what: str = "") -> None:
        """Raise `TransactionStateError` if a transaction is open; the message states that `what` is refused."""
        if self._transaction is not None:
            refused = what and f"{what}: "
            raise TransactionStateError(f"{refused}a weight update is already open {self.way_out}")

    def admit(self, update_id: str | None, verb: str) -> WeightTransaction:
        """Return the open transaction, for a call that belongs to it.  Raises `TransactionStateError`."""
        self.require_own(update_id)
        transaction = self._require_transaction(verb)
        transaction.is_bound = transaction.is_bound or update_id is not None
        return transaction

    def outcome(self, update_id: str) -> Outcome:
        """Return the outcome of an update, which may still be open; callable on any thread."""
        transaction = self._transaction
        if transaction is None or update_id != transaction.update_id:
            return self.book.outcome(update_id)
        return Outcome("verified" if transaction.state is TransactionState.VERIFIED else "open", transaction.failure)

    def set_pending_version(self, weight_version: str) -> None:
        """Name the open transaction's version.  Raises `TransactionStateError` if none is open."""
        self._require_transaction("name").weight_version = weight_version

    def staged(self, name: str) -> Sequence[Part] | None:
        """Return this rank's staged parts of a tensor by canonical name; None if none is open or it has not come."""
        return self._transaction.read_staged(name) if self._transaction is not None else None

    def renew_lease(self, seen_at: float | None = None) -> None:
        """Restart the lease: the sender is alive.  `seen_at`: see `Lease.renew`."""
        if self._transaction is not None:
            self._transaction.lease.renew(seen_at)

    @property
    def lease_deadline(self) -> float:
        """The time at which the open transaction's lease runs out, by its clock; `math.inf` where none does."""
        return math.inf if self._transaction is None else self._transaction.lease.deadline

    def _require_transaction(self, verb: str) -> WeightTransaction:
        if self._transaction is None:
            raise self.book.nothing_open(verb)
        return self._transaction
