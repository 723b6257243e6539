"""Refreshes on a device that does all work as late as it may: each fence is where it must be.

A play is a list of actions on one model: steps are launched, buckets come into memory that is filled anew for each,
updates are committed, lose a vote or are dropped.  A step must see one version, the one in force when it was launched;
what is voted on and published must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device_queue_stand_in import LateDevice
from tests.logical_weights_fake import FakeWeights, bits, version
from tests.loopback_updater import layout_of, packed
from tests.tiers import examples
from weight_sync.content import TensorTable
from weight_sync.errors import CommitError
from weight_sync.held_memory import Areas
from weight_sync.in_model import JournalStaging
from weight_sync.plan import Planner
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import HostQueue, Staging, queue_of, use_own_stream
from weight_sync.tensor_meta import BucketLayout, TensorMeta
from weight_sync.transaction import WeightTransaction

Make = Callable[[FakeWeights, LateDevice, Areas], Staging]
ENDS = ("commit", "lose", "abort", "drop")


def shadow(weights: FakeWeights, device: LateDevice, memory: Areas) -> Staging:
    return ShadowStaging(weights, "device", memory, device)


class FoldsEarly(ShadowStaging):
    """Folds each tensor as it is written, as for weights on a device with shadows in host memory."""

    def _folds_early(self, storage: torch.Tensor) -> bool:
        return True


def folded(weights: FakeWeights, device: LateDevice, memory: Areas) -> Staging:
    return FoldsEarly(weights, "host", memory, device)


def journal(weights: FakeWeights, device: LateDevice, memory: Areas) -> Staging:
    return JournalStaging(weights, None, device)


class Play:
    """One model and its updates; `wrong` collects the violations."""

    def __init__(self, make: Make, *, holds_steps: bool, planned: bool = False) -> None:
        self.weights, self.device = FakeWeights(seed=0), LateDevice()
        self.wrong: list[str] = []
        self._make, self._holds_steps = make, holds_steps
        self._memory = Areas(keep=True)
        self._served = 0
        self._receive_area: dict[str, torch.Tensor] = {}
        self._planner = Planner(TensorTable(self.weights.metas()), {}) if planned else None
        self._layouts: dict[tuple[str, ...], BucketLayout] = {}

    def launch(self) -> None:
        expected = self._served
        self.device.launch(lambda: self._check(expected, "a step"))

    def update(self, seed: int, num_buckets: int, end: str, *, steps_between: bool) -> None:
        """Play one update, which ends as `end` names, one of ENDS; "drop" comes before its last bucket."""
        device = self.device
        device.thread = "io"
        transaction = WeightTransaction(
            self.weights,
            "v",
            "partial",
            staging=self._make(self.weights, device, self._memory),
            planner=self._planner,
        )
        sent = list(version(seed).items())
        for number in range(num_buckets - (end == "drop")):
            if steps_between and not self._holds_steps:
                self.launch()
            self._send(transaction, sent[number::num_buckets])
        if end in ("drop", "abort"):
            if end == "abort":
                transaction.verify()
            transaction.abort()
        else:
            self._end(transaction, seed, end)
        self.device.fence_device()
        self._check(self._served, "the end")

    def _end(self, transaction: WeightTransaction, seed: int, end: str) -> None:
        transaction.verify()
        self.launch_if_free()
        self.device.thread = "commit"  # of the thread that launches steps, which may have given them another stream

        def vote(mine: bool) -> bool:
            self._check(seed, "the vote")
            return mine and end == "commit"

        with suppress(CommitError):
            transaction.commit(vote)
            self._served = seed
            self._check(seed, "the publication")
            transaction.close()
        if transaction.torn is not None:
            self.wrong.append(transaction.torn)

    def launch_if_free(self) -> None:
        if not self._holds_steps:
            self.launch()

    def _send(self, transaction: WeightTransaction, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Send a bucket through memory that the next bucket overwrites."""
        if self._planner is not None:
            names = tuple(name for name, _ in bucket)
            metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]
            layout = self._layouts.setdefault(names, layout_of(metas))
            message = packed(layout, bucket)
            transaction.announce(metas, layouts=[layout])
            transaction.receive(message)
            message.content.fill_(7)
            return
        for name, tensor in bucket:
            self._receive_area.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        transaction.receive([(name, self._receive_area[name]) for name, _ in bucket])
        for name, _ in bucket:
            self._receive_area[name].fill_(7)

    def _check(self, seed: int, who: str) -> None:
        for name, tensor in version(seed).items():
            for place in self.weights.places(name):
                if bits(place.read()) != bits(tensor):
                    self.wrong.append(f"{who} of version {seed} sees other content in {name}")
                    return


