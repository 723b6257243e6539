"""Snapshot, comparison, NaN fill and the digest that is known without reading, on a small model."""

from __future__ import annotations

import pytest
import torch

from tests.logical_weights_fake import EMBED, NORM, FakeWeights, expert_name, version
from weight_sync.checker import compare, live_fingerprints, reset_tensors, resettable, take_snapshot
from weight_sync.errors import UnknownTensorError, WeightRequestError
from weight_sync.fingerprint import ContentBook, digest, fingerprint
from weight_sync.tensor_meta import TensorMeta


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
    """Why the reset is there: the same content hides what was not written."""
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
    book = ContentBook(weights.metas())
    assert book.digest is None
    rewrite(weights, seed=2)
    book.note({EMBED: fingerprint(weights.read(EMBED))})
    assert book.digest is None
    book.note(live_fingerprints(weights))
    assert book.digest == digest((meta, fingerprint(weights.read(name))) for name, meta in weights.metas().items())
    before = book.digest
    tensor = version(3)[EMBED]
    weights.write(EMBED, tensor)
    announced = book.digest_after({EMBED: fingerprint(tensor)})
    assert book.digest == before
    book.note({EMBED: fingerprint(tensor)})
    assert book.digest == announced
    assert book.digest == digest((meta, fingerprint(weights.read(name))) for name, meta in weights.metas().items())
    assert book.digest != before
