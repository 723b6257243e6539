"""Public bugs of weight refresh (field notes, B2) that leave wrong bytes serving, each as a test that fails on the bug.

    37  vllm#55228        a reload after experts moved goes by the initial placement
    38  prime-rl#3583     the same: a replica keeps old weights
    39  SkyRL#1680        experts loaded in more than one chunk end up as gibberish
    40  sglang#38298      halves of a fused tensor that come in different chunks are dropped
    41  sglang#29916      a tensor computed from weights stays that of step 0, unseen by the checker
    42  sglang#31937      a load path that forgets to recompute such tensors
    43  sglang#6265       a refresh makes new storage, and a holder of the old one serves old weights
    46  verl#7224         a load reports success while a tensor was never written
    50  vllm#51665, prime-rl#2438   tied embeddings that a refresh unties

Bugs of failures and states are in `test_regression_b2_failures.py`.
Elsewhere: 49 (peaks of memory) is measured with the staging modes; 51 (a fleet of which some engines updated) with the
sender; 54 (one version a token) and 59 (in-place pause during a transfer) in `test_refresh_while_running.py`; 61 (a
trainer that dies in a transfer) in `test_weight_sync_gloo.py`.
Cannot occur here: 44 (no model wraps another: there is one loading path), 45 and 47 (no quantised weights, no scales),
57, 58 and 60 (one engine is one rank: no collective of its own runs beside the transfer, and a pause has one owner).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.families.registry import load_model_config
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.weight_loading import WeightIndex
from tests.logical_weights_fake import EMBED, NORM, FakeWeights, fused, version
from tests.loopback_updater import LoopbackUpdater, new_updater, refresh
from tests.model_zoo import load_tiny, logical_tensors, tiny_checkpoint, trivial_placement
from weight_sync.checker import compare, reset_tensors, resettable, take_snapshot
from weight_sync.errors import CommitError, ContentError, TransactionStateError
from weight_sync.tensor_meta import LogicalWeights

F64 = torch.float64
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MOVED = torch.tensor([[7, 6, 5, 4, 3, 2, 1, 0, 3, 3], [1, 0, 2, 3, 4, 5, 7, 6, 0, 7]])  # with replicas
REPLICATED = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 0, 7]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Old and new weights; tied, every layer of experts."""
    base = tmp_path_factory.mktemp("models")
    return (
        tiny_checkpoint(base / "old", "moe", seed=1, dtype="float64"),
        tiny_checkpoint(base / "new", "moe", seed=2, dtype="float64"),
    )


def is_loaded(model: DecoderForCausalLM, folder: Path, placement: ExpertPlacement | None = None) -> bool:
    """Return whether every byte that serves is what a cold load of `folder` gives under `placement`."""
    fresh = load_tiny(folder, F64, placement)
    return all(torch.equal(ours, theirs) for ours, theirs in zip(model.tensors(), fresh.tensors(), strict=True))


def moved(rows: torch.Tensor) -> ExpertPlacement:
    return ExpertPlacement(ExpertLocationMetadata(rows, 8))


# --- 37, 38: placement --------------------------------------------------------------------------------------------


class InitialPlaces(WeightIndex):
    """Wrong: asks for the places of every tensor once, when the model is built."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        super().__init__(model, {HEAD: EMBEDDING})
        self._initial = {name: list(entry.places()) for name, entry in self._entries.items()}

    def places(self, name: str) -> Sequence:
        return self._initial[name]

    def write(self, name: str, source: torch.Tensor) -> None:
        for place in self._initial[name]:
            place.write(source)


class FirstPlaceOnly(WeightIndex):
    """Wrong: forgets that an expert may have replicas."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        super().__init__(model, {HEAD: EMBEDDING})

    def places(self, name: str) -> Sequence:
        return super().places(name)[:1]

    def write(self, name: str, source: torch.Tensor) -> None:
        self.places(name)[0].write(source)


def refreshed_after_a_move(folders: tuple[Path, Path], weights: Callable[[DecoderForCausalLM], LogicalWeights]) -> bool:
    """Start under one placement, adopt another, refresh; whether all slots then hold what the new placement says."""
    placement = moved(REPLICATED)
    model = load_tiny(folders[0], F64, placement)
    index = weights(model)
    placement.metadata = ExpertLocationMetadata(MOVED, 8)
    refresh(index, [list(logical_tensors(folders[1]).items())])
    return is_loaded(model, folders[1], moved(MOVED))


def test_37_vllm_55228_a_refresh_goes_by_the_placement_in_force(folders: tuple[Path, Path]) -> None:
    assert refreshed_after_a_move(folders, lambda model: model.weights)
    assert not refreshed_after_a_move(folders, InitialPlaces), "the wrong variant passes"


def test_38_prime_rl_3583_every_replica_is_refreshed(folders: tuple[Path, Path]) -> None:
    assert not refreshed_after_a_move(folders, FirstPlaceOnly), "the wrong variant passes"
    placement = moved(REPLICATED)
    model = load_tiny(folders[0], F64, placement)
    refresh(model.weights, [list(logical_tensors(folders[1]).items())])
    assert is_loaded(model, folders[1], placement)


# --- 39, 40: chunks -----------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_39_skyrl_1680_and_40_sglang_38298_any_split_in_any_order_is_one_load(
    folders: tuple[Path, Path], data: st.DataObject
) -> None:
    """Buckets cut at random through experts, gate and up, q, k and v: the result is the cold load."""
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    names = data.draw(st.permutations(sorted(tensors)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1), max_size=8)))
    edges = [0, *cuts, len(names)]
    refresh(model.weights, [[(name, tensors[name]) for name in names[a:b]] for a, b in itertools.pairwise(edges)])
    assert is_loaded(model, folders[1])


