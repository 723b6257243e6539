"""Tests of shadows on the host whose weights are on a device: folded as they are written, and 0 where nothing came.

The device is played by the CPU: `FoldsEarly` folds there as for weights on a device.  `test_device_queue` plays whole
updates with it on a device that is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.kernels.places import ReorderedPlace, ShardPlace, ViewPlace
from tests.logical_weights_fake import EMBED, NORM, FakeWeights, bits, expert_name, version
from tests.unit.weight_sync.test_device_queue import FoldsEarly
from weight_sync.errors import StagingError
from weight_sync.held_memory import Areas
from weight_sync.homes import Homes, address_of
from weight_sync.shadow import ShadowStaging
from weight_sync.tensor_meta import Part, Place

SENT = (EMBED, expert_name(1, "up_proj"), expert_name(0, "down_proj"))


def used_areas(weights: FakeWeights) -> Areas:
    """Return areas that hold what an earlier update left in them."""
    memory = Areas(keep=True)
    staging = FoldsEarly(weights, "host", memory)
    for name in weights.metas():
        staging.write(name, version(9)[name])
    for area in memory._areas.values():
        area.fill_(0x5A)
    staging.close()
    return memory


def refresh(staging: FoldsEarly, names: Sequence[str] = SENT) -> None:
    for name in names:
        staging.write(name, version(1)[name])
    staging.prepare()
    staging.commit()


def test_tensors_that_were_not_sent_stay() -> None:
    weights = FakeWeights(seed=0)
    refresh(FoldsEarly(weights, "host", used_areas(weights)))
    for name in weights.metas():
        want = version(1 if name in SENT else 0)[name]
        assert all(bits(place.read()) == bits(want) for place in weights.places(name)), name


def test_what_lives_beside_tensors_in_a_storage_stays() -> None:
    weights = FakeWeights(seed=0)
    whole = torch.arange(64, dtype=torch.bfloat16)
    weights.embed = whole[8:32].view(6, 4)
    refresh(FoldsEarly(weights, "host", used_areas(weights)), [EMBED])
    assert bits(whole[8:32]) == bits(version(1)[EMBED])
    assert whole[:8].tolist() == list(range(8)) and whole[32:].tolist() == list(range(32, 64))


@pytest.mark.parametrize("after", ["write", "prepare", "commit"])
def test_an_undo_restores_every_bit(after: str) -> None:
    weights = FakeWeights(seed=0)
    weights.embed[0, 0] = float("nan")
    before = weights.snapshot()
    staging = FoldsEarly(weights, "host", used_areas(weights))
    staging.write(EMBED, version(1)[EMBED])
    if after != "write":
        staging.prepare()
    if after == "commit":
        staging.commit()
        assert weights.snapshot() != before
    staging.undo()
    assert weights.snapshot() == before


def test_an_undo_that_does_not_restore_is_noticed() -> None:
    weights = FakeWeights(seed=0)
    staging = FoldsEarly(weights, "host")
    refresh(staging)
    weights.embed[1, 1] += 1
    with pytest.raises(StagingError, match="checksum"):
        staging.undo()


def test_content_can_be_read_before_and_after_prepare_and_written_again() -> None:
    weights = FakeWeights(seed=0)
    staging = FoldsEarly(weights, "host", used_areas(weights))
    staging.write(NORM, version(3)[NORM])
    staging.write(NORM, version(1)[NORM])
    for _ in range(2):
        assert [bits(part.content) for part in staging.read(NORM)] == [bits(version(1)[NORM])]
        staging.prepare()
    assert bits(weights.norm) == bits(version(0)[NORM])


class OnePlace(Homes):
    """One tensor in one place."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def places(self, name: str) -> list[Place]:
        return [self.place]

    def has_gaps(self, storage: torch.Tensor) -> bool:
        return True


def in_any_layout(store: torch.Tensor) -> list[Place]:
    order = torch.tensor([2, 0, 3, 1])
    return [
        ViewPlace(store[2:6]),
        ViewPlace(store[::2, 1:4][:4].t()),
        ReorderedPlace(ViewPlace(store[1:5]), order),
        ShardPlace(ViewPlace(store[3:5]), 0, 2, 2),
        ShardPlace(ReorderedPlace(ViewPlace(store[:4, :3]), order), 1, 1, 3),
    ]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("as_part", [False, True])
