"""`WeightUpdater`: the groups of one rank, its one open transaction, and the order of steps.

    I/O side (blocking, one worker thread)     init_group  destroy_group  begin | open_implicit
                                               receive*  verify | abort
    step side (the thread that runs forwards)  commit

The I/O side never touches the serving weights.  A bucket that is refused for any reason fails the open transaction for
good.  Where the sender can be told nothing before it broadcasts, a refused bucket is still received and thrown away.

Knows transactions, groups and receivers.  Does not know pauses, requests, or which version is in force.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.errors import (
    CommitError,
    TransactionStateError,
    UnknownGroupError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.ledger import Coverage
from weight_sync.process_group import GroupHandle, init_process_group, resolve_backend
from weight_sync.receivers.base import BucketSource
from weight_sync.receivers.distributed import DistributedSource
from weight_sync.staging import split_wire
from weight_sync.tensor_meta import LogicalWeights, TensorMeta
from weight_sync.transaction import TransactionState, WeightTransaction
from weight_sync.wire import Manifest

_MIN_CALL_BYTES = 64 << 20


@dataclass(frozen=True)
class CommitResult:
    """What one commit put into force."""

    weight_version: str | None  # None: the sender named none
    names: list[str]  # logical tensors written
    num_bytes: int
    seconds: float  # time that the step thread spent


class WeightUpdater:
    """`device`: where the weights live.  `timeout_s`: deadline of a rendezvous and of one bucket.

    `vote(mine) -> all`: agreement of all ranks of the engine, called once in `verify` and once in `commit`, on the
    thread that calls these; it has its own deadline.  One call may announce at most twice the model's bytes.
    """

    def __init__(
        self,
        weights: LogicalWeights,
        *,
        device: torch.device | str,
        timeout_s: float,
        vote: Callable[[bool], bool],
    ) -> None:
        self._weights = weights
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._vote = vote
        self._groups: dict[str, GroupHandle] = {}
        self._transaction: WeightTransaction | None = None
        self._is_implicit = False

    # --- groups ------------------------------------------------------------------------------------------------

    def init_group(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str | None = None,
    ) -> None:
        """Join a group, blocking until all members have.  A group of this name is destroyed first.

        Raises `WeightRequestError`, `TransportError`.
        """
        if rank < 1:
            raise WeightRequestError(f"rank 0 of a weight update group is the trainer; got rank {rank} for an engine")
        resolved = resolve_backend(backend, self._device)
        if group_name in self._groups:
            self.destroy_group(group_name)
        self._groups[group_name] = init_process_group(
            master_address, master_port, rank, world_size, group_name, resolved, self._timeout_s
        )

    def destroy_group(self, group_name: str) -> None:
        """Leave a group.  Raises `UnknownGroupError`."""
        self._group(group_name)
        self._groups.pop(group_name).destroy()

    def close(self) -> None:
        """Leave all groups and drop the open transaction."""
        for name in list(self._groups):
            self.destroy_group(name)
        if self._transaction is not None:
            self.abort()

    # --- transaction, I/O side ---------------------------------------------------------------------------------

    def begin(
        self, weight_version: str | None = None, coverage: Coverage = "full", manifest: Manifest | None = None
    ) -> None:
        """Open a transaction.  Raises `TransactionStateError` if one is open, and what `WeightTransaction` raises."""
        self._open(weight_version, coverage, manifest, implicit=False)

    def open_implicit(self, coverage: Coverage = "partial") -> None:
        """Open a transaction on behalf of a client that does not say begin and end.  Raises as `begin`."""
        self._open(None, coverage, None, implicit=True)

    def receive(self, source: BucketSource, weight_version: str | None = None) -> None:
        """Receive one call's tensors into the open transaction.

        Raises `TransactionStateError` (nothing open, failed before, or another version than before), and whatever the
        source and `WeightTransaction.receive` raise.  Every error fails the open transaction.
        """
        try:
            metas = source.announce(self._max_call_bytes())
            refusal = self._refusal(metas, weight_version)
            if refusal is not None and not source.must_drain:
                raise refusal
            for bucket in source.receive():
                if refusal is None:
                    self._require_transaction("receive").receive(bucket)
            if refusal is not None:
                raise refusal
        except Exception as error:
            if self._transaction is not None:
                self._transaction.fail(str(error))
            raise
        if weight_version is not None:
            self.set_pending_version(weight_version)

    def distributed_source(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
    ) -> DistributedSource:
        """One bucket that rank 0 of a joined group will broadcast.

        `load_format`: None (a broadcast per tensor) or "flattened_bucket".  The source raises `UnknownGroupError`
        besides its own errors; a group that it breaks is destroyed.
        """
        return DistributedSource(
            (names, dtypes, shapes),
            load_format,
            join=lambda: self._group(group_name),
            leave=lambda: self.destroy_group(group_name),
            device=self._device,
            timeout_s=self._timeout_s,
        )

    def verify(self) -> None:
        """Check the open transaction here and on all ranks; it can be committed afterwards.

        Raises `CoverageError`, `ContentError`, `TransactionStateError`; the transaction is dropped then, and the next
        `begin` is free.
        """
        transaction = self._require_transaction("verify")
        if transaction.state is TransactionState.VERIFIED:
            raise TransactionStateError("cannot verify: the weight update is verified")
        failure: Exception | None = None
        try:
            transaction.verify()
        except WeightSyncError as error:
            failure = error
        agreed = False
        try:
            agreed = self._vote(failure is None)
        finally:
            if not agreed or failure is not None:
                self.abort()
        if failure is not None:
            raise failure
        if not agreed:
            raise TransactionStateError("another rank could not verify the weight update")

    def abort(self) -> None:
        """Drop the open transaction.  Raises `TransactionStateError` if none is open."""
        transaction = self._require_transaction("abort")
        self._transaction = None
        transaction.abort()

    # --- transaction, step side --------------------------------------------------------------------------------

    def commit(self) -> CommitResult:
        """Write the verified transaction into the serving weights, all or nothing.

        Raises `TransactionStateError` unless verified (nothing changes), `CommitError` (the transaction is dropped; its
        `restored` says whether the old weights are back).
        """
        transaction = self._require_transaction("commit")
        start = time.perf_counter()
        try:
            names = transaction.commit(self._vote)
        except CommitError:
            self._transaction = None
            raise
        self._transaction = None
        metas = self._weights.metas()
        num_bytes = sum(metas[name].nbytes for name in names)
        return CommitResult(transaction.weight_version, names, num_bytes, time.perf_counter() - start)

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transaction is not None

    @property
    def is_implicit(self) -> bool:
        """Whether the open transaction was opened by `open_implicit`."""
        return self._transaction is not None and self._is_implicit

    @property
    def pending_version(self) -> str | None:
        """The version that the open transaction will put into force, as far as it is known."""
        return self._transaction.weight_version if self._transaction is not None else None

    def set_pending_version(self, weight_version: str) -> None:
        """Name the open transaction's version.  Raises `TransactionStateError` if none is open."""
        self._require_transaction("name").weight_version = weight_version

    def staged(self, name: str) -> torch.Tensor | None:
        """The staged logical tensor by its canonical name, on the host; None if nothing is open or it has not come."""
        return self._transaction.read_staged(name) if self._transaction is not None else None

    def status(self) -> dict[str, Any]:
        """`open`, `implicit`, `state`, `weight_version`, `received` and `missing` (counts), `failed` (reason).

        With nothing open the last five are None.
        """
        transaction = self._transaction
        return {
            "open": transaction is not None,
            "implicit": self.is_implicit,
            "state": transaction.state.value if transaction else None,
            "weight_version": transaction.weight_version if transaction else None,
            "received": len(transaction.received) if transaction else None,
            "missing": len(transaction.missing) if transaction else None,
            "failed": transaction.failure if transaction else None,
        }

    def checksums(self) -> dict[str, str]:
        """Fingerprint (16 hex digits) of every logical tensor as it is served now; not while a commit runs."""
        return {meta.name: fingerprint_hex(value) for meta, value in self._live_fingerprints()}

    def content_digest(self) -> str:
        """`fingerprint.digest` over all logical tensors as they are served now; not while a commit runs."""
        return digest(self._live_fingerprints())

    # --- helpers -----------------------------------------------------------------------------------------------

    def _open(self, weight_version: str | None, coverage: Coverage, manifest: Manifest | None, implicit: bool) -> None:
        if self._transaction is not None:
            raise TransactionStateError("a weight update is open already; end or abort it first")
        self._transaction = WeightTransaction(self._weights, weight_version, coverage, manifest)
        self._is_implicit = implicit

    def _group(self, group_name: str) -> GroupHandle:
        if group_name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise UnknownGroupError(f"weight update group {group_name!r} does not exist; joined groups: {known}")
        return self._groups[group_name]

    def _require_transaction(self, verb: str) -> WeightTransaction:
        if self._transaction is None:
            raise TransactionStateError(f"cannot {verb}: no weight update is open")
        return self._transaction

    def _max_call_bytes(self) -> int:
        return max(2 * sum(meta.nbytes for meta in self._weights.metas().values()), _MIN_CALL_BYTES)

    def _refusal(self, metas: Sequence[TensorMeta], weight_version: str | None) -> WeightSyncError | None:
        """Why the bucket cannot be used, known before it is received."""
        try:
            transaction = self._require_transaction("receive")
            transaction.check_receivable()
            pending = transaction.weight_version
            if None not in (pending, weight_version) and pending != weight_version:
                raise TransactionStateError(
                    f"the bucket is of version {weight_version!r}, the open weight update of {pending!r}"
                )
            split_wire(self._weights, metas, cast=False)
        except WeightSyncError as error:
            return error
        return None

    def _live_fingerprints(self) -> list[tuple[TensorMeta, int]]:
        return [(meta, fingerprint(self._weights.read(name))) for name, meta in self._weights.metas().items()]