@pytest.mark.mutant
def test_40_a_fusion_that_lives_for_one_call_is_caught(folders: tuple[Path, Path]) -> None:
    """The wrong variant: gate and up are joined only where both came in one call, otherwise dropped."""
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    names = sorted(tensors)
    for bucket in (names[::2], names[1::2]):
        for name in bucket:
            other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
            half = next((part for part in other if part in name), None)
            if half is None or name.replace(half, other[half]) in bucket:
                model.weights.write(name, tensors[name])
    assert not is_loaded(model, folders[1])


# --- 41, 42, 43, 46: what a checker of loaded tensors does not see ------------------------------------------------


class FrozenDerived(FakeWeights):
    """Wrong: what is computed from weights is computed once."""

    def recompute_derived(self) -> None:
        if not bool(self.derived_norm_sum):
            super().recompute_derived()


def test_41_sglang_29916_and_42_sglang_31937_derived_tensors_follow_every_path() -> None:
    """Refresh in the plain and the fused form, a commit that is taken back, and a reset."""

    def follows(weights: FakeWeights) -> bool:
        return torch.equal(weights.derived_norm_sum, weights.norm.sum())

    for tensors in (version(2), fused(version(2))):
        weights, frozen = FakeWeights(seed=1), FrozenDerived(seed=1)
        refresh(weights, [list(tensors.items())])
        refresh(frozen, [list(tensors.items())])
        assert follows(weights) and not follows(frozen), list(tensors)
    weights = FakeWeights(seed=1)
    updater = LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=_votes(True, False))
    updater.begin("v2")
    updater.send(list(version(2).items()))
    updater.verify()
    with pytest.raises(CommitError):
        updater.commit()
    assert follows(weights) and torch.equal(weights.norm, version(1)[NORM])
    reset_tensors(weights, resettable(weights))
    assert bool(weights.derived_norm_sum.isnan())


def _votes(*answers: bool) -> Callable[[bool], bool]:
    remaining = list(answers)
    return lambda mine: mine and remaining.pop(0)


class Rebinding(FakeWeights):
    """Wrong: a write makes new storage."""

    def write(self, name: str, source: torch.Tensor) -> None:
        if name == EMBED:
            self.embed = source.clone()
        super().write(name, source)


def test_43_sglang_6265_storage_stays_where_it_is(folders: tuple[Path, Path]) -> None:
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    held = list(model.tensors())
    addresses = [tensor.data_ptr() for tensor in held]
    refresh(model.weights, [list(tensors.items())])
    assert [tensor.data_ptr() for tensor in model.tensors()] == addresses
    fresh = load_tiny(folders[1], F64)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(held, fresh.tensors(), strict=True))
    wrong = Rebinding(seed=1)
    address = wrong.embed.data_ptr()
    wrong.write(EMBED, version(2)[EMBED])
    assert wrong.embed.data_ptr() != address, "the comparison of addresses cannot fail"


class Forgetful(FakeWeights):
    """Wrong: reports success for a tensor that it does not write."""

    def write(self, name: str, source: torch.Tensor) -> None:
        if name != NORM or not source.isfinite().all():
            super().write(name, source)


def test_46_verl_7224_what_was_not_written_is_found() -> None:
    right, wrong = FakeWeights(seed=1), Forgetful(seed=1)
    wrong.norm.copy_(version(1)[NORM])
    for weights, forgotten in ((right, []), (wrong, [NORM])):
        snapshot = take_snapshot(weights, keep_content=False)
        reset_tensors(weights, resettable(weights))
        for name, tensor in version(1).items():
            weights.write(name, tensor)
        assert [difference.name for difference in compare(weights, snapshot)] == forgotten


# --- 50: tied embeddings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD), (HEAD, EMBEDDING)])
def test_50_vllm_51665_a_tied_head_follows_whichever_name_comes(
    folders: tuple[Path, Path], sent: tuple[str, ...]
) -> None:
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    embedding = tensors.pop(EMBEDDING)
    refresh(model.weights, [list(tensors.items()), *([(name, embedding.clone())] for name in sent)])
    assert head_follows(model, embedding) and is_loaded(model, folders[1])


def head_follows(model: DecoderForCausalLM, embedding: torch.Tensor) -> bool:
    hidden_ND = torch.randn(3, embedding.shape[1], dtype=F64, generator=torch.Generator().manual_seed(1))
    return torch.allclose(model.compute_logits(hidden_ND), hidden_ND @ embedding.T, rtol=1e-12, atol=1e-12)


@pytest.mark.mutant
def test_50_prime_rl_2438_a_head_with_a_copy_of_its_own_is_caught(folders: tuple[Path, Path]) -> None:
    """The wrong variant: the head was untied once, and serves step 0 for ever."""
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    model.lm_head.weight = model.lm_head.weight.clone()
    refresh(model.weights, [list(tensors.items())])
    assert not head_follows(model, tensors[EMBEDDING])


def test_50_two_names_with_two_contents_are_refused(folders: tuple[Path, Path]) -> None:
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    updater = new_updater(model.weights)
    updater.begin("v2")
    updater.send(list(tensors.items()))
    with pytest.raises(ContentError):
        updater.send([(HEAD, tensors[EMBEDDING] + 1)])
    with pytest.raises(TransactionStateError):
        updater.verify()
    assert is_loaded(model, folders[0])


def test_the_placements_used_here_differ_in_every_layer(folders: tuple[Path, Path]) -> None:
    """So that 37 and 38 test what they say."""
    trivial = trivial_placement(load_model_config(folders[0])).metadata.physical_to_logical_map
    for layer in range(2):
        assert not torch.equal(MOVED[layer], REPLICATED[layer])
        assert torch.equal(REPLICATED[layer][:8], trivial[layer])
