"""Snapshot, comparison, NaN fill and the digest that is known without reading, on a small model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.logical_weights_fake import EMBED, NORM, FakeWeights, NamedWeights, expert_name, fused, version
from tests.loopback_updater import LoopbackUpdater, refresh
from weight_sync import checker, rank_parts
from weight_sync.checker import compare, live_fingerprints, reset_tensors, resettable, take_snapshot
from weight_sync.content import Content, ContentBook, Contents, Digests, TensorTable
from weight_sync.errors import CommitError, UnknownTensorError, WeightRequestError
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.fingerprint_batch import fingerprints_of
from weight_sync.tensor_meta import Part, Region, TensorMeta


def contents_of(table: TensorTable, contents: dict[str, Content]) -> Contents:
    """Return the contents of tensors by name."""
    found = Contents(table)
    for name, content in contents.items():
        found.put(table.number_of[name], content)
    return found


def rewrite(weights: FakeWeights, seed: int, leave_out: str | None = None) -> None:
    for name, tensor in version(seed).items():
        if name != leave_out:
            weights.write(name, tensor)
    weights.recompute_derived()


@pytest.mark.parametrize("keep_content", [False, True])
def test_compare_finds_exactly_what_differs(keep_content: bool) -> None:
    weights = FakeWeights(seed=1)
    snapshot = take_snapshot(weights, keep_content)
    assert compare(weights, snapshot) == []
    assert snapshot.num_bytes == (sum(meta.nbytes for meta in weights.metas().values()) if keep_content else 0)
    name = expert_name(1, "up_proj")
    changed = weights.read(name).clone()
    changed[0, 1], changed[1, 2] = changed[0, 1] + 2, -changed[1, 2]
    largest = (changed.double() - weights.read(name).double()).abs().max().item()
    weights.write(name, changed)
    (difference,) = compare(weights, snapshot)
    assert difference.name == name
    assert (difference.num_elements, difference.max_abs_difference) == ((2, largest) if keep_content else (None, None))
    assert compare(weights, snapshot, skip=[name]) == []
    with pytest.raises(UnknownTensorError, match="nobody"):
        compare(weights, snapshot, skip=["nobody"])


def test_a_snapshot_does_not_follow_the_weights() -> None:
    weights = FakeWeights(seed=1)
    snapshot = take_snapshot(weights, keep_content=True)
    rewrite(weights, seed=2)
    assert [difference.name for difference in compare(weights, snapshot)] == list(weights.metas())
    rewrite(weights, seed=1)
    assert compare(weights, snapshot) == []


def test_signed_zeros_and_what_is_not_finite_count() -> None:
    weights = FakeWeights(seed=1)
    weights.write(NORM, torch.tensor([0.0, 1.0, float("nan"), 2.0]))
    snapshot = take_snapshot(weights, keep_content=True)
    weights.write(NORM, torch.tensor([-0.0, 1.0, float("nan"), 2.0]))
    (difference,) = compare(weights, snapshot)
    assert (difference.num_elements, difference.max_abs_difference) == (1, 0.0)
    weights.write(NORM, torch.tensor([0.0, float("inf"), float("nan"), 2.0]))
    (difference,) = compare(weights, snapshot)
    assert (difference.num_elements, difference.max_abs_difference) == (1, None)


@pytest.mark.parametrize("left_out", [None, EMBED, NORM, expert_name(2, "down_proj")])
def test_reset_shows_what_a_refresh_leaves_out(left_out: str | None) -> None:
    weights = FakeWeights(seed=1)
    snapshot = take_snapshot(weights, keep_content=False)
    reset_tensors(weights, resettable(weights))
    assert all(bool(weights.read(name).isnan().all()) for name in weights.metas())
    assert bool(weights.derived_norm_sum.isnan())
    rewrite(weights, seed=1, leave_out=left_out)
    assert [difference.name for difference in compare(weights, snapshot)] == ([left_out] if left_out else [])


def test_without_the_reset_a_refresh_that_leaves_one_out_passes() -> None:
    """Without the reset, equal content hides a tensor that was not written."""
    weights = FakeWeights(seed=1)
    snapshot = take_snapshot(weights, keep_content=False)
    rewrite(weights, seed=1, leave_out=EMBED)
    assert compare(weights, snapshot) == []


def test_what_cannot_be_reset_is_refused_before_anything_is_filled() -> None:
    weights = FakeWeights(seed=1)
    with pytest.raises(UnknownTensorError):
        resettable(weights, skip=["nobody"])
    assert resettable(weights, skip=[EMBED]) == [name for name in weights.metas() if name != EMBED]
    weights._metas[NORM] = TensorMeta(NORM, torch.int32, (4,))
    with pytest.raises(WeightRequestError, match="NaN"):
        resettable(weights)


def test_the_book_knows_the_digest_when_every_tensor_is_known() -> None:
    weights = FakeWeights(seed=1)
    table = TensorTable(weights.metas())
    book = ContentBook(table)
    meta_of = weights.metas()
    assert book.digests == Digests(None, None)
    rewrite(weights, seed=2)
    book.note(contents_of(table, {EMBED: Content.plain(meta_of[EMBED], fingerprint(weights.read(EMBED)))}))
    assert book.digests == Digests(None, None)
    book.note_live(live_fingerprints(weights))
    live = digest((meta, fingerprint(weights.read(name))) for name, meta in meta_of.items())
    assert book.digests == Digests(live, live)
    tensor = version(3)[EMBED]
    weights.write(EMBED, tensor)
    content = contents_of(table, {EMBED: Content.plain(meta_of[EMBED], fingerprint(tensor))})
    announced = book.digests_after(content)
    assert book.digests == Digests(live, live)
    book.note(content)
    assert book.digests == announced
    assert announced.held == digest((meta, fingerprint(weights.read(name))) for name, meta in meta_of.items())
    assert announced.held != live


def test_the_book_keeps_what_was_sent_where_memory_holds_what_came_of_it() -> None:
    weights = FakeWeights(seed=1)
    metas, live = weights.metas(), live_fingerprints(weights)
    table = TensorTable(metas)
    book = ContentBook(table)
    scale = TensorMeta(f"{EMBED}_scale_inv", torch.float32, (1, 1))
    other = expert_name(1, "up_proj")
    sent_as = {EMBED: Content(((metas[EMBED], 5), (scale, 6)), live[EMBED]), other: Content.plain(metas[other], 7)}
    book.note(contents_of(table, sent_as))
    book.note_live(live)
    sent = {(meta, live[name]) for name, meta in metas.items()} - {(metas[EMBED], live[EMBED])}
    assert book.digests.sent == digest({*sent, (metas[EMBED], 5), (scale, 6)}), "what memory no longer holds is dropped"
    assert book.digests.held == digest((meta, live[name]) for name, meta in metas.items())


# --- derived tensors and tensors that are not written (B2) ------------------------------------------------------------


class FrozenDerived(FakeWeights):
    """Wrong: tensors that are computed from weights are computed only once."""

    def recompute_derived(self) -> None:
        if not bool(self.derived_norm_sum):
            super().recompute_derived()


def test_41_sglang_29916_and_42_sglang_31937_derived_tensors_follow_every_path() -> None:
    """The paths are refreshes in the plain and the fused form, a commit that is taken back, and a reset."""

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


# --- many parts together ----------------------------------------------------------------------------------------------

Stated = list[tuple[TensorMeta, Part]]


def random_parts(seed: int) -> Stated:
    """Return parts of random tensors: all of it, rows, columns, and shares of sections of rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parts = []
    for number in range(rng.randint(0, 30)):
        shape = tuple(rng.choice([0, 1, 8, 60, 296]) for _ in range(rng.randint(0, 3)))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float8_e4m3fn])
        whole = torch.randn(shape, generator=generator).to(dtype)
        region = None
        if shape and rng.random() < 0.7:
            dim = rng.randrange(len(shape))
            start = rng.randint(0, shape[dim])
            region = Region(dim, start, rng.randint(0, shape[dim] - start))
            if shape[dim] in (8, 296) and rng.random() < 0.5:
                half = shape[dim] // 2
                region = Region(dim, half, half, (half, half // 2, half // 2))
        parts.append(
            (TensorMeta(f"w{number}", dtype, shape), Part(region, whole if region is None else region.of(whole)))
        )
    return parts


def together_is_as_one_by_one() -> None:
    for seed in range(150):
        parts = random_parts(seed)
        assert rank_parts.shares_of(parts) == [rank_parts.share_of(meta, part) for meta, part in parts]


def test_shares_of_many_parts_are_those_of_each() -> None:
    together_is_as_one_by_one()


def test_shares_of_rows_at_the_start_of_their_tensors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong variant: all rows are taken for the first ones."""
    monkeypatch.setattr(rank_parts, "fingerprints_of", lambda some: fingerprints_of((it, dt, 0) for it, dt, _ in some))
    with pytest.raises(AssertionError):
        together_is_as_one_by_one()


class Operators(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_for_a_tensor() -> float:
    """Return how many operators run for each of many small tensors while all are read."""
    generator = torch.Generator().manual_seed(1)
    weights = NamedWeights({f"w{number}": TensorMeta(f"w{number}", torch.float32, (8, 300)) for number in range(500)})
    for tensor in weights.tensors.values():
        tensor.normal_(generator=generator)
    with Operators() as operators:
        found = live_fingerprints(weights)
    assert found == {name: fingerprint(tensor) for name, tensor in weights.tensors.items()}
    return operators.count / len(found)


def test_many_tensors_are_read_by_few_calls_d5() -> None:
    """D5: 135 us a place, and on a GPU a launch and a wait for it."""
    assert calls_for_a_tensor() < 6


@pytest.mark.parametrize("batch_bytes", [1, 100])
def test_tensors_are_read_in_batches(monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(checker, "_BATCH_BYTES", batch_bytes)
    weights = FakeWeights(seed=1)
    snapshot = take_snapshot(weights, keep_content=True)
    rewrite(weights, seed=2, leave_out=NORM)
    assert {one.name for one in compare(weights, snapshot)} == weights.metas().keys() - {NORM}


def test_tensors_that_are_read_one_by_one_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "shares_of", lambda some: [rank_parts.share_of(*each) for each in some])
    assert calls_for_a_tensor() > 12
