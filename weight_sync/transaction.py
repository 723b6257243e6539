"""`WeightTransaction`: all tensors of one weight version, staged aside, verified, then written together or not at all.

                   receive*            verify             commit
    begin --> OPEN ---------> OPEN ----------> VERIFIED ----------> COMMITTED
               |                |                 |  \\
               | a bucket fails | verify fails    |   `- write or vote fails: old weights restored
               v                v                 v                  v
             FAILED  --------------------------> ABORTED  <----------+        (abort, from any open state)

The serving weights are touched only inside `commit`, which keeps the old content of every tensor that it wrote until
the vote has passed.  A FAILED transaction cannot be verified: one bad bucket spoils the version for good.

Knows `LogicalWeights`, the ledger and the staged sink.  Does not know transports, engines or which version is in force.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence

import torch

from weight_sync.errors import CommitError, ContentError, CoverageError, TransactionStateError, WeightRequestError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.ledger import Coverage, WeightLedger, listed
from weight_sync.staging import StagedSink, load_weights, split_wire
from weight_sync.tensor_meta import LogicalWeights, TensorMeta
from weight_sync.wire import Manifest


class TransactionState(enum.Enum):
    OPEN = "open"
    FAILED = "failed"
    VERIFIED = "verified"
    COMMITTED = "committed"
    ABORTED = "aborted"


class WeightTransaction:
    """One refresh.  Not thread-safe: the caller orders the calls.

    `manifest`: what the sender says it will send, by any names the model accepts.  With it, exactly these tensors must
    come (with `coverage="full"` they must also be all of the model's), and stated fingerprints are compared.

    Raises at construction, for a manifest that cannot be right: `UnknownTensorError`, `ShapeMismatchError`,
    `DtypeMismatchError`, `CoverageError` (missing or repeated names), `WeightRequestError` (a fingerprint for a tensor
    that the model splits, or two that contradict each other).
    """

    def __init__(
        self,
        weights: LogicalWeights,
        weight_version: str | None = None,
        coverage: Coverage = "full",
        manifest: Manifest | None = None,
    ) -> None:
        self.weight_version = weight_version
        self.failure: str | None = None
        self._weights = weights
        self._state = TransactionState.OPEN
        self._sink = StagedSink()
        self._fingerprints: dict[str, int] = {}
        expected: Iterable[str] = weights.metas()
        if manifest is not None:
            self._fingerprints, announced = _read_manifest(weights, manifest)
            absent = sorted(weights.metas().keys() - announced)
            if coverage == "full" and absent:
                raise CoverageError(f"the manifest lacks {len(absent)} tensors: {listed(absent)}")
            if not announced:
                raise CoverageError("the manifest is empty")
            expected, coverage = announced, "full"
        self._ledger = WeightLedger(expected, coverage)

    @property
    def state(self) -> TransactionState:
        return self._state

    @property
    def received(self) -> list[str]:
        """Logical names that came, in order of arrival."""
        return self._ledger.received

    @property
    def missing(self) -> list[str]:
        """Logical names that were announced (without a manifest: all of the model's) and have not come, sorted."""
        return self._ledger.missing

    def check_receivable(self) -> None:
        """Raises `TransactionStateError` unless OPEN."""
        self._require(TransactionState.OPEN, "receive")

    def receive(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stage a copy of one bucket.  Any failure fails the transaction for good and is raised as it is.

        Raises `TransactionStateError` unless OPEN, and whatever `load_weights` raises.
        """
        self._require(TransactionState.OPEN, "receive")
        try:
            load_weights(self._weights, named_tensors, self._sink, self._ledger, cast=False)
        except Exception as error:
            self.fail(str(error))
            raise

    def fail(self, reason: str) -> None:
        """OPEN -> FAILED, for a bucket that never came this far.  Staged tensors are let go."""
        if self._state is TransactionState.OPEN:
            self._state = TransactionState.FAILED
            self.failure = reason
            self._sink.clear()

    def verify(self) -> None:
        """OPEN -> VERIFIED: everything came, every value is finite, stated fingerprints agree.

        Raises `TransactionStateError` unless OPEN, `CoverageError`, `ContentError`; the last two fail the transaction.
        """
        self._require(TransactionState.OPEN, "verify")
        try:
            self._ledger.settle()
            self._check_content()
        except Exception as error:
            self.fail(str(error))
            raise
        self._state = TransactionState.VERIFIED

    def commit(self, vote: Callable[[bool], bool]) -> list[str]:
        """VERIFIED -> COMMITTED: write every staged tensor; returns the logical names written.

        `vote(mine)` is called exactly once, after the writes, with whether they went well; it returns whether they went
        well everywhere.  If not, or if anything raises, every tensor written is put back bit for bit, the transaction
        is ABORTED and `CommitError` is raised, whose `restored` says whether putting back worked.
        """
        self._require(TransactionState.VERIFIED, "commit")
        old_content: list[tuple[str, torch.Tensor]] = []
        failure: Exception | None = None
        try:
            self._write_staged(old_content)
            self._weights.recompute_derived()
        except Exception as error:
            failure = error
        try:
            agreed = vote(failure is None)
        except Exception as error:
            agreed, failure = False, failure or error
        if agreed and failure is None:
            self._state = TransactionState.COMMITTED
            self._sink.clear()
            return self.received
        reason = f"{type(failure).__name__}: {failure}" if failure is not None else "another rank could not write"
        self._state = TransactionState.ABORTED
        self._sink.clear()
        self._restore(old_content, reason)
        raise CommitError(f"{reason}; the old weights were restored", restored=True) from failure

    def abort(self) -> None:
        """Any open state -> ABORTED.  Raises `TransactionStateError` when already over."""
        if self._state in (TransactionState.COMMITTED, TransactionState.ABORTED):
            raise TransactionStateError(f"cannot abort: the weight update is {self._state.value}")
        self._state = TransactionState.ABORTED
        self._sink.clear()

    def read_staged(self, name: str) -> torch.Tensor | None:
        """The staged logical tensor, on the host, never to be written to; None if it has not come."""
        return self._sink.get(name)

    def _require(self, state: TransactionState, verb: str) -> None:
        if self._state is not state:
            because = f": {self.failure}" if self.failure is not None else ""
            raise TransactionStateError(f"cannot {verb}: the weight update is {self._state.value}{because}")

    def _check_content(self) -> None:
        not_finite = [name for name in self._sink.names() if not _is_finite(self._sink.read(name))]
        if not_finite:
            raise ContentError(f"values that are not finite in {listed(not_finite)}")
        for name, stated in self._fingerprints.items():
            actual = fingerprint(self._sink.read(name))
            if actual != stated:
                raise ContentError(
                    f"{name}: fingerprint {fingerprint_hex(actual)}, the manifest says {fingerprint_hex(stated)}"
                )

    def _write_staged(self, old_content: list[tuple[str, torch.Tensor]]) -> None:
        """Exchange: each staged tensor is let go once written, as its old content has taken its room."""
        for name in self._sink.names():
            old_content.append((name, self._weights.read(name).detach().to("cpu", copy=True)))
            self._weights.write(name, self._sink.pop(name))

    def _restore(self, old_content: Sequence[tuple[str, torch.Tensor]], reason: str) -> None:
        try:
            for name, tensor in reversed(old_content):
                self._weights.write(name, tensor)
            self._weights.recompute_derived()
        except Exception as error:
            raise CommitError(
                f"{reason}; the old weights could NOT be restored ({type(error).__name__}: {error})", restored=False
            ) from error


def _read_manifest(weights: LogicalWeights, manifest: Manifest) -> tuple[dict[str, int], set[str]]:
    """Stated fingerprints by logical name, and all logical names announced."""
    metas: list[TensorMeta] = [meta for meta, _ in manifest]
    split = split_wire(weights, metas, cast=False)
    ledger = WeightLedger(weights.metas())
    refusals = ledger.refusals((meta.name, piece.name) for meta, pieces in zip(metas, split) for piece in pieces)
    if refusals:
        raise CoverageError(f"manifest: {listed(refusals)}")
    fingerprints: dict[str, int] = {}
    for (meta, stated), pieces in zip(manifest, split, strict=True):
        if stated is None:
            continue
        if len(pieces) != 1 or pieces[0].index != ():
            raise WeightRequestError(f"manifest: {meta.name} is split by the model; state fingerprints of its parts")
        if fingerprints.setdefault(pieces[0].name, stated) != stated:
            raise WeightRequestError(f"manifest: two fingerprints for {pieces[0].name}")
    return fingerprints, {piece.name for pieces in split for piece in pieces}


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass without temporaries: NaN propagates through min and max."""
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no min or max
        return all(bool(chunk.to(torch.float32).isfinite().all()) for chunk in tensor.reshape(-1).split(1 << 20))
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
