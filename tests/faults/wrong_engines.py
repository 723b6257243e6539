"""Engines that break one rule of the transaction each.  The matrix must find every one of them wrong somewhere.

Each is a context in which the engine's own code is replaced.  Knows the engine's inner parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from rollout.control.control import Control
from rollout.control.weight_commit import WeightCommit
from tests.faults import engines
from weight_sync import transaction
from weight_sync.errors import WeightSyncError
from weight_sync.loading import check_content
from weight_sync.transaction import TransactionState, WeightTransaction
from weight_sync.updater import WeightUpdater

HANG_S = 2.0


def publishes_before_the_vote() -> AbstractContextManager[Any]:
    """The new label is in force before all ranks have written."""
    commit = WeightCommit.run

    def wrong(self: WeightCommit, **how: Any) -> Any:
        state = self._scheduler.runner.state
        with state.mutate("weight refresh"):
            state.relabel(self._updater.pending_version or "unnamed")
        return commit(self, **how)

    return mock.patch.object(WeightCommit, "run", wrong)


def forgives_a_bad_bucket() -> AbstractContextManager[Any]:
    """A bucket that was refused is forgotten, and what came by the end is put in force."""

    def verify(self: WeightTransaction) -> None:
        self._staging.prepare()
        self._state = TransactionState.VERIFIED

    return mock.patch.multiple(WeightTransaction, fail=lambda self, reason: None, verify=verify)


def compares_no_fingerprints() -> AbstractContextManager[Any]:
    return mock.patch.object(transaction, "check_content", lambda named, stated: check_content(named, {}))


def writes_buckets_in_place() -> AbstractContextManager[Any]:
    """What came serves at once, under the old label."""
    receive = WeightTransaction.receive

    def wrong(self: WeightTransaction, named_tensors: Any) -> None:
        named = list(named_tensors)
        receive(self, named)
        for name, tensor in named:
            self._weights.write(name, tensor)

    return mock.patch.object(WeightTransaction, "receive", wrong)


def ignores_the_last_vote() -> AbstractContextManager[Any]:
    """What another rank could not write is in force here."""
    commit = WeightTransaction.commit
    return mock.patch.object(WeightTransaction, "commit", lambda self, vote: commit(self, lambda mine: mine))


def believes_that_restoring_worked() -> AbstractContextManager[Any]:
    """A commit that failed without a way back does not stop generation."""
    take_back = WeightTransaction._roll_back

    def wrong(self: WeightTransaction, reason: str) -> None:
        take_back(self, reason)
        self.torn = None

    return mock.patch.object(WeightTransaction, "_roll_back", wrong)


def has_no_leases() -> AbstractContextManager[Any]:
    """A trainer that died blocks the next one."""
    return mock.patch.object(WeightUpdater, "expire", lambda self: False)


def lets_a_flush_decide() -> AbstractContextManager[Any]:
    """Flushing the cache drops the update that is open."""
    flush = Control._flush_cache

    def wrong(self: Control, verb: Any) -> Any:
        if self._weights._updater.is_open:
            self._weights._updater.drop("the cache was flushed")
        return flush(self, verb)

    return mock.patch.object(Control, "_flush_cache", wrong)


def takes_every_call() -> AbstractContextManager[Any]:
    """Whoever sends a bucket, it is of the update that is open."""
    return mock.patch.object(WeightUpdater, "foreign", lambda *_: None)


def hangs_when_a_bucket_is_refused() -> AbstractContextManager[Any]:
    """For longer than the deadline, which is shortened here."""
    receive = WeightUpdater.receive

    def wrong(self: WeightUpdater, *arguments: Any) -> None:
        try:
            receive(self, *arguments)
        except WeightSyncError:
            time.sleep(HANG_S)
            raise

    @contextmanager
    def slow() -> Iterator[None]:
        with (
            mock.patch.object(WeightUpdater, "receive", wrong),
            mock.patch.object(engines, "DEADLINE_S", HANG_S / 2),
        ):
            yield

    return slow()


WRONG_ENGINES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    wrong.__name__: wrong
    for wrong in (
        publishes_before_the_vote,
        forgives_a_bad_bucket,
        compares_no_fingerprints,
        writes_buckets_in_place,
        ignores_the_last_vote,
        believes_that_restoring_worked,
        has_no_leases,
        lets_a_flush_decide,
        takes_every_call,
        hangs_when_a_bucket_is_refused,
    )
}
