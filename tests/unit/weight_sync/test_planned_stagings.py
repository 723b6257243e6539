"""Planned buckets in each staging: on the CPU, and folded by the kernel of a device, in Triton's interpreter.

What a plan leaves is what single tensors leave, bit for bit; an update that ends otherwise leaves what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import tests.interpreted  # noqa: F401  # isort: skip  # before any module with kernels

from tests.device_queue_stand_in import LateDevice
from tests.logical_weights_fake import EMBED, LM_HEAD, NORM, FakeWeights, bits, expert_name, fused, version
from tests.loopback_updater import layout_of, packed
from tests.tiers import examples
from tests.unit.weight_sync.test_device_queue import LONG, UPDATES, FoldsEarly, folded, journal, played, shadow
from tests.unit.weight_sync.test_plans import MovableWeights
from weight_sync import in_model, spans_gpu, take_spans
from weight_sync.content import TensorTable
from weight_sync.errors import CommitError, ContentError, StagingError
from weight_sync.held_memory import Areas
from weight_sync.in_model import InPlaceStaging, JournalStaging
from weight_sync.plan import Planner
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import Accept, Staging
from weight_sync.take_spans import SpanTables
from weight_sync.tensor_meta import BucketLayout, TensorMeta
from weight_sync.transaction import WeightTransaction

Tensors = dict[str, torch.Tensor]
Make = Callable[[FakeWeights], Staging]


def folds_by_kernel(weights: FakeWeights) -> FoldsEarly:
    return FoldsEarly(weights, "host", Areas(keep=True))


MAKES: dict[str, Make] = {
    "shadow": ShadowStaging,
    "folded": folds_by_kernel,
    "journal": JournalStaging,
    "in_place": InPlaceStaging,
}
HOLDS_OLD = [name for name in MAKES if name != "in_place"]


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    if request.param == "folded":
        monkeypatch.setattr(take_spans, "kernels_of", lambda device: spans_gpu)
    return MAKES[request.param]


class Sender:
    """A sender of one model's updates, whose layouts and plans are kept."""

    def __init__(self, weights: FakeWeights, make: Make) -> None:
        self.weights, self._make = weights, make
        self._planner = Planner(TensorTable(weights.metas()), {})
        self._layouts: dict[tuple[TensorMeta, ...], BucketLayout] = {}

    def sent(self, tensors: Tensors, *, coverage: Any = "full", manifest: Any = None) -> WeightTransaction:
        """Send all tensors in one bucket."""
        staging = self._make(self.weights)
        transaction = WeightTransaction(self.weights, "v", coverage, manifest, staging, planner=self._planner)
        metas = tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        layout = self._layouts.setdefault(metas, layout_of(metas))
        transaction.announce(metas, layouts=[layout])
        self.last = transaction
        transaction.receive(packed(layout, list(tensors.items())))
        return transaction

    def refresh(self, tensors: Tensors, vote: bool = True, **how: Any) -> None:
        transaction = self.sent(tensors, **how)
        transaction.verify()
        transaction.commit(lambda mine: mine and vote)
        transaction.close()


