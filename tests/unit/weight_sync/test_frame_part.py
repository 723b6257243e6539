"""Deltas in parts: many tensors at a time, taken by plan, and nothing of a wrong one is taken."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from tests import kernels
from tests.delta_models import Delivered, Tensors, nudged, same_bits
from tests.logical_weights_fake import EMBED, NORM, FakeWeights, version
from weight_sync import plan as plan_module
from weight_sync.delta import delta_plan, frame_part
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.frame_part import FramePart, cut_parts
from weight_sync.errors import BaseMismatchError, ContentError, WeightSyncError
from weight_sync.fingerprint import fingerprint
from weight_sync.receivers.delta import DeltaSource
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import TensorMeta
from weight_sync.updater import WeightUpdater

PART_BYTES = 50


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut frames into several parts."""
    monkeypatch.setattr(frame_part, "PART_BYTES", PART_BYTES)


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        kernels.native_ops()
    monkeypatch.setattr(delta_plan, "is_compiled", lambda: request.param)


@pytest.fixture
def weights() -> FakeWeights:
    return FakeWeights(seed=1)


def updater_of(weights: FakeWeights, staging: StagingMode = "host") -> WeightUpdater:
    return WeightUpdater(weights, device="cpu", timeout_s=5.0, vote=lambda mine: mine, staging=staging)


@pytest.fixture
def updater(weights: FakeWeights) -> WeightUpdater:
    return updater_of(weights)


def held(weights: FakeWeights) -> Tensors:
    return {name: weights.read(name).clone() for name in weights.metas()}


def send(updater: WeightUpdater, old: Tensors, new: Tensors) -> None:
    (payload,) = DeltaEncoder(old.items()).encode(new.items()).payloads()
    model = updater.model
    inner = Delivered(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    homes, calls = model.planner.homes(updater.weights), model.known_calls
    source = DeltaSource(inner, updater.weights, quantised=model.quantised, homes=homes, known_calls=calls)
    updater.open_implicit("full")
    try:
        updater.receive(source)
    except WeightSyncError:
        updater.abort()
        raise
    updater.verify()
    updater.commit()


@pytest.fixture
def made() -> Iterator[mock.Mock]:
    """Count the plans that are made."""
    with mock.patch.object(plan_module, "plan_bucket", wraps=plan_module.plan_bucket) as counted:
        yield counted


@pytest.mark.parametrize("staging", ["host", "in_place", "journal"])
def test_deltas_follow_one_another(weights: FakeWeights, made: mock.Mock, staging: StagingMode) -> None:
    updater, old, plans = updater_of(weights, staging), version(1), []
    for _ in range(3):
        new = nudged(old)
        send(updater, old, new)
        assert same_bits(held(weights), new)
        old = new
        plans.append(made.call_count)
    assert plans[0] == plans[1] == plans[2], "the first delta makes all plans"
    assert plans[0] > 1


def test_no_tensor_is_written_by_itself(weights: FakeWeights, updater: WeightUpdater) -> None:
    with mock.patch.object(ShadowStaging, "write", autospec=True, side_effect=ShadowStaging.write) as written:
        send(updater, version(1), nudged(version(1)))
    assert not written.called


@pytest.mark.parametrize("slot", [1, 3])
def test_copies_that_differ_are_refused(weights: FakeWeights, slot: int) -> None:
    """One of the two copies of an expert is wrong: the first, which is changed, or the other."""
    weights.w2[slot, 0, 0] += 1
    before = weights.snapshot()
    with pytest.raises(BaseMismatchError, match=r"experts\.1\.down_proj\.weight: copy . on rank 0 differs"):
        send(updater_of(weights), version(1), nudged(version(1)))
    assert weights.snapshot() == before


@pytest.mark.parametrize("name", [EMBED, NORM, "model.layers.0.mlp.experts.2.down_proj.weight"])
@pytest.mark.parametrize("staging", ["host", "in_place"])
def test_a_wrong_base_is_refused_before_anything_is_written(
    weights: FakeWeights, name: str, staging: StagingMode
) -> None:
    other = version(1)
    other[name] = other[name] + 1
    with pytest.raises(BaseMismatchError, match=name):
        send(updater_of(weights, staging), other, nudged(other))
    assert same_bits(held(weights), version(1))


def test_values_that_are_not_finite_are_refused(weights: FakeWeights, updater: WeightUpdater) -> None:
    new = nudged(version(1))
    new[NORM][2] = torch.inf
    with pytest.raises(ContentError, match=f"not finite in {NORM}"):
        send(updater, version(1), new)
    assert same_bits(held(weights), version(1))


def test_a_change_at_a_wrong_place_is_noticed(weights: FakeWeights, updater: WeightUpdater) -> None:
    """A wrong variant: positions are one too low."""
    change = FramePart._change

    def one_too_low(self: FramePart, content: torch.Tensor) -> None:
        moved = content.roll(self._tables.itemsize)
        change(self, moved)
        content.copy_(moved.roll(-self._tables.itemsize))

    with mock.patch.object(FramePart, "_change", one_too_low), pytest.raises(ContentError, match="after the delta"):
        send(updater, version(1), nudged(version(1)))
    assert same_bits(held(weights), version(1))


def test_parts_that_change_places_are_noticed(weights: FakeWeights, updater: WeightUpdater) -> None:
    """A wrong variant: tensors of one shape get each other's content."""
    with (
        mock.patch.object(FramePart, "_end_to_end", lambda self: exchanged(self)),
        pytest.raises(BaseMismatchError),
    ):
        send(updater, version(1), nudged(version(1)))
    assert same_bits(held(weights), version(1))


def exchanged(part: FramePart) -> torch.Tensor:
    found = [part._held(meta.name) for meta in part._tables.layout.metas]
    mixed = [next(other for other in reversed(found) if other.shape == one.shape) for one in found]
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in mixed])


def test_parts_have_one_item_size_and_few_bytes() -> None:
    metas = [
        TensorMeta("a", torch.bfloat16, (10,)),
        TensorMeta("b", torch.float16, (10,)),
        TensorMeta("c", torch.float32, (2,)),
        TensorMeta("large", torch.float32, (100,)),
        TensorMeta("scalar", torch.float32, ()),
        TensorMeta("empty", torch.float32, (0, 3)),
    ]
    parts = cut_parts(metas)
    assert [[meta.name for meta in part.layout.metas] for part in parts] == [
        ["a", "b"],
        ["c"],
        ["large"],
        ["scalar", "empty"],
    ]
    for part in parts:
        content = torch.arange(part.layout.num_bytes, dtype=torch.uint8)
        sums, _ = part.tables.take(content, [], writes=False)
        expected = [fingerprint(tensor) for _, tensor in part.layout.views(content)]
        assert sums[:, 0].numpy().view(np.uint64).tolist() == expected