def test_places_of_every_layout_are_folded(number: int, dtype: torch.dtype, as_part: bool) -> None:
    """The commit puts there what `write` or `restore` of the place would have put there."""
    store = torch.randn(8, 6).to(dtype)
    want = store.clone()
    place = in_any_layout(store)[number]
    shape = [*place.read().shape]
    if place.region is not None:
        shape[place.region.dim] += 3
    sent = torch.randn(shape)
    expected = in_any_layout(want)[number]
    expected.write(sent)
    content = Part(place.region, expected.read().clone()) if as_part else sent
    staging = FoldsEarly(FakeWeights(), "host", homes=OnePlace(place))
    staging.write("t", content)
    assert [bits(part.content) for part in staging.read("t")] == [bits(expected.read())]
    staging.prepare()
    staging.commit()
    assert bits(store) == bits(want)


class Crossings(TorchDispatchMode):
    """Counts the bytes that cross the bus: of shadows, by operators that have other tensors, too."""

    def __init__(self, staging: ShadowStaging) -> None:
        super().__init__()
        self._staging = staging
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [it for it in tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor) and it.numel()]
        areas = {address_of(shadow.staged) for shadow in self._staging._shadows.values()}
        host = [tensor for tensor in tensors if address_of(tensor) in areas]
        if host and len(host) < len(tensors):
            is_fold = "xor_" in str(func) or "fold" in str(func)
            is_read_and_written = is_fold and address_of(tree_leaves(args[0])[0]) in areas
            self.num_bytes += sum(tensor.nbytes for tensor in host) * (2 if is_read_and_written else 1)
        return result


def crossings(kind: type[ShadowStaging]) -> list[float]:
    """Return how often the bytes of the weights have crossed the bus after all writes, `prepare`, and the commit."""
    weights = FakeWeights(seed=0)
    staging = kind(weights, "host", used_areas(weights))
    with Crossings(staging) as counted:
        found = []
        for name in weights.metas():
            staging.write(name, version(1)[name])
        found.append(counted.num_bytes / staging.num_bytes)
        for deed in (staging.prepare, staging.commit):
            deed()
            found.append(counted.num_bytes / staging.num_bytes)
    assert all(bits(weights.read(name)) == bits(version(1)[name]) for name in weights.metas())
    return found


def test_each_byte_crosses_the_bus_twice_g7() -> None:
    """G7: four times."""
    assert crossings(FoldsEarly) == [1.0, 1.0, 2.0]


# --- wrong variants ---------------------------------------------------------------------------------------------------


class _FoldsInPrepare(ShadowStaging):
    """Slow: content is read once more to be folded, and written."""


def test_a_shadow_that_is_folded_late_is_noticed() -> None:
    assert crossings(_FoldsInPrepare) == [1.0, 3.0, 4.0]


class _KeepsGarbage(FoldsEarly):
    """Wrong: what was not sent is left as the area came."""

    def _fill(self, keys: set[int]) -> None:
        pass


class _FillsWithLive(FoldsEarly):
    """Wrong: what was not sent is filled in as for a shadow that `prepare` folds."""

    def _fill(self, keys: set[int]) -> None:
        for name in self._weights.metas().keys() - self._written:
            for place in self._homes.places(name):
                self._place_in_shadow(place).restore(place.read())


class _FoldsTwice(FoldsEarly):
    """Wrong: `prepare` folds what was folded as it was written."""

    def prepare(self) -> None:
        for shadow in self._shadows.values():
            shadow.is_folded = False
        super().prepare()


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [_KeepsGarbage, _FillsWithLive, _FoldsTwice])
def test_a_shadow_that_is_folded_wrongly_is_noticed(wrong: type[FoldsEarly]) -> None:
    weights = FakeWeights(seed=0)
    refresh(wrong(weights, "host", used_areas(weights)))
    assert any(
        bits(place.read()) != bits(version(1 if name in SENT else 0)[name])
        for name in weights.metas()
        for place in weights.places(name)
    )
