"""Staging modes over real layouts: any split and order, fixed addresses, the journal's file, and what each mode keeps.

The property tests run on the small model and on loaded checkpoints, packed for the compiled operators and plain.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from rollout.kernels.build import load_kernels
from rollout.kernels.ops import compiled_ops, plain_ops
from rollout.model.decoder import DecoderForCausalLM
from tests.logical_weights_fake import DOWN, EMBED, GATE_UP, NORM, FakeWeights, bits, expert_name, fused, version
from tests.model_zoo import load_tiny, logical_tensors, tiny_checkpoint
from tests.tiers import examples
from weight_sync.errors import CommitError, ContentError, StagingError
from weight_sync.in_model import InPlaceStaging, JournalStaging
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import parts_of, tensor_bytes
from weight_sync.transaction import WeightTransaction, new_staging
from weight_sync.unnamed_file import UnnamedFile
from weight_sync.updater import WeightUpdater

MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")
LAYOUTS = ("packed", "plain")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def agree(mine: bool) -> bool:
    return mine


def refuse(mine: bool) -> bool:
    return False


def opened(
    weights: Any, mode: StagingMode, coverage: Any = "full", journal_dir: str | None = None
) -> WeightTransaction:
    return WeightTransaction(weights, "v1", coverage, staging=new_staging(weights, mode, journal_dir))


def all_storages(model: DecoderForCausalLM) -> dict[int, bytes]:
    """Return the bytes of every storage behind a logical tensor, padding included, by address."""
    storages = {}
    for name in model.weights.metas():
        for place in model.weights.places(name):
            whole = torch.empty(0, dtype=torch.uint8).set_(place.storage.untyped_storage())
            storages[whole.data_ptr()] = whole.numpy().tobytes()
    return storages


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints with sizes that fill no panel: 20 rows of an expert, 36 columns, 300 words."""
    base = tmp_path_factory.mktemp("models")
    odd = {"hidden_size": 36, "moe_intermediate_size": 20, "vocab_size": 300, "dtype": "bfloat16"}
    old, new = (tiny_checkpoint(base / f"v{seed}", "moe_dense_first", seed=seed, **odd) for seed in (1, 2))
    return old, new


def load(folder: Path, layout: str) -> DecoderForCausalLM:
    if layout == "plain":
        return load_tiny(folder, torch.bfloat16, ops=plain_ops())
    status = load_kernels()
    assert status.available, status.reason
    return load_tiny(folder, torch.bfloat16, ops=compiled_ops())


# --- any split and order ---------------------------------------------------------------------------------------------


