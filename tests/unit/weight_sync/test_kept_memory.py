"""Memory that one weight update leaves for the next: which areas, and that nothing of their old content shows."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollout.kernels.build import load_kernels
from rollout.kernels.ops import compiled_ops, plain_ops
from rollout.model.decoder import DecoderForCausalLM
from tests.logical_weights_fake import EMBED, FakeWeights, bits, version
from tests.model_zoo import load_tiny, logical_tensors, tiny_checkpoint
from weight_sync.held_memory import Areas, HeldMemory, pinned_area
from weight_sync.homes import Homes
from weight_sync.shadow import ShadowStaging, _Shadow
from weight_sync.tensor_meta import parts_of
from weight_sync.transaction import WeightTransaction

LAYOUTS = ("packed", "plain")
NUM_CONTENTS = 4
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensors]]:
    """A checkpoint and what updates send.  Rows and columns fill no panel, so that storages are larger than tensors."""
    torch.set_num_threads(1)
    assert load_kernels().available
    base = tmp_path_factory.mktemp("models")
    odd = {"hidden_size": 36, "moe_intermediate_size": 20, "vocab_size": 300, "dtype": "bfloat16"}
    folders = [tiny_checkpoint(base / f"v{seed}", "moe_dense_first", seed=seed, **odd) for seed in range(NUM_CONTENTS)]
    return folders[0], [logical_tensors(folder) for folder in folders]


def load(folder: Path, layout: str) -> DecoderForCausalLM:
    return load_tiny(folder, torch.bfloat16, ops=compiled_ops() if layout == "packed" else plain_ops())


def take_part(weights: Any, memory: Areas, tensors: Tensors, end: str, homes: Homes | None = None) -> None:
    """Run one update, which is committed, taken back after the write, or dropped before it.

    With the same `homes` what is known of the shadows is kept, too.
    """
    staging = ShadowStaging(weights, memory=memory, homes=homes)
    transaction = WeightTransaction(weights, "v", "partial", staging=staging)
    transaction.receive(list(tensors.items()))
    if end == "abort":
        transaction.abort()
        return
    transaction.verify()
    try:
        transaction.commit(lambda mine: end == "commit")
        transaction.close()
    except Exception:
        assert end == "undo"


def is_explained(folder: Path, contents: list[Tensors], layout: str, updates: list[tuple[int, set[str], str]]) -> bool:
    """Return whether a model that takes all updates with one kept memory holds what was committed, and nothing else."""
    model, expected = load(folder, layout), dict(contents[0])
    memory, homes = Areas(keep=True), Homes(model.weights)
    for content, names, end in updates:
        sent = {name: contents[content][name] for name in names or expected}
        take_part(model.weights, memory, sent, end, homes)
        if end == "commit":
            expected |= sent
        if any(bits(parts_of(model.weights, name)[0].content) != bits(tensor) for name, tensor in expected.items()):
            return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_leave_nothing_to_one_another(contents: tuple[Path, list[Tensors]], layout: str) -> None:
    """The updates are whole and partial, and some of them fail."""
    folder, versions = contents
    names = st.sets(st.sampled_from(sorted(versions[0])), max_size=4)  # none: all
    update = st.tuples(st.integers(0, NUM_CONTENTS - 1), names, st.sampled_from(["commit", "commit", "undo", "abort"]))

    @given(updates=st.lists(update, min_size=2, max_size=5))
    @settings(max_examples=12, deadline=None)
    def many(updates: list[tuple[int, set[str], str]]) -> None:
        assert is_explained(folder, versions, layout, updates)

    many()


@pytest.mark.mutant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_area_that_is_taken_for_the_live_content_is_noticed(
    contents: tuple[Path, list[Tensors]], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: tensors that were not sent keep the content of the area, which is two versions old."""
    folder, versions = contents
    gate = next(name for name in versions[0] if name.endswith("1.mlp.experts.0.gate_proj.weight"))
    updates: list[tuple[int, set[str], str]] = [(1, set(), "commit"), (2, set(), "commit"), (3, {gate}, "commit")]
    assert is_explained(folder, versions, layout, updates)
    monkeypatch.setattr(_Shadow, "begin", lambda self: None)
    monkeypatch.setattr(ShadowStaging, "_fill", lambda self, key: None)
    assert not is_explained(folder, versions, layout, updates)