UPDATES = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 4), st.sampled_from(ENDS), st.booleans(), st.booleans()),
    min_size=1,
    max_size=4,
)
LONG = [
    (1, 3, "commit", True, True),
    (2, 2, "lose", True, True),
    (3, 1, "drop", True, True),
    (4, 2, "commit", True, True),
]


def played(
    make: Make, updates: list[tuple[int, int, str, bool, bool]], *, holds_steps: bool, planned: bool = False
) -> list[str]:
    play = Play(make, holds_steps=holds_steps, planned=planned)
    for seed, num_buckets, end, steps_between, step_before in updates:
        if step_before:
            play.launch()
        play.update(seed, num_buckets, end, steps_between=steps_between)
    assert play.device.num_pending == 0
    return play.wrong


@settings(max_examples=examples(100), deadline=None)
@given(updates=UPDATES)
@pytest.mark.parametrize(
    ("make", "holds_steps"),
    [(shadow, False), (folded, False), (journal, True)],
    ids=["shadow", "folded", "journal"],
)
def test_a_step_sees_one_version_and_votes_are_on_what_is_there(
    make: Make, holds_steps: bool, updates: list[tuple[int, int, str, bool, bool]]
) -> None:
    assert played(make, updates, holds_steps=holds_steps) == []


@pytest.mark.parametrize("make", [shadow, folded])
def test_staged_content_can_be_read_at_once(make: Make) -> None:
    weights, device = FakeWeights(seed=0), LateDevice()
    staging = make(weights, device, Areas())
    for name, tensor in version(3).items():
        staging.write(name, tensor)
        assert all(bits(part.content) == bits(tensor) for part in staging.read(name))


# --- wrong variants ---------------------------------------------------------------------------------------------------


class _BucketMemoryIsReused(ShadowStaging):
    """Wrong: nothing waits for the writes from a bucket's memory."""

    def settle(self) -> None:
        pass


class _WithoutFence(LateDevice):
    """`skips`: the fences, by name, that a wrong engine leaves out while it commits."""

    def __init__(self, inner: LateDevice, skips: str) -> None:
        super().__init__()
        self._inner, self._skips = inner, skips
        self.is_committing = False

    def put(self, work: Callable[[], object]) -> None:
        self._inner.put(work)

    def fence(self) -> None:
        if not (self.is_committing and self._skips == "fence"):
            self._inner.fence()

    def fence_device(self) -> None:
        if not (self.is_committing and self._skips == "fence_device"):
            self._inner.fence_device()


def _commits_without(skips: str) -> Make:
    class Wrong(ShadowStaging):
        def commit(self) -> None:
            assert isinstance(self._queue, _WithoutFence)
            self._queue.is_committing = True
            super().commit()

        def settle(self) -> None:
            """Skip the fence after the derived tensors, too."""
            if self._queue.is_committing and skips == "fence":  # type: ignore[attr-defined]
                return
            super().settle()

    return lambda weights, device, memory: Wrong(weights, "device", memory, _WithoutFence(device, skips))


class _JournalBesideTheLastStep(JournalStaging):
    """Wrong: the first write does not wait for the step that was launched before it."""

    def write(self, name: str, content: object) -> None:
        self._is_begun = True
        super().write(name, content)  # type: ignore[arg-type]


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("make", "seen_by", "holds_steps"),
    [
        (lambda w, d, m: _BucketMemoryIsReused(w, "device", m, d), "the vote", False),
        (_commits_without("fence"), "the vote", False),
        (_commits_without("fence"), "the publication", False),
        (_commits_without("fence_device"), "a step", False),
        (lambda w, d, m: _JournalBesideTheLastStep(w, None, d), "a step", True),
    ],
    ids=["bucket_memory_reused", "vote_before_fence", "published_before_fence", "beside_a_step", "journal_beside_step"],
)
def test_a_missing_fence_is_noticed(make: Make, seen_by: str, holds_steps: bool) -> None:
    assert any(line.startswith(seen_by) for line in played(make, LONG, holds_steps=holds_steps))


def test_a_cpu_waits_for_nothing() -> None:
    assert isinstance(queue_of("cpu"), HostQueue)
    use_own_stream("cpu")
    order: list[int] = []
    queue = queue_of("cpu")
    queue.put(lambda: order.append(1))
    order.append(2)
    queue.fence()
    assert order == [1, 2]