@given(data=st.data(), mode=st.sampled_from(MODES))
@settings(max_examples=examples(60), deadline=None)
def test_buckets_may_cut_anywhere_in_any_order(data: st.DataObject, mode: StagingMode) -> None:
    weights = FakeWeights(seed=0)
    addresses = [t.data_ptr() for t in (weights.embed, weights.norm, weights.w13, weights.w2)]
    sent = version(1)
    as_fused = data.draw(st.sets(st.sampled_from([GATE_UP, DOWN])))
    tensors = {name: fused(sent)[name] for name in as_fused}
    covered = {"gate_proj": GATE_UP, "up_proj": GATE_UP, "down_proj": DOWN}
    for name, tensor in sent.items():
        if covered.get(name.split(".")[-2]) not in as_fused:
            tensors[name] = tensor
    order = data.draw(st.permutations(sorted(tensors)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)), max_size=len(order))) | {0, len(order)})
    transaction = opened(weights, mode)
    for start, stop in pairwise(cuts):
        transaction.receive([(name, tensors[name]) for name in order[start:stop]])
    transaction.verify()
    transaction.commit(agree)
    assert weights.snapshot() == FakeWeights(1).snapshot()
    assert addresses == [t.data_ptr() for t in (weights.embed, weights.norm, weights.w13, weights.w2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_model_in_any_order(checkpoints: tuple[Path, Path], layout: str, mode: StagingMode) -> None:
    """q without k, gate without up, one expert here and one there: every byte is that of a cold load."""
    model, expected = load(checkpoints[0], layout), load(checkpoints[1], layout)
    before = all_storages(model)
    new = logical_tensors(checkpoints[1])
    order = sorted(new, key=lambda name: name[::-1])
    transaction = opened(model.weights, mode)
    for start in range(0, len(order), 5):
        transaction.receive([(name, new[name]) for name in order[start : start + 5]])
        if mode in ("host", "device"):
            assert all_storages(model) == before
    for name in order[:9]:
        assert bits(transaction.read_staged(name)[0].content) == bits(new[name])  # type: ignore[index]
    transaction.verify()
    for name in order[:9]:
        assert bits(transaction.read_staged(name)[0].content) == bits(new[name])  # type: ignore[index]
    transaction.commit(agree)
    after = all_storages(model)
    assert after.keys() == before.keys()
    assert sorted(after.values()) == sorted(all_storages(expected).values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["host", "device", "journal"])
@pytest.mark.parametrize("coverage", ["full", "partial"])
def test_a_lost_vote_leaves_every_byte(
    checkpoints: tuple[Path, Path], layout: str, mode: StagingMode, coverage: str
) -> None:
    model = load(checkpoints[0], layout)
    before = all_storages(model)
    new = logical_tensors(checkpoints[1])
    names = sorted(new) if coverage == "full" else sorted(new)[::3]
    transaction = opened(model.weights, mode, coverage)
    transaction.receive([(name, new[name]) for name in names])
    transaction.verify()
    with pytest.raises(CommitError) as caught:
        transaction.commit(refuse)
    assert caught.value.restored
    assert all_storages(model) == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_partial_refresh_leaves_its_neighbours(
    checkpoints: tuple[Path, Path], layout: str, mode: StagingMode, data: st.DataObject
) -> None:
    """Tensors of one storage that were not sent keep their bits: the other rows of qkv, the other experts."""
    model = load(checkpoints[0], layout)
    old, new = (logical_tensors(folder) for folder in checkpoints)
    names = data.draw(st.sets(st.sampled_from(sorted(new)), min_size=1))
    transaction = opened(model.weights, mode, "partial")
    transaction.receive([(name, new[name]) for name in names])
    transaction.verify()
    transaction.commit(agree)
    assert sorted(transaction.received) == sorted(names)
    for name in model.weights.metas():
        assert bits(parts_of(model.weights, name)[0].content) == bits((new if name in names else old)[name])


def test_what_lives_beside_tensors_in_a_storage_stays() -> None:
    """The storage has room that belongs to no logical tensor."""
    weights = FakeWeights(seed=0)
    whole = torch.arange(64, dtype=torch.bfloat16)
    weights.embed = whole[8:32].view(6, 4)
    transaction = opened(weights, "host", "partial")
    transaction.receive([(EMBED, version(1)[EMBED])])
    transaction.verify()
    transaction.commit(agree)
    assert bits(whole[8:32]) == bits(version(1)[EMBED])
    assert whole[:8].tolist() == list(range(8)) and whole[32:].tolist() == list(range(32, 64))


def test_a_shadow_takes_as_much_as_the_storages_touched() -> None:
    weights = FakeWeights(seed=0)
    staging = ShadowStaging(weights)
    assert staging.num_bytes == 0
    staging.write(EMBED, version(1)[EMBED])
    assert staging.num_bytes == weights.embed.nbytes
    staging.write(expert_name(0, "up_proj"), version(1)[expert_name(0, "up_proj")])
    assert staging.num_bytes == weights.embed.nbytes + weights.w13.nbytes
    staging.undo()
    assert staging.num_bytes == 0


# --- journal and in place --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["abort", "fail", "missing"])
def test_the_journal_restores_every_bit(end: str) -> None:
    weights = FakeWeights(seed=0)
    weights.embed[0, 0] = float("nan")  # whatever was there comes back, not only decent values
    before = weights.snapshot()
    transaction = opened(weights, "journal")
    sent = version(1)
    del sent[NORM]
    transaction.receive(sent.items())
    assert transaction.dirty and weights.snapshot() != before
    if end == "abort":
        transaction.abort()
    elif end == "fail":
        transaction.fail("the trainer is gone")
    else:
        with pytest.raises(Exception, match="missing"):
            transaction.verify()
    assert weights.snapshot() == before
    assert not transaction.dirty and transaction.torn is None


def test_a_full_disk_changes_nothing() -> None:
    """The file takes no byte more: the tensor is not written, and what was written before comes back."""
    weights = FakeWeights(seed=0)
    before = weights.snapshot()
    staging = JournalStaging(weights)
    transaction = WeightTransaction(weights, staging=staging)
    sent = version(1)
    transaction.receive([(EMBED, sent[EMBED])])

    class FullDisk:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, view: Any) -> int:
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    assert staging._file is not None
    staging._file._file = FullDisk(staging._file._file)  # type: ignore[assignment]
    with pytest.raises(
        StagingError, match=r"model.norm.weight \(16 bytes\) cannot be written to the journal.*No space left"
    ):
        transaction.receive([(NORM, sent[NORM])])
    assert weights.snapshot() == before
    assert transaction.torn is None and transaction.failure is not None


def test_a_directory_that_cannot_hold_the_journal(tmp_path: Path) -> None:
    weights = FakeWeights(seed=0)
    before = weights.snapshot()
    transaction = opened(weights, "journal", journal_dir=str(tmp_path / "absent"))
    with pytest.raises(StagingError, match=r"the journal in .* cannot be created"):
        transaction.receive(version(1).items())
    assert weights.snapshot() == before and transaction.torn is None


def test_a_damaged_journal_is_torn_weights() -> None:
    weights = FakeWeights(seed=0)
    staging = JournalStaging(weights)
    transaction = WeightTransaction(weights, staging=staging)
    transaction.receive(version(1).items())
    assert staging._file is not None
    staging._file._file.seek(3)
    staging._file._file.write(b"\x55")
    transaction.abort()
    assert transaction.torn is not None and "could NOT be restored" in transaction.torn
    assert "damaged" in transaction.torn


def test_a_journal_leaves_no_file(tmp_path: Path) -> None:
    journal = UnnamedFile("journal-", str(tmp_path))
    tensors = [torch.arange(5), torch.empty(0, 3), torch.tensor(1.5, dtype=torch.bfloat16)]
    entries = [journal.append(tensor_bytes(tensor).numpy().data) for tensor in tensors]
    for tensor, entry in zip(tensors, entries, strict=True):
        found = torch.empty_like(tensor)
        journal.read(entry, tensor_bytes(found).numpy().data)
        assert torch.equal(found, tensor)
    assert journal.num_bytes == 42
    assert list(tmp_path.iterdir()) == []
    journal.close()


def test_in_place_before_the_first_write_nothing_is_lost() -> None:
    """The whole bucket is checked before any of it is written."""
    weights = FakeWeights(seed=0)
    before = weights.snapshot()
    sent = version(1)
    sent[expert_name(2, "down_proj")][0, 0] = float("nan")
    transaction = opened(weights, "in_place")
    with pytest.raises(ContentError):
        transaction.receive(sent.items())
    assert weights.snapshot() == before
    assert transaction.torn is None


@pytest.mark.parametrize("end", ["abort", "bucket", "missing", "vote"])
def test_in_place_after_the_first_write_the_weights_are_torn(end: str) -> None:
    weights = FakeWeights(seed=0)
    transaction = opened(weights, "in_place", "partial" if end == "vote" else "full")
    transaction.receive([(EMBED, version(1)[EMBED])])
    if end == "abort":
        transaction.abort()
    elif end == "bucket":
        with pytest.raises(Exception, match="no such tensor"):
            transaction.receive([("ghost", torch.zeros(1))])
    elif end == "missing":
        with pytest.raises(Exception, match="missing"):
            transaction.verify()
    else:
        transaction.verify()
        with pytest.raises(CommitError) as caught:
            transaction.commit(refuse)
        assert not caught.value.restored
    assert transaction.torn is not None and "tensors were overwritten in place" in transaction.torn


def test_each_mode_names_its_kind_of_staging() -> None:
    weights = FakeWeights()
    kinds = [type(new_staging(weights, mode)) for mode in MODES]
    assert kinds == [ShadowStaging, ShadowStaging, JournalStaging, InPlaceStaging]
    updaters = [
        WeightUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, staging=mode) for mode in MODES
    ]
    assert [updater.holds_steps for updater in updaters] == [False, False, True, True]
