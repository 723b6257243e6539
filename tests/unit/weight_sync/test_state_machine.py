"""Random histories of refreshes with faults, in every staging mode: whenever a step may run, the weights are exactly
one committed version, or the updater reports that they are torn.

The machine drives a real `WeightUpdater` over a small model; buckets are handed in where a process group would deliver
them.  The same machine must catch updaters that are wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.logical_weights_fake import DOWN, EMBED, GATE_UP, LM_HEAD, FakeWeights, bits, fused, version
from tests.loopback_updater import LoopbackSource, LoopbackUpdater, Named
from tests.tiers import examples
from weight_sync import shadow
from weight_sync.errors import CommitError, ContentError, TransactionStateError, TransportError, WeightSyncError
from weight_sync.fingerprint import fingerprint
from weight_sync.intake import load_weights
from weight_sync.receivers.base import BucketSource
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.take_spans import SpanTables
from weight_sync.tensor_meta import PackedBucket, TensorMeta
from weight_sync.update import CommitResult

LEASE_S = 600


class Vote:
    """Two ranks: this one, and another whose answer is `other`."""

    def __init__(self) -> None:
        self.other = True

    def __call__(self, mine: bool) -> bool:
        return mine and self.other


class Refreshes(RuleBasedStateMachine):
    """A model of the updater, which runs next to the real one.

    `live`: every byte that must be serving.  `unsent`: tensors of the open refresh still to send, None when none is
    open.  `refused`: a bucket was refused.  `written`: something of the open refresh was taken.  `torn`: tensors were
    overwritten in place and the refresh did not come into force; only a complete one ends that.
    """

    updater_class: ClassVar[type[LoopbackUpdater]] = LoopbackUpdater

    @initialize(as_fused=st.booleans(), mode=st.sampled_from(("host", "device", "journal", "in_place")))
    def start(self, as_fused: bool, mode: StagingMode) -> None:
        torch.set_num_threads(1)
        self.weights = FakeWeights(seed=0)
        self.vote = Vote()
        self.now = 0.0
        self.mode = mode
        self.updater = self.updater_class(
            self.weights, device="cpu", timeout_s=1.0, vote=self.vote, staging=mode, clock=lambda: self.now
        )
        self.live = self.weights.snapshot()
        self.as_fused = as_fused
        self.seed = 0
        self.own: str | None = None  # what the sender's calls carry
        self.torn = False
        self.close()

    def close(self) -> None:
        """End the refresh in the model; `live` is what serves."""
        self.unsent: dict[str, torch.Tensor] | None = None
        self.refused = self.verified = self.has_manifest = self.written = False
        self.tied_bits: list[bytes] = []

    def fail(self) -> None:
        """Fail the update: tensors written so far, if any, have to go."""
        self.torn = self.torn or (self.mode == "in_place" and self.written)
        self.written = False

    def refuse(self) -> None:
        self.refused = True
        self.fail()

    @precondition(lambda self: self.unsent is None)
    @rule(with_manifest=st.booleans(), tied=st.booleans(), bound=st.booleans())
    def begin(self, with_manifest: bool, tied: bool, bound: bool) -> None:
        self.seed += 1
        self.own = f"u{self.seed}" if bound else None
        tensors = fused(version(self.seed)) if self.as_fused else version(self.seed)
        if tied:
            tensors[LM_HEAD] = tensors[EMBED].clone()
        manifest = [(TensorMeta(name, t.dtype, tuple(t.shape)), stated(name, t)) for name, t in tensors.items()]
        named = {"update_id": f"u{self.seed}", "bound": bound}
        self.updater.begin(f"v{self.seed}", "full", manifest if with_manifest else None, LEASE_S, **named)
        self.renewed = self.now
        self.all, self.unsent, self.has_manifest = tensors, dict(tensors), with_manifest

    @precondition(lambda self: self.unsent)
    @rule(count=st.integers(1, 8))
    def send(self, count: int) -> None:
        assert self.unsent
        names = list(self.unsent)[:count]
        named = [(name, self.all[name]) for name in names]
        if self.refused or self.verified:
            with pytest.raises(TransactionStateError):
                self.updater.send(named, None, self.own)
            self.renewed = self.now
            return
        self.send_and_note(named)

    @precondition(lambda self: self.unsent and not self.refused and not self.verified)
    @rule(pick=st.integers(0, 20), ends_between=st.booleans())
    def send_in_boxes(self, pick: int, ends_between: bool) -> None:
        """Send a tensor in two calls, a half of its rows by each; the update may be aborted between them."""
        assert self.unsent
        tensors = {name: self.all[name] for name in self.unsent if name not in (EMBED, LM_HEAD, GATE_UP, DOWN)}
        names = [name for name, tensor in tensors.items() if tensor.shape[0] > 1]
        if not names:
            return
        name = names[pick % len(names)]
        middle, tensor = tensors[name].shape[0] // 2, tensors[name]
        for first, last in ((0, middle), (middle, tensor.shape[0])):
            box = ((first, last), *((0, size) for size in tensor.shape[1:]))
            meta = TensorMeta(name, tensor.dtype, tuple(tensor.shape), box)
            self.updater.receive(LoopbackSource([(name, tensor[first:last])], metas=[meta]), None, self.own)
            self.updater.renew_lease()
            self.renewed, self.written = self.now, True
            if first == 0:
                self.one_committed_version_serves()
            if first == 0 and ends_between:
                self.updater.abort(self.own)
                self.fail()
                self.close()
                return
        del self.unsent[name]

    @precondition(lambda self: self.unsent is not None and not self.refused and not self.verified)
    @rule(
        fault=st.sampled_from(("unknown", "shape", "dtype", "again", "version", "transport", "write")),
        pick=st.integers(0, 20),
    )
    def send_what_is_refused(self, fault: str, pick: int) -> None:
        assert self.unsent is not None
        names = [name for name in self.all if (name not in self.unsent) == (fault == "again")]
        if not names:
            return
        name = names[pick % len(names)]
        tensor = self.all[name]
        if fault == "unknown":
            name = "ghost"
        elif fault == "shape":
            tensor = tensor[..., :-1]
        elif fault == "dtype":
            tensor = tensor.double()
        elif fault == "transport":
            self.updater.failure = TransportError("peer is gone")
        elif fault == "write":
            if self.mode in ("host", "device") or self.would_conflict([(name, tensor)]) or name in (EMBED, LM_HEAD):
                return  # nothing is written by name
            self.weights.fault = fault_at(0)
            self.written = True
        expected = WeightSyncError if fault != "write" else RuntimeError
        with pytest.raises(expected), failing_planned_writes() if fault == "write" else nullcontext():
            self.updater.send([(name, tensor)], "other" if fault == "version" else None, self.own)
        self.updater.failure = None
        if fault != "version" or self.own is not None:  # without an id it is another sender's, and changes nothing
            self.renewed = self.now
            self.refuse()

    @precondition(lambda self: self.unsent and not self.refused and not self.verified)
    @rule(fault=st.sampled_from(("nan", "infinite", "flipped bit")), pick=st.integers(0, 20))
    def send_wrong_content(self, fault: str, pick: int) -> None:
        assert self.unsent
        name = list(self.unsent)[pick % len(self.unsent)]
        tensor = self.all[name].clone()
        if fault == "flipped bit":
            if not self.has_manifest or stated(name, tensor) is None:
                return  # nothing could tell
            tensor.view(-1).view(torch.uint8)[pick % tensor.numel()] ^= 1
        else:
            tensor.view(-1)[pick % tensor.numel()] = float("nan" if fault == "nan" else "inf")
        with pytest.raises(ContentError):
            self.updater.send([(name, tensor)], None, self.own)
        self.renewed = self.now
        self.refuse()

    def send_and_note(self, named: Named) -> None:
        """Send what must be taken, unless it brings one of two tied tensors with other content than its twin."""
        assert self.unsent is not None
        self.renewed = self.now
        if self.would_conflict(named):
            with pytest.raises(ContentError, match="other content"):
                self.updater.send(named, None, self.own)
            self.written = True  # the first of the two, at least
            self.refuse()
            return
        self.updater.send(named, None, self.own)
        self.written = True
        self.tied_bits += tied_bits(named)
        for name, _ in named:
            del self.unsent[name]

    def would_conflict(self, named: Named) -> bool:
        return len({*self.tied_bits, *tied_bits(named)}) > 1

    def is_complete(self) -> bool:
        """Return whether every tensor has come; of two tied tensors one is enough."""
        assert self.unsent is not None
        return not self.unsent or (self.unsent.keys() <= {EMBED, LM_HEAD} and bool(self.tied_bits))

    @precondition(lambda self: self.unsent is not None and not self.verified)
    @rule(other_rank=st.sampled_from((True, True, False)), send_rest=st.sampled_from((True, True, False)))
    def verify(self, other_rank: bool, send_rest: bool) -> None:
        if self.unsent and send_rest:
            self.send(len(self.unsent))
        self.vote.other = other_rank
        if self.is_complete() and not self.refused and other_rank:
            self.updater.verify(self.own)
            self.verified = True
            return
        with pytest.raises(WeightSyncError):
            self.updater.verify(self.own)
        self.fail()
        self.close()

    @rule(
        call=st.sampled_from(("send", "verify", "abort")),
        stranger=st.sampled_from((None, "u1", "u2", "nobody's")),
    )
    def call_of_a_stranger(self, call: str, stranger: str | None) -> None:
        """Check that a call of another sender is refused and changes nothing."""
        if self.unsent is None and stranger is None:
            return  # see `calls_out_of_turn_are_refused`
        if self.unsent is not None and stranger in (self.own, f"u{self.seed}"):
            return  # it would not be a stranger's
        before = self.updater.status()
        calls: dict[str, Callable[[], object]] = {
            "send": lambda: self.updater.send([(EMBED, version(0)[EMBED])], None, stranger),
            "verify": lambda: self.updater.verify(stranger),
            "abort": lambda: self.updater.abort(stranger),
        }
        with pytest.raises(TransactionStateError):
            calls[call]()
        assert self.updater.status() == before

    @precondition(lambda self: self.verified)
    @rule(other_rank=st.sampled_from((True, True, False)), failing_write=st.one_of(st.none(), st.integers(0, 4)))
    def commit(self, other_rank: bool, failing_write: int | None) -> None:
        """Commit, perhaps with a lost vote or a failing write.

        It writes four storages, or none in the modes that have written already, and one derived tensor.
        """
        self.vote.other = other_rank
        fault = fault_at(failing_write if self.mode in ("host", "device") or failing_write is None else 0)
        self.weights.derived_fault = fault
        fail_exchanges(self.updater, fault)
        if failing_write is None and other_rank:
            result = self.updater.commit()
            assert result.weight_version == f"v{self.seed}"
            assert sorted(result.names) == sorted(self.weights.metas())
            self.live = FakeWeights(self.seed).snapshot()
            self.torn = False
        else:
            with pytest.raises(CommitError) as caught:
                self.updater.commit()
            assert caught.value.restored == (self.mode != "in_place")
            self.fail()
        self.close()

    @precondition(lambda self: self.unsent is not None)
    @rule(really=st.sampled_from((False, False, False, True)))
    def abort(self, really: bool) -> None:
        if really:
            self.updater.abort(self.own)
            self.fail()
            self.close()

    @rule(seconds=st.sampled_from((1, 300, 599, 600)))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        over = self.unsent is not None and self.now >= self.renewed + LEASE_S
        assert self.updater.expire() == over
        if over:
            assert "lease" in self.updater.status()["last_failure"]["reason"]
            self.fail()
            self.close()

    @invariant()
    def calls_out_of_turn_are_refused(self) -> None:
        if not hasattr(self, "live"):
            return
        calls: list[Callable[[], object]] = []
        if self.unsent is None:
            calls = [self.updater.verify, self.updater.abort, self.updater.commit, lambda: self.updater.send([])]
        else:
            calls = [self.updater.begin, self.updater.open_implicit]
            own = self.own
            late = [lambda: self.updater.verify(own), lambda: self.updater.send([], None, own)]
            calls += late if self.verified else [self.updater.commit]
        for call in calls:
            with pytest.raises(TransactionStateError):
                call()
        if self.verified:
            self.renewed = self.now

    @invariant()
    def one_committed_version_serves(self) -> None:
        if not hasattr(self, "live"):
            return
        assert (self.updater.torn is not None) == self.torn
        may_step = not self.updater.is_dirty and not self.torn
        assert may_step or self.mode in ("journal", "in_place")
        if may_step:
            assert self.weights.snapshot() == self.live

    @invariant()
    def status_tells_the_state(self) -> None:
        if hasattr(self, "live"):
            status = self.updater.status()
            assert status["open"] == self.updater.is_open == (self.unsent is not None)
            assert (status["failed"] is not None) == self.refused


def tied_bits(named: Named) -> list[bytes]:
    return [bits(tensor) for name, tensor in named if name in (EMBED, LM_HEAD)]


@pytest.fixture(autouse=True, scope="module")
def apart() -> Iterator[None]:
    """Let each storage be exchanged by a call of its own, so that any of them may be the one that fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "_TOGETHER_BYTES", 0)
        yield