def areas_of(memory: Areas) -> dict[int, int]:
    return {live: area.data_ptr() for live, area in memory._areas.items()}


@pytest.mark.parametrize("end", ["commit", "undo", "abort"])
def test_kept_areas_are_the_same_and_others_go(end: str) -> None:
    weights, kept, given_back = FakeWeights(seed=0), Areas(keep=True), Areas()
    take_part(weights, kept, version(1), end)
    before = areas_of(kept)
    assert len(before) == 4
    take_part(weights, kept, {EMBED: version(2)[EMBED]}, end)
    take_part(weights, kept, version(3), end)
    assert areas_of(kept) == before
    take_part(weights, given_back, version(1), end)
    assert areas_of(given_back) == {}
    kept.close()
    assert areas_of(kept) == {}


def test_what_is_known_of_shadows_stays_for_the_same_places_and_goes_with_the_areas() -> None:
    weights, memory = FakeWeights(seed=0), Areas(keep=True)
    homes = Homes(weights)
    known = memory.known_to((homes, "host"))
    take_part(weights, memory, version(1), "commit", homes)
    before = dict(known)
    assert len(before) == 4
    take_part(weights, memory, version(2), "commit", homes)
    assert known == before
    take_part(weights, memory, version(1), "commit", Homes(weights))
    assert not set(map(id, known.values())) & set(map(id, before.values()))
    key, shadow = next(iter(known.items()))
    memory.take(key, shadow.live.numel() + 8192, "cpu")
    assert key not in known and len(known) == 3
    memory.close()
    assert not known


def test_an_area_of_another_size_is_taken_anew() -> None:
    memory, device = Areas(keep=True), torch.device("cpu")
    whole = torch.zeros(8192, dtype=torch.uint8)
    first = memory.take(1, 8192, device, like=whole)
    assert memory.take(1, 8192, device, like=whole).data_ptr() == first.data_ptr() and first.numel() == 8192
    assert memory.take(1, 4096, device, like=whole).numel() == 4096
    larger = memory.take(1, 16384, device, like=whole)
    assert larger.numel() == 16384 and larger.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("keep", [True, False])
def test_what_messages_are_received_into_is_kept_too(keep: bool) -> None:
    held = HeldMemory(keep=keep)
    area = held.receive.take(0, 1 << 16, "cpu")
    held.release_in_background(lambda: None)
    held.await_release(5.0)
    assert (held.receive.take(0, 1 << 16, "cpu").data_ptr() == area.data_ptr()) == keep
    held.release(5.0)
    assert held.receive.take(0, 1 << 16, "cpu").data_ptr() != area.data_ptr()


class Cudart:
    """A CUDA runtime that registers host memory; `refuses`: as a system that lets no process pin its own memory."""

    def __init__(self, refuses: bool = False) -> None:
        self.registered: dict[int, int] = {}
        self._status = int(refuses)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self._status:
            self.registered[address] = num_bytes
        return self._status

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, 1)  # it is still there
        del self.registered[address]
        return 0


def test_pinned_memory_is_as_large_as_it_must_be_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    num_bytes = (3 << 20) + 5
    area = pinned_area(num_bytes).fill_(7)
    view = area[5:]
    assert cudart.registered == {area.data_ptr(): num_bytes} and area.numel() == num_bytes
    del area
    assert cudart.registered and bool((view == 7).all())
    del view
    assert not cudart.registered


@pytest.mark.parametrize(("refuses", "num_bytes"), [(True, 2 << 20), (False, 100)], ids=["refused", "small"])
def test_torchs_pinned_memory_is_taken_otherwise(
    refuses: bool, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart, asked = Cudart(refuses), []
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(
        torch, "empty", lambda size, dtype, pin_memory: asked.append(pin_memory) or empty(size, dtype=dtype)
    )
    assert pinned_area(num_bytes).numel() == num_bytes
    assert asked == [True] and not cudart.registered
