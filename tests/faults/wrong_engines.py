"""Engines and ranks that break one rule each, and the suites that must notice it.

    "matrix"     the fault matrix finds one of its cells wrong
    "histories"  a random history fails
    "adapters"   the matrix with an adapter as the target finds one of its cells wrong
    "stopped"    a server with such ranks fails a cell of `stopped`

Each is a context in which the engine's own code is replaced; nothing else of the engine or of the suite changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch

from rollout.control import rank_consensus
from rollout.control.control import Control
from rollout.control.rank_consensus import PeerRankError, RankConsensus
from rollout.control.weight_commit import WeightCommit
from rollout.control.weight_control import WeightControl
from rollout.control.weight_queue import WeightQueue
from rollout.distributed.communicator import Communicator, RankLostError
from rollout.distributed.parallel import Parallel
from rollout.engine import build
from rollout.executor.model_runner import ModelRunner
from rollout.memory.cache_manager import CacheManager
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import Namespace
from rollout.memory.sequence import CachedSequence
from rollout.model.adapter_places import AdapterPlaces
from rollout.model.model_state import ModelState, ServingEpoch
from rollout.scheduler.agenda import Agenda
from rollout.scheduler.records import RecordReader
from rollout.scheduler.req import Req, VersionMarks
from tests.faults import engines
from weight_sync import intake
from weight_sync.content_check import check_content
from weight_sync.errors import WeightSyncError
from weight_sync.manifest import Stated
from weight_sync.rank_parts import Exchange, alone
from weight_sync.tensor_meta import PackedBucket
from weight_sync.transaction import TransactionState, WeightTransaction
from weight_sync.update_book import UpdateBook
from weight_sync.updater import WeightUpdater

HANG_S = 2.0
Suite = Literal["matrix", "histories", "stopped", "adapters"]
Context = AbstractContextManager[Any]
Wrong = Callable[[], Context]
Replacement = tuple[Any, str, Any]
"""Owner, name, and the object that replaces the attribute."""


@dataclass(frozen=True)
class Entry:
    """A wrong engine; each suite in `noticed_by` must notice it."""

    wrong: Wrong
    noticed_by: tuple[Suite, ...]


WRONG_ENGINES: dict[str, Entry] = {}


def noticed_by(*suites: Suite) -> Callable[[Wrong], Wrong]:
    """Enter the decorated engine in the list."""

    def enter(wrong: Wrong) -> Wrong:
        WRONG_ENGINES[wrong.__name__] = Entry(wrong, suites)
        return wrong

    return enter


def wrong_engines(suite: Suite) -> dict[str, Wrong]:
    """Return the wrong engines that a suite must notice."""
    return {name: entry.wrong for name, entry in WRONG_ENGINES.items() if suite in entry.noticed_by}


@contextmanager
def _replaced(*replacements: Replacement) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


@noticed_by("matrix", "histories")
def publishes_before_the_vote() -> Context:
    """Put the new label in force before all ranks have written."""
    commit = WeightCommit.run

    def wrong(self: WeightCommit, **how: Any) -> Any:
        state = self._scheduler.runner.state
        with state.mutate("weight refresh"):
            update = self._updater.update
            state.relabel("unnamed" if update is None else update.transaction.weight_version or "unnamed")
        return commit(self, **how)

    return _replaced((WeightCommit, "run", wrong))


@noticed_by("histories")
def first_bucket_bumps_the_version() -> Context:
    """Take `weight_version` from the first call that carries it, as some engines do."""
    plan = WeightControl._receive

    def wrong(self: WeightControl, verb: Any) -> Any:
        if verb.weight_version is not None:
            state = self._scheduler.runner.state
            with state.mutate("version update"):
                state.relabel(verb.weight_version)
        return plan(self, verb)

    return _replaced((WeightControl, "_receive", wrong))


@noticed_by("matrix", "histories")
def forgives_a_bad_bucket() -> Context:
    """Forget that a bucket was refused, and commit the buckets that came by the end."""

    def verify(self: WeightTransaction, exchange: Exchange = alone) -> None:
        self._staging.prepare()
        self.state = TransactionState.VERIFIED

    return _replaced((WeightTransaction, "fail", lambda self, reason: None), (WeightTransaction, "verify", verify))


@noticed_by("adapters")
def labels_an_adapter_that_it_did_not_apply() -> Context:
    """Leave the old content in the slot of the next version, as a rank that missed the commit does."""
    return _replaced((AdapterPlaces, "write", lambda self, slot, writes: None))


@noticed_by("adapters")
def shares_kv_between_versions_of_a_name() -> Context:
    return _replaced((Req, "cache_key", property(lambda self: self.source.lora_name)))


@noticed_by("matrix", "adapters")
def compares_no_fingerprints() -> Context:
    one_by_one = (intake, "check_content", lambda named, stated: check_content(named, {}))
    return _replaced(one_by_one, (Stated, "require", lambda self, numbers, found: None))


@noticed_by("matrix", "histories")
def writes_buckets_in_place() -> Context:
    """Write each bucket into the served weights at once, under the old label, as engines without a transaction do."""
    receive = WeightTransaction.receive

    def wrong(self: WeightTransaction, bucket: Any, cast: bool = False) -> None:
        named = bucket.named() if isinstance(bucket, PackedBucket) else list(bucket)
        receive(self, bucket if isinstance(bucket, PackedBucket) else named, cast)
        for name, tensor in named:
            self.weights.write(name, tensor)

    return _replaced((WeightTransaction, "receive", wrong))


@noticed_by("matrix")
def ignores_the_last_vote() -> Context:
    """Put an update in force on this rank that another rank could not write."""
    commit = WeightTransaction.commit
    return _replaced((WeightTransaction, "commit", lambda self, vote: commit(self, lambda mine: mine)))


@noticed_by("matrix", "histories")
def believes_that_restoring_worked() -> Context:
    """Go on generating after a commit that failed without a way back."""
    take_back = WeightTransaction._roll_back

    def wrong(self: WeightTransaction, reason: str) -> None:
        take_back(self, reason)
        self.torn = None

    return _replaced((WeightTransaction, "_roll_back", wrong))


@noticed_by("matrix")
def has_no_leases() -> Context:
    """Let a trainer that died block the next one."""
    return _replaced((WeightUpdater, "expire", lambda self: False))


@noticed_by("matrix")
def lets_a_flush_decide() -> Context:
    """Drop the open update when the cache is flushed."""
    flush = Control._flush_cache

    def wrong(self: Control, verb: Any) -> Any:
        if self._weights._updater.is_open:
            self._weights._updater.drop("the cache was flushed")
        return flush(self, verb)

    return _replaced((Control, "_flush_cache", wrong))


@noticed_by("matrix", "histories")
def takes_every_call() -> Context:
    """Take every bucket, end and abort for one of the open update."""
    return _replaced((WeightUpdater, "foreign", lambda *_: None))


@noticed_by("histories")
def forgets_what_was_lost() -> Context:
    """Take the calls after a dropped update for updates of their own."""
    return _replaced((UpdateBook, "record_loss", lambda self, reason, *, reported: None))


@noticed_by("matrix")
def hangs_when_a_bucket_is_refused() -> Context:
    """Hang for longer than the deadline, which is shortened here."""
    receive = WeightUpdater.receive

    def wrong(self: WeightUpdater, *arguments: Any) -> None:
        try:
            receive(self, *arguments)
        except WeightSyncError:
            time.sleep(HANG_S)
            raise

    return _replaced((WeightUpdater, "receive", wrong), (engines, "DEADLINE_S", HANG_S / 2))


class _OneNamespace(CacheManager):
    def attach(self, sequence: CachedSequence, namespace: Namespace) -> None:
        super().attach(sequence, (namespace[0], 0))

    def share_prompt(self, sequence: CachedSequence, weight_epoch: int) -> None:
        super().share_prompt(sequence, 0)

    def detach(self, sequence: CachedSequence, weight_epoch: int, session_to_pin: str | None = None) -> None:
        super().detach(sequence, 0, session_to_pin)


@noticed_by("histories")
def shares_kv_across_versions() -> Context:
    """Share cached prefixes across versions by their tokens, and keep them at a refresh."""
    return _replaced((build, "CacheManager", _OneNamespace), (RadixCache, "retire", lambda self, epoch: None))


@noticed_by("histories")
def recomputes_routes_after_a_retraction() -> Context:
    """Return the rows of the last forward over a token, not of the one that it was sampled by."""
    save_rows = RecordReader.save_rows

    def wrong(self: RecordReader, req: Req) -> None:
        save_rows(self, req)
        req.saved_rows = None

    return _replaced((RecordReader, "save_rows", wrong))


@noticed_by("histories")
def commits_in_the_middle_of_a_step() -> Context:
    """Commit between the layers and the output head."""
    queues: list[WeightQueue] = []
    logits, run, advance = ModelRunner.logits, Agenda.run, WeightQueue.advance

    def builds(self: WeightQueue, *args: Any, **fields: Any) -> None:
        make(self, *args, **fields)
        queues.append(self)

    def only_when_idle(self: Agenda) -> None:
        if not queues[-1]._scheduler.has_work:
            run(self)

    def wrong(self: ModelRunner, hidden_ND: torch.Tensor) -> torch.Tensor:
        advance(queues[-1])
        return logits(self, hidden_ND)

    make = WeightQueue.__init__
    return _replaced((WeightQueue, "__init__", builds), (Agenda, "run", only_when_idle), (ModelRunner, "logits", wrong))


@noticed_by("histories")
def shifts_spans_by_one() -> Context:
    """Give the first token under new weights the label of the old ones."""
    note = VersionMarks.note

    def wrong(self: VersionMarks, epoch: ServingEpoch, length: int) -> None:
        note(self, epoch, length + 1 if self.last_version is not None else length)

    return _replaced((VersionMarks, "note", wrong))


@noticed_by("histories")
def kv_claims_to_be_new() -> Context:
    """Give all KV the label of the version in force."""
    return _replaced((ModelState, "version_of", lambda self, epoch: self.epoch.weight_version))


@noticed_by("stopped")
def a_vote_that_raises_is_a_no() -> Context:
    """Roll back to the old weights and let the rank serve on; versions are not compared."""
    vote = RankConsensus.commit_vote

    def wrong(self: RankConsensus, mine: bool) -> bool:
        try:
            return vote(self, mine)
        except RankLostError:
            return False

    same_mark = (rank_consensus.VerbMark, "__eq__", lambda self, other: True)
    return _replaced((RankConsensus, "commit_vote", wrong), same_mark, *_survives_lost_groups())


@noticed_by("stopped")
def serves_on_after_a_lost_exchange() -> Context:
    """Answer a lost exchange as a failure of the verb; the engine can never be refreshed again."""
    run = RankConsensus.run

    def wrong(self: RankConsensus, *arguments: Any) -> Any:
        try:
            return run(self, *arguments)
        except RankLostError as error:
            raise PeerRankError(str(error), 500) from None

    return _replaced((RankConsensus, "run", wrong), *_survives_lost_groups())


def _survives_lost_groups() -> tuple[Replacement, Replacement]:
    lost = Communicator._lost

    def forgetting(self: Communicator, verb: str, error: str) -> RankLostError:
        raised = lost(self, verb, error)
        if self.name == "world":
            self.broken = None
        return raised

    return (Parallel, "require_whole", lambda self: None), (Communicator, "_lost", forgetting)