def stated(name: str, tensor: torch.Tensor) -> int | None:
    """Return the fingerprint that a manifest states for a tensor, None for fused ones."""
    return None if name in (GATE_UP, DOWN) else fingerprint(tensor)


def fault_at(failing_write: int | None) -> Callable[..., None]:
    """Return a function that raises once, at the given write.

    Writes are counted in logical space, so that a fused history has as many as any other.
    """
    countdown = [-1 if failing_write is None else failing_write]

    def fault(name: str = "") -> None:
        countdown[0] -= 1
        if countdown[0] == -1:
            raise RuntimeError("device lost")

    return fault


@contextmanager
def failing_planned_writes() -> Iterator[None]:
    """Let the operator that writes a bucket into the model raise once it has written."""
    take = SpanTables.take

    def fails(self: SpanTables, *arguments: Any, **options: Any) -> Any:
        found = take(self, *arguments, **options)
        if not options.get("checks", True):
            raise RuntimeError("device lost")
        return found

    with mock.patch.object(SpanTables, "take", fails):
        yield


def fail_exchanges(updater: LoopbackUpdater, fault: Callable[[], None]) -> None:
    """Call `fault`, which may raise, before each storage that the open transaction's commit writes."""
    staging = None if updater.update is None else updater.update.transaction._staging
    if not isinstance(staging, ShadowStaging):
        return

    def exchange(live: Sequence[torch.Tensor], aside: Sequence[torch.Tensor]) -> None:
        fault()
        ShadowStaging.exchange(live, aside)

    staging.exchange = exchange  # type: ignore[method-assign]


