"""Updaters and engines that are wrong in a refusal, and rows of the table that must notice each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import numpy as np

from rollout.memory.radix_cache import RadixCache
from tests.faults.wrong_engines import WRONG_ENGINES
from weight_sync import intake, shadow
from weight_sync.fingerprint import fingerprint
from weight_sync.ledger import WeightLedger
from weight_sync.manifest import Stated
from weight_sync.transaction import WeightTransaction
from weight_sync.updater import WeightUpdater

Context = AbstractContextManager[Any]


def skips_the_way_back() -> Context:
    """Leave written tensors in the model after a failed commit."""
    return mock.patch.object(WeightTransaction, "_roll_back", lambda self, reason: None)


def forgets_what_is_derived() -> Context:
    """Put tensors back, but do not recompute derived tensors."""

    def undo_alone(self: WeightTransaction, reason: str) -> None:
        self._staging.undo()

    return mock.patch.object(WeightTransaction, "_roll_back", undo_alone)


def keeps_what_was_staged() -> Context:
    """Drop a refused update, but keep the copies that were staged for it."""
    return mock.patch.object(shadow.ShadowStaging, "undo", lambda self: None)


def leaves_the_update_open() -> Context:
    """Keep an update open that was refused."""
    return mock.patch.object(WeightUpdater, "abort", lambda self, *_: None)


def one_rank_commits() -> Context:
    """Commit on the ranks that could write, and roll back on the others."""
    commit = WeightTransaction.commit

    def alone(self: WeightTransaction, vote: Any) -> list[str]:
        def own(mine: bool) -> bool:
            vote(mine)
            return mine

        return commit(self, own)

    return mock.patch.object(WeightTransaction, "commit", alone)


def counts_nothing() -> Context:
    """Publish an update although tensors are missing."""
    return mock.patch.object(WeightLedger, "settle", lambda self: None)


def takes_any_value() -> Context:
    """Take values that are not finite, and content that does not fit its fingerprints."""

    def unchecked(named: Any, stated: Any) -> dict[str, int]:
        return {name: fingerprint(tensor) for name, tensor in named}

    take = intake.Intake.take_planned

    def planned(self: intake.Intake, plan: Any, complete: Any, fingerprints: Any, infinite: Any) -> None:
        take(self, plan, complete, fingerprints, np.zeros_like(infinite))

    stack = ExitStack()
    stack.enter_context(mock.patch.object(intake, "check_content", unchecked))
    stack.enter_context(mock.patch.object(intake.Intake, "take_planned", planned))
    stack.enter_context(mock.patch.object(Stated, "require", lambda self, numbers, found: None))
    return stack


def empties_the_cache_when_it_refuses() -> Context:
    """Drop every prefix with a refused bucket or end."""
    caches: list[RadixCache] = []
    made, fail = RadixCache.__init__, WeightTransaction.fail

    def noted(self: RadixCache, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        caches.append(self)

    def failing(self: WeightTransaction, reason: str) -> None:
        fail(self, reason)
        for cache in caches:
            cache.evict(1 << 20)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(RadixCache, "__init__", noted))
    stack.enter_context(mock.patch.object(WeightTransaction, "fail", failing))
    return stack


_ONE_RANK = "ranks-body-commit raises on rank 1-dp2 all-to-all, sequential"
_HALF = "scheduler-broadcast-half-host, sequential"
_NAN = "updater-memory-nan in model.norm.weight-host"
_ENTRIES: tuple[tuple[Callable[[], Context], tuple[str, ...]], ...] = (
    (
        skips_the_way_back,
        (
            *(f"updater-memory-exchange {at} fails-host" for at in (1, 4)),
            "updater-memory-53 unirl 480, write 3 stops-journal",
            "updater-memory-another rank cannot write-host",
            "updater-memory-missing-journal",
            "updater-memory-lease runs out-journal",
            "scheduler-broadcast-half-journal, sequential",
        ),
    ),
    (
        forgets_what_is_derived,
        ("updater-memory-another rank cannot write-host", "updater-memory-another rank cannot write-journal"),
    ),
    (keeps_what_was_staged, ("updater-memory-missing-host", "updater-memory-again-host")),
    (leaves_the_update_open, (_HALF.replace("half", "half and an abort"),)),
    (one_rank_commits, ("updater-memory-another rank cannot write-host", _ONE_RANK)),
    (counts_nothing, ("updater-memory-missing-host", "updater-disk-missing tensor-host", _HALF)),
    (takes_any_value, (_NAN, "updater-memory-one bit off-host")),
    (empties_the_cache_when_it_refuses, (_HALF, "scheduler-miles-not finite-host, sequential")),
    (WRONG_ENGINES["publishes_before_the_vote"].wrong, (_ONE_RANK,)),
    (WRONG_ENGINES["first_bucket_bumps_the_version"].wrong, ("scheduler-torchrl-missing-host, sequential",)),
    (WRONG_ENGINES["writes_buckets_in_place"].wrong, (_HALF, "updater-memory-missing-host")),
    (
        WRONG_ENGINES["forgives_a_bad_bucket"].wrong,
        ("updater-memory-52 tokenspeed 672-host", "updater-memory-56 trl 6913, broken pipe-host", _NAN),
    ),
    (WRONG_ENGINES["compares_no_fingerprints"].wrong, ("updater-memory-one bit off-host",)),
    (WRONG_ENGINES["ignores_the_last_vote"].wrong, ("updater-memory-another rank cannot write-host",)),
)
NOTICED = [(wrong, row) for wrong, rows in _ENTRIES for row in rows]
"""Wrong engines, each with the id of a row that must fail on it."""
