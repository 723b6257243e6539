"""`UpdateTarget`: the weights that an update refreshes, and what is known of them from update to update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weight_sync.content import ContentBook, TensorTable
from weight_sync.held_format import HeldFormats
from weight_sync.in_model import Apart
from weight_sync.known_calls import KnownCalls
from weight_sync.ledger import Coverage
from weight_sync.manifest import Manifest
from weight_sync.plan import Planner
from weight_sync.receivers.base import KnownCall
from weight_sync.staging import Staging
from weight_sync.tensor_meta import LogicalWeights
from weight_sync.transaction import WeightTransaction

_CALLS_KEPT = 4
"""Calls are kept with this many times the tensors of the target, all together."""


@dataclass(eq=False)
class UpdateTarget:
    """The weights that an update refreshes.  The storages, the known content, the plans and `torn` are its own.

    `placed(coverage)`, called when an update opens: the weights in which it is staged.  `quantised`: see `Intake`.
    `apart`: of weights that nothing reads before the commit; None: steps read them.
    `torn`: why the content is neither the old version nor a new one, until a complete refresh is committed.
    """

    name: str
    weights: LogicalWeights
    placed: Callable[[Coverage], LogicalWeights]
    quantised: HeldFormats
    apart: Apart | None = None
    content: ContentBook = field(init=False)
    planner: Planner = field(init=False)
    known_calls: KnownCalls[KnownCall] = field(init=False)
    torn: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        table = TensorTable(self.weights.metas())
        self.content = ContentBook(table)
        self.planner = Planner(table, self.quantised)
        self.known_calls = KnownCalls(_CALLS_KEPT * len(table))

    def open(self, stage: Callable[..., Staging], coverage: Coverage = "full", **options: Any) -> WeightTransaction:
        """Return a transaction of these weights.  `stage`: `new_staging` of this rank; `options`: its further fields.

        Raises as `WeightTransaction`, and what `placed` raises.
        """
        weights = self.placed(coverage)
        staging = stage(weights, homes=self.planner.homes(weights), apart=self.apart)
        options |= {"staging": staging, "quantised": self.quantised, "planner": self.planner}
        return WeightTransaction(weights, coverage=coverage, **options)


class Further(NamedTuple):
    """A further target of an update that begins.  `manifest`: of its tensors.

    `is_optional`: the update may bring all of its tensors, or none of them, and goes on without it then.
    """

    target: UpdateTarget
    manifest: Manifest | None = None
    is_optional: bool = False

    def open(self, stage: Callable[..., Staging], cast: bool) -> Beside:
        """Return it as a part of an update.  Raises as `UpdateTarget.open`."""
        transaction = self.target.open(stage, manifest=self.manifest, cast=cast)
        return Beside(self.target, transaction, self.is_optional)


@dataclass(eq=False)
class Beside:
    """A further target of an update, and its own tensors.  `may_lack`: it is optional, and no tensor has come."""

    target: UpdateTarget
    transaction: WeightTransaction
    is_optional: bool
    may_lack: bool = field(init=False)

    def __post_init__(self) -> None:
        self.may_lack = self.is_optional