class ForgetsToRestore(LoopbackUpdater):
    """Wrong: a failed commit leaves what it wrote."""

    def commit(self) -> CommitResult:
        if self.update is not None:
            self.update.transaction._roll_back = lambda reason: None  # type: ignore[method-assign]
        return super().commit()


class ForgetsToTell(LoopbackUpdater):
    """Wrong: weights that could not be restored are served."""

    torn = property(lambda self: None, lambda self, reason: None)  # type: ignore[assignment]


class LetsStepsRun(LoopbackUpdater):
    """Wrong: while tensors are written in place, steps go on."""

    is_dirty = False  # type: ignore[assignment]


class GoesByWholeTensors(LoopbackUpdater):
    """Wrong: steps are held once a tensor is whole."""

    @property
    def is_dirty(self) -> bool:
        return self.holds_steps and self.update is not None and self.update.num_received > 0


class NeverExpires(LoopbackUpdater):
    """Wrong: a trainer that died blocks the next one."""

    def expire(self) -> bool:
        return False


class NeverRenews(LoopbackUpdater):
    """Wrong: the lease counts from begin."""

    def renew_lease(self) -> None:
        pass


class WritesOnReceive(LoopbackUpdater):
    """Wrong: a bucket is loaded straight into the model."""

    def receive(self, source: BucketSource, weight_version: str | None = None, update_id: str | None = None) -> None:
        assert isinstance(source, LoopbackSource)
        for name, tensor in source.named if source.failure is None else []:
            if name in self.weights.metas() and tensor.dtype == self.weights.metas()[name].dtype:
                self.weights.write(name, tensor)
        super().receive(source, weight_version, update_id)