def assert_holds(weights: FakeWeights, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        assert {bits(place.read()) for place in weights.places(name)} == {bits(tensor)}, name


@pytest.mark.parametrize("form", [dict, fused])
def test_a_replay_writes_no_single_tensor(make: Make, form: Callable[[Tensors], Tensors]) -> None:
    sender = Sender(MovableWeights(), make)
    with (
        mock.patch.multiple(ShadowStaging, write=mock.Mock(side_effect=AssertionError("a tensor came by itself"))),
        mock.patch.object(in_model._InModelStaging, "write", side_effect=AssertionError("a tensor came by itself")),
    ):
        for seed in (1, 2, 3):
            sender.refresh(form(version(seed)))
            assert_holds(sender.weights, version(seed))


@pytest.mark.parametrize("names", [[NORM], [expert_name(1, "up_proj"), EMBED]])
def test_tensors_that_were_not_sent_stay(make: Make, names: list[str]) -> None:
    sender = Sender(MovableWeights(), make)
    sender.refresh({name: version(1)[name] for name in names}, coverage="partial")
    assert_holds(sender.weights, version(0) | {name: version(1)[name] for name in names})


@pytest.mark.parametrize("make", HOLDS_OLD, indirect=True)
@pytest.mark.parametrize("end", ["vote", "abort", "missing"])
def test_the_old_content_comes_back(make: Make, end: str) -> None:
    weights = MovableWeights()
    weights.embed[0, 0] = float("nan")  # whatever was there comes back, not only decent values
    before, sender = weights.snapshot(), Sender(weights, make)
    for _ in range(2):
        if end == "vote":
            with pytest.raises(CommitError) as caught:
                sender.refresh(version(1), vote=False)
            assert caught.value.restored
        else:
            tensors = version(1)
            if end == "missing":
                del tensors[NORM]
            transaction = sender.sent(tensors)
            if end == "missing":
                with pytest.raises(Exception, match="missing"):
                    transaction.verify()
            else:
                transaction.abort()
        assert weights.snapshot() == before and sender.last.torn is None
    sender.refresh(version(2))
    assert_holds(weights, version(2))


def spoiled(kind: str) -> tuple[Tensors, Any]:
    """Return tensors of which one is wrong, and a manifest."""
    tensors = version(1)
    if kind == "tied":  # the head is not planned, as the embedding comes in the same bucket
        return tensors | {LM_HEAD: torch.full_like(tensors[EMBED], float("nan"))}, None
    name = expert_name(2, "down_proj")
    stated = [(TensorMeta(name, t.dtype, tuple(t.shape)), 1) for name, t in tensors.items()]
    tensors[name] = tensors[name].clone()
    tensors[name][1, 1] = float("inf")
    return tensors, stated if kind == "bit" else None


@pytest.mark.parametrize("kind", ["value", "bit", "tied"])
def test_a_wrong_tensor_is_found_before_any_byte_of_the_model_changes(make: Make, kind: str) -> None:
    sender = Sender(MovableWeights(), make)
    before = sender.weights.snapshot()
    tensors, stated = spoiled(kind)
    with pytest.raises(ContentError):
        sender.sent(tensors, manifest=stated)
    assert sender.weights.snapshot() == before and sender.last.torn is None


@pytest.mark.parametrize("make", HOLDS_OLD, indirect=True)
def test_a_launch_that_fails_half_way_leaves_the_old_weights(make: Make) -> None:
    sender, original = Sender(MovableWeights(), make), SpanTables.take
    before = sender.weights.snapshot()

    def take(tables: SpanTables, source: Any, storages: Any, *args: Any, **named: Any) -> Any:
        found = original(tables, source, storages, *args, **named)
        if named.get("writes", True):
            raise RuntimeError("the launch failed")
        return found

    with mock.patch.object(SpanTables, "take", take), pytest.raises(RuntimeError, match="launch failed"):
        sender.sent(version(1))
    assert sender.weights.snapshot() == before and sender.last.torn is None
    sender.refresh(version(2))
    assert_holds(sender.weights, version(2))


def test_in_place_knows_that_a_plan_overwrote_tensors() -> None:
    sender = Sender(MovableWeights(), InPlaceStaging)
    sender.sent(version(1)).abort()
    assert "tensors were overwritten in place" in str(sender.last.torn)


def test_a_full_disk_changes_nothing() -> None:
    sender = Sender(MovableWeights(), JournalStaging)
    before = sender.weights.snapshot()
    full = OSError(28, "No space left on device")
    with (
        mock.patch.object(in_model.UnnamedFile, "append", side_effect=full),
        pytest.raises(StagingError, match=r"the storage of .* cannot be written to the journal.*No space left"),
    ):
        sender.sent(version(1))
    assert sender.weights.snapshot() == before and sender.last.torn is None


def test_each_storage_is_journaled_once_and_whole() -> None:
    weights = MovableWeights()
    staging = JournalStaging(weights)
    for name, tensor in version(1).items():
        staging.write(name, tensor)
    stores = (weights.embed, weights.norm, weights.w13, weights.w2)
    assert staging.num_bytes == sum(store.untyped_storage().nbytes() for store in stores)
    staging.undo()
    assert_holds(weights, version(0))


def test_a_plan_on_the_device_ends_when_experts_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take_spans, "kernels_of", lambda device: spans_gpu)
    weights = MovableWeights()
    sender = Sender(weights, folds_by_kernel)
    sender.refresh(version(1))
    weights.slots = (2, 0, 1, 0)
    sender.refresh(version(2))
    assert_holds(weights, version(2))
    with mock.patch.object(MovableWeights, "places_key", lambda self: None):  # wrong: the table stays
        sender.refresh(version(3))
        weights.slots = (0, 1, 2, 1)
        sender.refresh(version(4))
    with pytest.raises(AssertionError, match="experts"):
        assert_holds(weights, version(4))


def test_a_bucket_in_host_memory_goes_to_the_device_once() -> None:
    weights, memory = MovableWeights(), Areas()
    staging = ShadowStaging(weights, "device", memory)
    staging._homes.device = torch.device("meta")
    content = torch.zeros(100, dtype=torch.uint8)
    for size in (100, 60):
        found = staging._spans.bring(content[:size])
        assert found.device.type == "meta" and found.numel() == size
    assert [area.numel() for area in memory._areas.values()] == [100]
    there = torch.zeros(5, device="meta")
    assert staging._spans.bring(there) is there


