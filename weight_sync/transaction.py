"""`WeightTransaction`: all tensors of one weight version, checked, then published together or not at all.

                   receive*            verify             commit
    begin --> OPEN ---------> OPEN ----------> VERIFIED ----------> COMMITTED
               |                |                 |  \\
               | a bucket fails | verify fails    |   `- write fails or vote lost: old weights restored
               v                v                 v                  v
             FAILED  --------------------------> ABORTED  <----------+        (abort, from any open state)

The staging keeps the tensors until then.  A transaction that ends without a commit is rolled back: the old content is
restored.  If that fails, `torn` is the reason; nothing may be sampled.  A FAILED transaction cannot be verified: one
bad bucket spoils the version for good.  A commit whose vote raises is IN_DOUBT: other ranks may serve the new version
or the old one, so neither may be served here.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from weight_sync.content import Contents, Digests, TensorTable
from weight_sync.errors import (
    CommitError,
    CoverageError,
    StagingError,
    TransactionStateError,
    WeightRequestError,
    listed,
)
from weight_sync.held_format import AS_SENT, HeldFormats
from weight_sync.held_memory import Areas
from weight_sync.homes import Homes
from weight_sync.in_model import Apart, ApartStaging, InPlaceStaging, JournalStaging
from weight_sync.intake import Arrival, Intake, ProvenPart, load_part, store
from weight_sync.ledger import Coverage, Numbers, WeightLedger
from weight_sync.manifest import Entries, Manifest, Stated
from weight_sync.plan import BucketPlan, Planner
from weight_sync.rank_cover import RankCover
from weight_sync.rank_parts import Exchange, alone
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import Staging, StagingMode, queue_of
from weight_sync.take_pairs import PairsFound
from weight_sync.tensor_meta import BucketLayout, LogicalWeights, PackedBucket, Part, TensorMeta

NAMES_SHOWN = 10
NAME_FIELDS = ("received_names", "missing_names")
COUNTED_FIELDS = ("received", "missing", *NAME_FIELDS, "num_bytes", "unpaired", "unpaired_bytes")
STATUS_FIELDS = ("state", "weight_version", "coverage", *COUNTED_FIELDS, "failed")
_OTHER_FORM = {
    True: "the weight update was not begun with per_rank, and this bucket is per rank",
    False: "the weight update was begun with per_rank, and this bucket is not per rank: give tensors_per_rank",
}


class TransactionState(enum.Enum):
    OPEN = "open"
    FAILED = "failed"
    VERIFIED = "verified"
    COMMITTED = "committed"
    IN_DOUBT = "in doubt"
    ABORTED = "aborted"


class WeightTransaction:
    """One refresh.  Not thread-safe: the caller orders the calls.

    `manifest`: what the sender announces, by any names the model accepts.  With it, exactly these tensors must
    come (with `coverage="full"` they must also be all of the model's), and stated fingerprints are compared.
    `staging`: a fresh one; by default a second copy in host memory.  `quantised`: see `Intake`.  `cast`: what comes may
    be cast to the model's dtypes, also where that loses something.  `planner`: keeps plans from one transaction to the
    next.  `cover`: each rank is sent what it keeps, and `verify` puts fingerprints together; None: all is sent to all.

    Raises at construction, for a manifest that cannot be right: `UnknownTensorError`, `ShapeMismatchError`,
    `DtypeMismatchError`, `CoverageError` (missing or repeated names), `WeightRequestError` (a fingerprint for a tensor
    that the model splits, or two that contradict each other).
    """

    def __init__(
        self,
        weights: LogicalWeights,
        weight_version: str | None = None,
        coverage: Coverage = "full",
        manifest: Manifest | Entries | None = None,
        staging: Staging | None = None,
        *,
        quantised: HeldFormats = AS_SENT,
        cast: bool = False,
        planner: Planner | None = None,
        cover: RankCover | None = None,
    ) -> None:
        self.weight_version = weight_version
        self.coverage = coverage
        self._cast = cast
        self.failure: str | None = None
        self.torn: str | None = None
        self.digests = Digests()  # of the whole content once it is committed, where they are known
        self._opened_at = time.monotonic()
        self.weights = weights
        self.state = TransactionState.OPEN
        self._planner = Planner(TensorTable(weights.metas()), quantised) if planner is None else planner
        self._staging = ShadowStaging(weights) if staging is None else staging
        table = self._planner.table
        stated = Stated(table)
        self._cover = cover
        expected: Numbers | None = None
        if manifest is not None:
            manifest = manifest if isinstance(manifest, Manifest) else Manifest.of(manifest)
            plan = self._planner.manifest(weights, manifest, cast)
            if coverage == "full":
                plan.require_all(table)
            if not len(plan.announced):
                raise CoverageError("the manifest is empty")
            plan.note(manifest, stated)
            expected, coverage = plan.announced, "full"
        self._ledger = WeightLedger(table, coverage, expected, None if cover is None else cover.kept, table.num_bytes)
        self._intake = Intake(weights, table, stated, quantised, cover)
        self._plans: dict[BucketLayout, BucketPlan] = {}

    @property
    def age_s(self) -> float:
        """Seconds since it was opened."""
        return time.monotonic() - self._opened_at

    @property
    def received(self) -> list[str]:
        """Logical names that came, in order of arrival."""
        return self._ledger.received

    @property
    def missing(self) -> list[str]:
        """Logical names that were announced (without a manifest: all of the model's) and have not come, sorted."""
        return self._ledger.missing

    @property
    def num_received(self) -> int:
        """The number of logical tensors that came."""
        return self._ledger.num_received

    @property
    def num_missing(self) -> int:
        """The length of `missing`."""
        return self._ledger.num_missing

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors that came."""
        return self._ledger.num_bytes

    @property
    def dirty(self) -> bool:
        """True if the model holds anything of this transaction."""
        return self.state is not TransactionState.COMMITTED and self._staging.dirty

    @property
    def contents(self) -> Contents:
        """The contents of the tensors that came."""
        return self._intake.contents

    def status(self) -> dict[str, Any]:
        """Return counts, and the first names."""
        return {
            "state": self.state.value,
            "weight_version": self.weight_version,
            "coverage": self.coverage,
            "received": self.num_received,
            "missing": self.num_missing,
            "received_names": self._ledger.first_received(NAMES_SHOWN),
            "missing_names": self._ledger.first_missing(NAMES_SHOWN),
            "num_bytes": self.num_bytes,
            "unpaired": self._intake.pairs.num_waiting,
            "unpaired_bytes": self._intake.pairs.num_bytes,
            "failed": self.failure,
        }

    def announce(
        self,
        metas: Sequence[TensorMeta],
        cast: bool = False,
        layouts: Sequence[BucketLayout] = (),
        *,
        per_rank: bool = False,
    ) -> None:
        """Check what is known of a bucket before it is received.  `cast`: of this one, whatever the others are.

        `layouts`: of the messages in which the tensors will come, where that is known.  `per_rank`: other ranks get
        other tensors.

        Raises `TransactionStateError` unless OPEN, `WeightRequestError` for a bucket that is not per rank in an update
        that is, or the other way round, and as `Intake.announce`.
        """
        self._require(TransactionState.OPEN, "receive")
        if per_rank != (self._cover is not None):
            raise WeightRequestError(_OTHER_FORM[per_rank])
        self._plans = {}
        if layouts and self._staging.takes_spans:
            plans = self._planner.plans(self.weights, layouts, cast or self._cast, self._cover)
            self._plans = dict(zip(layouts, plans, strict=True))
        else:
            self._intake.announce(metas, cast or self._cast)

    def check_committable(self) -> None:
        """Raise `TransactionStateError` unless the transaction is VERIFIED."""
        self._require(TransactionState.VERIFIED, "commit")

    def receive(
        self, bucket: Iterable[tuple[str, torch.Tensor]] | PackedBucket | ProvenPart, cast: bool = False
    ) -> None:
        """Stage one bucket.  `cast`: as in `announce`.

        Finite values and stated fingerprints are checked before any of it lands in the model.

        A quantised weight or its scales may come in another bucket than the other: the first waits.

        Raises `TransactionStateError` unless OPEN; `ContentError`, `StagingError` and what `Intake.take` and `store`
        raise fail the transaction for good.
        """
        with self._failing("receive"):
            if isinstance(bucket, ProvenPart):
                self._intake.take_part(bucket)
                load_part(bucket, self._staging, self._ledger)
            elif isinstance(bucket, PackedBucket):
                self._take_packed(bucket, cast or self._cast)
            else:
                store(self._intake.take(bucket, self._ledger, cast or self._cast), self._staging, self._ledger)
            self._staging.settle()

    def _take_packed(self, bucket: PackedBucket, cast: bool) -> None:
        """Replay the plan of a bucket.  What it leaves out, or cannot do now, goes tensor by tensor."""
        if self._staging.takes_spans and self._cover is None:
            bucket = self._planner.joined(self.weights, bucket, self._intake.pairs)
        plan = self._plan_of(bucket.layout, cast)
        if plan is None or (plan.boxes is None and not self._intake.is_clear(plan, self._ledger)):  # boxes go one way
            parts = bucket.layout.views(bucket.content)
            store(self._intake.take_parts(parts, self._ledger, cast), self._staging, self._ledger)
            return
        if not self._ledger.is_clear(plan.numbers):
            raise self._came_before(plan)
        rest: list[Arrival] = []

        def accept(fingerprints_T2: np.ndarray, infinite_T2: np.ndarray, pairs: PairsFound | None) -> None:
            if plan.pairs is not None and pairs is not None:
                self._intake.take_planned_pairs(plan.pairs, pairs, bucket, self._ledger, cast)
            complete = self._ledger.record_boxes(plan.boxes)
            self._intake.take_planned(plan, complete, fingerprints_T2, infinite_T2)
            self._ledger.record_all(plan.numbers, plan.wire_names)
            if plan.rest:
                parts = bucket.layout.views(bucket.content, plan.rest)
                rest.extend(self._intake.take_parts(parts, self._ledger, cast))

        self._staging.write_spans(plan, bucket.content, accept)
        store(rest, self._staging, self._ledger)

    def _came_before(self, plan: BucketPlan) -> CoverageError:
        """Return the error of a tensor that came before, in a bucket with boxes."""
        refusals = self._ledger.refusals(zip(plan.wire_names, plan.names, strict=True))
        came = [f"{name} came before under another name" for name in plan.names if name in self._ledger]
        return CoverageError(f"{listed(refusals or came)}; send it apart from boxes")

    def _plan_of(self, layout: BucketLayout, cast: bool) -> BucketPlan | None:
        """Return the plan of a bucket, announced or not; None where the staging takes tensor by tensor."""
        plan = self._plans.get(layout)
        if plan is None and self._staging.takes_spans:
            (plan,) = self._planner.plans(self.weights, [layout], cast)
        return plan

    def fail(self, reason: str) -> None:
        """Fail, OPEN -> FAILED, over a bucket that never came here.

        The model is as it was before the first bucket, or `torn` has the reason.
        """
        if self.state is TransactionState.OPEN:
            self.state = TransactionState.FAILED
            self.failure = reason
            self._roll_back(reason)

    def verify(self, exchange: Exchange = alone) -> None:
        """Verify, OPEN -> VERIFIED: everything came, and the commit is prepared.

        `exchange`: with the other ranks, called once if each is sent what it keeps.  Raises `TransactionStateError`
        unless OPEN, `CoverageError`, `StagingError`, and as `Intake.joined`; all but the first fail the transaction.
        """
        with self._failing("verify"):
            self._intake.settle()
            self._ledger.settle()
            self._ledger.record_elsewhere(self._intake.joined(exchange))
            self._staging.prepare()
        self.state = TransactionState.VERIFIED

    def commit(self, vote: Callable[[bool], bool]) -> None:
        """Commit, VERIFIED -> COMMITTED: put every tensor into the model.

        `vote(mine)` is called exactly once, after the writes, with whether they went well; it returns whether they went
        well everywhere.  If not, the old content is restored bit for bit, the transaction is ABORTED and `CommitError`
        is raised, whose `restored` states whether that worked.  What staging took is held until `close`.

        What `vote` raises is raised as it is, and leaves the transaction IN_DOUBT, newly written: serving must end.
        """
        self.check_committable()
        failure: Exception | None = None
        try:
            self._staging.commit()
            self.weights.recompute_derived()
            self._staging.settle()
        except Exception as error:
            failure = error
        self.state = TransactionState.IN_DOUBT
        if vote(failure is None) and failure is None:
            self.state = TransactionState.COMMITTED
            return
        elsewhere = "another rank, or another target of the update, did not commit"  # a vote has no reason
        reason = elsewhere if failure is None else f"{type(failure).__name__}: {failure}"
        self.state = TransactionState.ABORTED
        self._roll_back(reason)
        if self.torn is not None:
            raise CommitError(self.torn, restored=False) from failure
        raise CommitError(f"{reason}; the old weights were restored", restored=True) from failure

    def abort(self, reason: str = "the weight update was aborted") -> None:
        """Abort, from any open state -> ABORTED.  Raises `TransactionStateError` when already over."""
        if self.state in (TransactionState.COMMITTED, TransactionState.IN_DOUBT, TransactionState.ABORTED):
            raise TransactionStateError(f"cannot abort: the weight update is {self.state.value}")
        if self.state is not TransactionState.FAILED:
            self._roll_back(reason)
        self.state = TransactionState.ABORTED

    def close(self) -> None:
        """Release the memory that staging took, when COMMITTED; on any thread."""
        assert self.state is TransactionState.COMMITTED
        self._staging.close()

    def read_staged(self, name: str) -> Sequence[Part] | None:
        """Return what this rank's places will hold of the tensor, never to be written to; None if it has not come or
        was released."""
        open_states = (TransactionState.OPEN, TransactionState.VERIFIED)
        return self._staging.read(name) if self.state in open_states and name in self._ledger else None

    @contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        """Fail the transaction on any error inside; a `StagingError` states what is in the model then.

        Raises `TransactionStateError` unless OPEN.
        """
        self._require(TransactionState.OPEN, verb)
        try:
            yield
        except Exception as error:
            self.fail(str(error))
            if isinstance(error, StagingError):
                raise StagingError(f"{error}; {self.torn or 'the old weights were restored'}") from error
            raise

    def _require(self, state: TransactionState, verb: str) -> None:
        if self.state is not state:
            because = f": {self.failure}" if self.failure is not None else ""
            advice = "; drop it with abort_weight_update, and begin again" if verb == "receive" else ""
            raise TransactionStateError(f"cannot {verb}: the weight update is {self.state.value}{because}{advice}")

    def _roll_back(self, reason: str) -> None:
        """Restore the model as it was before the first bucket; else set `torn`."""
        was_dirty = self._staging.dirty
        self._intake.clear()
        try:
            self._staging.undo()
            if was_dirty:
                self.weights.recompute_derived()
                self._staging.settle()
        except Exception as error:
            self.torn = f"{reason}; the old weights could NOT be restored ({type(error).__name__}: {error})"
            self._staging.close()


def new_staging(
    weights: LogicalWeights,
    mode: StagingMode,
    journal_dir: str | None = None,
    memory: Areas | None = None,
    device: torch.device | str = "cpu",
    homes: Homes | None = None,
    apart: Apart | None = None,
) -> Staging:
    """Return the staging of one transaction.

    `journal_dir`: where mode "journal" keeps its file; None: the temporary directory.  `memory`: what stagings take
    from; by default their own.  `device`: where the weights lie.  `homes`: their places, where known.  `apart`: of
    weights that nothing reads before the commit, whatever the mode.
    """
    if apart is not None:
        return ApartStaging(weights, apart, homes)
    queue = queue_of(device)
    if mode == "journal":
        return JournalStaging(weights, journal_dir, queue, memory, homes)
    if mode == "in_place":
        return InPlaceStaging(weights, queue, memory, homes)
    return ShadowStaging(weights, mode, memory, queue, homes)
