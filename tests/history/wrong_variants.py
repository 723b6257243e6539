"""Engines that break one rule each.  The checker must catch every one.

A variant is a context in which engines are built wrong; nothing else of the engine or the checker changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from rollout.control.weight_commit import WeightCommit
from rollout.control.weight_control import WeightControl
from rollout.engine import build
from rollout.mem_cache.radix_cache import RadixCache
from rollout.model_executor.model_runner import ModelRunner
from rollout.model_executor.model_state import ModelState, ServingEpoch
from rollout.scheduler.cache_manager import CacheManager
from rollout.scheduler.records import RecordReader
from rollout.scheduler.req import Req, VersionMarks
from rollout.scheduler.scheduler import Scheduler
from weight_sync.transaction import TransactionState, WeightTransaction
from weight_sync.update_book import UpdateBook
from weight_sync.updater import WeightUpdater

Variant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _patched(*replacements: tuple[type, str, Callable]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def publishes_before_the_vote() -> AbstractContextManager[None]:
    """The new label is in force before all ranks have written."""
    commit = WeightCommit.run

    def wrong(self: WeightCommit, **how: Any) -> Any:
        state = self._scheduler.runner.state
        with state.mutate("weight refresh"):
            state.relabel(self._updater.pending_version or "unnamed")
        return commit(self, **how)

    return _patched((WeightCommit, "run", wrong))


def first_bucket_bumps_the_version() -> AbstractContextManager[None]:
    """As engines do that take `weight_version` from the first call that carries it."""
    plan = WeightControl._receive

    def wrong(self: WeightControl, verb: Any) -> Any:
        if verb.weight_version is not None:
            state = self._scheduler.runner.state
            with state.mutate("version update"):
                state.relabel(verb.weight_version)
        return plan(self, verb)

    return _patched((WeightControl, "_receive", wrong))


def writes_buckets_in_place() -> AbstractContextManager[None]:
    """As engines do that have no transaction: what came serves at once, under the old label."""
    receive = WeightTransaction.receive

    def wrong(self: WeightTransaction, named_tensors: Any) -> None:
        named = list(named_tensors)
        receive(self, named)
        for name, tensor in named:
            self._weights.write(name, tensor)

    return _patched((WeightTransaction, "receive", wrong))


def end_after_a_failure_commits() -> AbstractContextManager[None]:
    """What came by the end is put in force, whatever went wrong on the way."""

    def verify(self: WeightTransaction) -> None:
        self._staging.prepare()
        self._state = TransactionState.VERIFIED

    return _patched((WeightTransaction, "fail", lambda self, reason: None), (WeightTransaction, "verify", verify))


def believes_that_restoring_worked() -> AbstractContextManager[None]:
    """A commit that failed without a way back does not stop generation."""
    take_back = WeightTransaction._roll_back

    def wrong(self: WeightTransaction, reason: str) -> None:
        take_back(self, reason)
        self.torn = None

    return _patched((WeightTransaction, "_roll_back", wrong))


def takes_every_call() -> AbstractContextManager[None]:
    """Whoever sends a bucket, an end or an abort, it is of the update that is open."""
    return _patched((WeightUpdater, "foreign", lambda *_: None))  # type: ignore[arg-type]


def forgets_what_was_lost() -> AbstractContextManager[None]:
    """What comes after an update was dropped is taken for updates of its own."""
    return _patched((UpdateBook, "loss_error", lambda self: None), (UpdateBook, "report_loss", lambda self: None))  # type: ignore[arg-type]


class _OneNamespace(CacheManager):
    def attach(self, req: Req, weight_epoch: int) -> None:
        super().attach(req, 0)

    def share_prompt(self, req: Req, weight_epoch: int) -> None:
        super().share_prompt(req, 0)

    def detach(self, req: Req, weight_epoch: int) -> None:
        super().detach(req, 0)


def shares_kv_across_versions() -> AbstractContextManager[None]:
    """The prefix cache knows tokens only, and is not emptied by a refresh."""
    return _patched((build, "CacheManager", _OneNamespace), (RadixCache, "retire", lambda self, epoch: None))  # type: ignore[arg-type]


def recomputes_routes_after_a_retraction() -> AbstractContextManager[None]:
    """The rows returned are those of the last forward over a token, not of the one that it was sampled by."""
    save_rows = RecordReader.save_rows

    def wrong(self: RecordReader, req: Req) -> None:
        save_rows(self, req)
        req.saved_rows = None

    return _patched((RecordReader, "save_rows", wrong))


def commits_in_the_middle_of_a_step() -> AbstractContextManager[None]:
    """Between the layers and the output head."""
    boundary: list[Callable[[], None]] = []
    logits, connect = ModelRunner.logits, Scheduler.connect

    def connects(self: Scheduler, verbs: Any, queued: Any, between_steps: Sequence[Callable[[], None]]) -> None:
        def only_when_idle(advance: Callable[[], None]) -> None:
            if not self.has_work:
                advance()

        boundary.extend(one for one in between_steps if isinstance(one.__self__, WeightControl))  # type: ignore[attr-defined]
        connect(self, verbs, queued, [functools.partial(only_when_idle, advance) for advance in between_steps])

    def wrong(self: ModelRunner, hidden_ND: torch.Tensor) -> torch.Tensor:
        boundary[-1]()
        return logits(self, hidden_ND)

    return _patched((Scheduler, "connect", connects), (ModelRunner, "logits", wrong))


def shifts_spans_by_one() -> AbstractContextManager[None]:
    """The token sampled first under new weights is said to be of the old ones."""

    note = VersionMarks.note

    def wrong(self: VersionMarks, epoch: ServingEpoch, length: int) -> None:
        note(self, epoch, length + 1 if self.last_version is not None else length)

    return _patched((VersionMarks, "note", wrong))


def kv_claims_to_be_new() -> AbstractContextManager[None]:
    """All KV is said to be of the version in force."""
    return _patched((ModelState, "version_of", lambda self, epoch: self.epoch.weight_version))


WRONG_VARIANTS: dict[str, Variant] = {
    variant.__name__: variant
    for variant in (
        publishes_before_the_vote,
        first_bucket_bumps_the_version,
        writes_buckets_in_place,
        end_after_a_failure_commits,
        believes_that_restoring_worked,
        takes_every_call,
        forgets_what_was_lost,
        shares_kv_across_versions,
        recomputes_routes_after_a_retraction,
        commits_in_the_middle_of_a_step,
        shifts_spans_by_one,
        kv_claims_to_be_new,
    )
}