class _OnStorages(TorchDispatchMode):
    """Notes the operators that read or write these storages, which on a device would be calls of it."""

    def __init__(self, weights: MovableWeights) -> None:
        super().__init__()
        stores = (weights.embed, weights.norm, weights.w13, weights.w2)
        self._addresses = {store.untyped_storage().data_ptr() for store in stores}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor) and not one.is_meta]
        if not func.is_view and any(one.untyped_storage().data_ptr() in self._addresses for one in tensors):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plan_is_made_without_a_call_of_the_device() -> None:
    weights = MovableWeights()
    planner = Planner(TensorTable(weights.metas()), {})
    layouts = [layout_of([TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in fused(version(1)).items()])]
    with _OnStorages(weights) as seen:
        planner.plans(weights, layouts, cast=False)
    assert seen.found == []
    with _OnStorages(weights) as seen:
        weights.norm.add_(1)
    assert seen.found, "what is looked for is seen"


# --- a device that does everything as late as it may -----------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    with mock.patch.object(take_spans, "kernels_of", lambda device: spans_gpu):
        yield


@pytest.mark.parametrize(
    ("staging", "holds_steps"), [(shadow, False), (folded, False), (journal, True)], ids=["shadow", "folded", "journal"]
)
@given(updates=UPDATES)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_step_sees_one_version_and_votes_are_on_what_is_there(
    staging: Any, holds_steps: bool, updates: list[tuple[int, int, str, bool, bool]], kernels: None
) -> None:
    assert played(staging, updates, holds_steps=holds_steps, planned=True) == []


class _ReadsTooLate(ShadowStaging):
    """Wrong: nothing waits until a bucket was read."""

    def write_spans(self, plan: Any, content: torch.Tensor, accept: Accept) -> None:
        areas = [self._shadow_of(storage).staged for storage in plan.storages]
        self._plans.append(plan)
        self._queue.put(lambda: plan.tables.take(content, areas))

    def settle(self) -> None:
        pass


class _BesideTheLastStep(JournalStaging):
    """Wrong: the first write does not wait for the step that was launched before it."""

    def _begin(self) -> None:
        pass


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("wrong", "holds_steps", "seen_by"),
    [
        (lambda w, d, m: _ReadsTooLate(w, "device", m, d), False, "the vote"),
        (lambda w, d, m: _BesideTheLastStep(w, None, d), True, "a step"),
    ],
    ids=["bucket_memory_reused", "beside_a_step"],
)
def test_a_missing_fence_is_noticed(wrong: Any, holds_steps: bool, seen_by: str) -> None:
    found = played(wrong, LONG, holds_steps=holds_steps, planned=True)
    assert any(line.startswith(seen_by) for line in found), found


class _CountsFences(LateDevice):
    """Counts what the host waits for."""

    num_fences = 0

    def fence(self) -> None:
        self.num_fences += 1
        super().fence()


def test_a_bucket_is_waited_for_as_often_whatever_it_holds(kernels: None) -> None:
    """The host waits for the result of the checks, and until the bucket's memory may be filled anew."""
    counts = set()
    for tensors in (version(1), {NORM: version(1)[NORM]}):
        device = _CountsFences()
        sender = Sender(MovableWeights(), lambda weights, device=device: FoldsEarly(weights, "host", Areas(), device))
        sender.sent(tensors, coverage="partial")
        counts.add(device.num_fences)
    assert counts == {2}


# --- wrong variants ---------------------------------------------------------------------------------------------------


class _WritesUnchecked(InPlaceStaging):
    """Wrong: a bucket is written before it is accepted."""

    def write_spans(self, plan: Any, content: torch.Tensor, accept: Accept) -> None:
        super().write_spans(plan, content, lambda *found: None)
        super().write_spans(plan, content, accept)


class _KeepsTheFirstAlone(JournalStaging):
    """Wrong: of the storages of a plan the first is journaled."""

    def _before(self, storages: Any, names: Any) -> None:
        super()._before(storages[:1], names)


class _KeepsAgain(JournalStaging):
    """Wrong: a storage that was written to is journaled again."""

    def _before(self, storages: Any, names: Any) -> None:
        self._kept.clear()
        super()._before(storages, names)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [_WritesUnchecked, _KeepsTheFirstAlone, _KeepsAgain])
def test_a_wrong_staging_is_noticed(wrong: Any) -> None:
    sender = Sender(MovableWeights(), wrong)
    before = sender.weights.snapshot()
    if wrong is _WritesUnchecked:
        tensors, _ = spoiled("value")
        with pytest.raises(ContentError):
            sender.sent(tensors)
    else:
        transaction = sender.sent(fused(version(1)))
        with suppress(StagingError):
            transaction._staging.write(EMBED, version(2)[EMBED])
        transaction.abort()
    assert sender.weights.snapshot() != before or sender.last.torn is not None
