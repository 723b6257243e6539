"""Random histories of refreshes with faults: the serving weights are always exactly one committed version.

The machine drives a real `WeightUpdater` over a small model; buckets are handed in where a process group would deliver
them.  The same machine must catch updaters that are wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

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
from weight_sync.errors import CommitError, ContentError, TransactionStateError, TransportError, WeightSyncError
from weight_sync.fingerprint import fingerprint
from weight_sync.receivers.base import BucketSource
from weight_sync.tensor_meta import TensorMeta
from weight_sync.updater import CommitResult


class Vote:
    """Two ranks: this one, and another whose answer is `other`."""

    def __init__(self) -> None:
        self.other = True

    def __call__(self, mine: bool) -> bool:
        return mine and self.other


class Refreshes(RuleBasedStateMachine):
    """The model beside the real thing:

    `live`: every byte that must be serving.  `unsent`: tensors of the open refresh still to send, None when none is
    open.  `refused`: a bucket was refused.  `tainted`: wrong content was taken, which only verifying can see.
    """

    updater_class: ClassVar[type[LoopbackUpdater]] = LoopbackUpdater

    @initialize(as_fused=st.booleans())
    def start(self, as_fused: bool) -> None:
        torch.set_num_threads(1)
        self.weights = FakeWeights(seed=0)
        self.vote = Vote()
        self.updater = self.updater_class(self.weights, device="cpu", timeout_s=1.0, vote=self.vote)
        self.live = self.weights.snapshot()
        self.as_fused = as_fused
        self.seed = 0
        self.close()

    def close(self) -> None:
        self.unsent: dict[str, torch.Tensor] | None = None
        self.refused = self.tainted = self.verified = self.has_manifest = False
        self.tied_bits: list[bytes] = []

    @precondition(lambda self: self.unsent is None)
    @rule(with_manifest=st.booleans(), tied=st.booleans())
    def begin(self, with_manifest: bool, tied: bool) -> None:
        self.seed += 1
        tensors = fused(version(self.seed)) if self.as_fused else version(self.seed)
        if tied:
            tensors[LM_HEAD] = tensors[EMBED].clone()
        manifest = [(TensorMeta(name, t.dtype, tuple(t.shape)), stated(name, t)) for name, t in tensors.items()]
        self.updater.begin(f"v{self.seed}", "full", manifest if with_manifest else None)
        self.all, self.unsent, self.has_manifest = tensors, dict(tensors), with_manifest

    @precondition(lambda self: self.unsent)
    @rule(count=st.integers(1, 8))
    def send(self, count: int) -> None:
        assert self.unsent
        names = list(self.unsent)[:count]
        named = [(name, self.all[name]) for name in names]
        if self.refused or self.verified:
            with pytest.raises(TransactionStateError):
                self.updater.send(named)
            return
        self.send_and_note(named)

    @precondition(lambda self: self.unsent is not None and not self.refused and not self.verified)
    @rule(
        fault=st.sampled_from(("unknown", "shape", "dtype", "again", "version", "transport")), pick=st.integers(0, 20)
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
        with pytest.raises(WeightSyncError):
            self.updater.send([(name, tensor)], weight_version="other" if fault == "version" else None)
        self.updater.failure = None
        self.refused = True

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
        self.tainted = True
        self.send_and_note([(name, tensor)])

    def send_and_note(self, named: Named) -> None:
        """Send what must be taken, unless it brings one of two tied tensors with other content than its twin."""
        assert self.unsent is not None
        tied = [bits(tensor) for name, tensor in named if name in (EMBED, LM_HEAD)]
        if len({*self.tied_bits, *tied}) > 1:
            with pytest.raises(ContentError, match="other content"):
                self.updater.send(named)
            self.refused = True
            return
        self.updater.send(named)
        self.tied_bits += tied
        for name, _ in named:
            del self.unsent[name]

    def is_complete(self) -> bool:
        """Of two tied tensors one is enough."""
        assert self.unsent is not None
        return not self.unsent or (self.unsent.keys() <= {EMBED, LM_HEAD} and bool(self.tied_bits))

    @precondition(lambda self: self.unsent is not None and not self.verified)
    @rule(other_rank=st.sampled_from((True, True, False)), send_rest=st.sampled_from((True, True, False)))
    def verify(self, other_rank: bool, send_rest: bool) -> None:
        if self.unsent and send_rest:
            self.send(len(self.unsent))
        self.vote.other = other_rank
        if self.is_complete() and not self.refused and not self.tainted and other_rank:
            self.updater.verify()
            self.verified = True
            return
        with pytest.raises(WeightSyncError):
            self.updater.verify()
        self.close()

    @precondition(lambda self: self.verified)
    @rule(other_rank=st.sampled_from((True, True, False)), failing_write=st.one_of(st.none(), st.integers(0, 14)))
    def commit(self, other_rank: bool, failing_write: int | None) -> None:
        self.vote.other = other_rank
        self.weights.fault = self.weights.derived_fault = fault_at(failing_write)
        if failing_write is None and other_rank:
            result = self.updater.commit()
            assert result.weight_version == f"v{self.seed}"
            assert sorted(result.names) == sorted(self.weights.metas())
            self.live = FakeWeights(self.seed).snapshot()
        else:
            with pytest.raises(CommitError) as caught:
                self.updater.commit()
            assert caught.value.restored
        self.close()

    @precondition(lambda self: self.unsent is not None)
    @rule(really=st.sampled_from((False, False, False, True)))
    def abort(self, really: bool) -> None:
        if really:
            self.updater.abort()
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
            calls += [self.updater.verify, lambda: self.updater.send([])] if self.verified else [self.updater.commit]
        for call in calls:
            with pytest.raises(TransactionStateError):
                call()

    @invariant()
    def one_committed_version_serves(self) -> None:
        if hasattr(self, "live"):
            assert self.weights.snapshot() == self.live

    @invariant()
    def status_tells_the_state(self) -> None:
        if hasattr(self, "live"):
            status = self.updater.status()
            assert status["open"] == self.updater.is_open == (self.unsent is not None)
            assert (status["failed"] is not None) == self.refused


def stated(name: str, tensor: torch.Tensor) -> int | None:
    """What a manifest says of a tensor: nothing for fused ones."""
    return None if name in (GATE_UP, DOWN) else fingerprint(tensor)


def fault_at(failing_write: int | None) -> Callable[..., None]:
    """Raises once, at the given write; a fused history has as many writes as any other, in logical space."""
    countdown = [-1 if failing_write is None else failing_write]

    def fault(name: str = "") -> None:
        countdown[0] -= 1
        if countdown[0] == -1:
            raise RuntimeError("device lost")

    return fault


class ForgetsToRestore(LoopbackUpdater):
    """Wrong: a failed commit leaves what it wrote."""

    def commit(self) -> CommitResult:
        if self._transaction is not None:
            self._transaction._restore = lambda old_content, reason: None  # type: ignore[method-assign]
        return super().commit()


class WritesOnReceive(LoopbackUpdater):
    """Wrong: a bucket is loaded straight into the model."""

    def receive(self, source: BucketSource, weight_version: str | None = None) -> None:
        assert isinstance(source, LoopbackSource)
        for name, tensor in source.named if source.failure is None else []:
            if name in self._weights.metas() and tensor.dtype == self._weights.metas()[name].dtype:
                self._weights.write(name, tensor)
        super().receive(source, weight_version)


class ForgivesBuckets(LoopbackUpdater):
    """Wrong: after a refused bucket the transaction goes on as if it had not been sent."""

    def begin(self, *args: Any, **kwargs: Any) -> None:
        super().begin(*args, **kwargs)
        assert self._transaction is not None
        self._transaction.fail = lambda reason: None  # type: ignore[method-assign]


class SkipsContentCheck(LoopbackUpdater):
    """Wrong: neither finite values nor fingerprints are looked at."""

    def verify(self) -> None:
        if self._transaction is not None:
            self._transaction._check_content = lambda: None  # type: ignore[method-assign]
        super().verify()


class SkipsCoverage(LoopbackUpdater):
    """Wrong: takes any non-empty set of tensors for a full refresh."""

    def verify(self) -> None:
        if self._transaction is not None:
            self._transaction._ledger.coverage = "partial"
            self._transaction._fingerprints = {}
        super().verify()


QUICK = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRefreshes = Refreshes.TestCase
TestRefreshes.settings = QUICK


@pytest.mark.parametrize(
    "wrong", [ForgetsToRestore, WritesOnReceive, ForgivesBuckets, SkipsContentCheck, SkipsCoverage]
)
def test_the_machine_catches_wrong_updaters(wrong: type[LoopbackUpdater]) -> None:
    machine = type("Wrong", (Refreshes,), {"updater_class": wrong})
    search = settings(
        QUICK, max_examples=400, phases=(Phase.generate,), derandomize=True, database=None, report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=search)