class ForgivesBuckets(LoopbackUpdater):
    """Wrong: after a refused bucket the transaction goes on as if it had not been sent."""

    def begin(self, *args: Any, **kwargs: Any) -> None:
        super().begin(*args, **kwargs)
        assert self.update is not None
        self.update.transaction.fail = lambda reason: None  # type: ignore[method-assign]


class TakesEveryCall(LoopbackUpdater):
    """Wrong: a bucket, an end or an abort from any sender counts for the open update."""

    def foreign(self, update_id: str | None, weight_version: str | None = None) -> None:  # type: ignore[override]
        return None


class SkipsContentCheck(LoopbackUpdater):
    """Wrong: neither finite values nor fingerprints are looked at."""

    def begin(self, *args: Any, **kwargs: Any) -> None:
        super().begin(*args, **kwargs)
        assert self.update is not None
        opened = self.update.transaction
        usual = opened.receive

        def unchecked(bucket: Named | PackedBucket, cast: bool) -> None:
            if isinstance(bucket, PackedBucket) and any(meta.box is not None for meta in bucket.layout.metas):
                usual(bucket, cast)  # `load_weights` takes whole tensors
                return
            named = bucket.named() if isinstance(bucket, PackedBucket) else bucket
            load_weights(opened.weights, named, opened._staging, opened._ledger, cast)

        opened.receive = unchecked  # type: ignore[method-assign, assignment]


class SkipsCoverage(LoopbackUpdater):
    """Wrong: takes any non-empty set of tensors for a full refresh."""

    def verify(self, update_id: str | None = None) -> None:
        if self.update is not None:
            self.update.transaction._ledger.coverage = "partial"
        super().verify(update_id)


WRONG = (
    *(ForgetsToRestore, ForgetsToTell, LetsStepsRun, GoesByWholeTensors, NeverExpires, NeverRenews),
    *(WritesOnReceive, ForgivesBuckets, TakesEveryCall, SkipsContentCheck, SkipsCoverage),
)
QUICK = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
TestRefreshes = Refreshes.TestCase
TestRefreshes.settings = QUICK


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", WRONG)
def test_the_machine_catches_wrong_updaters(wrong: type[LoopbackUpdater]) -> None:
    machine = type("Wrong", (Refreshes,), {"updater_class": wrong})
    search = settings(
        QUICK, max_examples=3000, phases=(Phase.generate,), derandomize=True, database=None, report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=search)
