"""Boxes of tensors on their way into an engine: put together to what the whole tensors would be, or refused."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from tests.logical_weights_fake import DOWN, EMBED, GATE_UP, LM_HEAD, NORM, E, FakeWeights, expert_name, fused, version
from tests.loopback_updater import LoopbackSource, LoopbackUpdater, new_updater
from weight_sync import plan as plan_module
from weight_sync.boxes import Box, first_gap, index_of, overlapping, parse_box, size_of, whole_box
from weight_sync.errors import (
    CommitError,
    ContentError,
    CoverageError,
    DtypeMismatchError,
    StagingError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import combine, fingerprint, fingerprint_slice
from weight_sync.held_format import INT8_BLOCKS
from weight_sync.in_model import InPlaceStaging
from weight_sync.int8_blocks import held_values
from weight_sync.plan import BucketPlan
from weight_sync.shadow import ShadowStaging
from weight_sync.tensor_meta import Piece, TensorMeta, parse_metas
from weight_sync.unnamed_file import UnnamedFile

Part = tuple[TensorMeta, torch.Tensor]
HALF = ((0, 3), (0, 4))
"""The upper half of the embedding, which is [6, 4]."""


def random_boxes(shape: Sequence[int], rng: random.Random, cuts: int) -> list[Box]:
    """Cut a tensor into boxes, one after the other in any dimension."""
    boxes = [whole_box(shape)]
    for _ in range(cuts):
        box = boxes.pop(rng.randrange(len(boxes)))
        long = [dim for dim, size in enumerate(size_of(box)) if size > 1]
        if not long:
            boxes.append(box)
            continue
        dim = rng.choice(long)
        at = rng.randrange(box[dim][0] + 1, box[dim][1])
        for edge in ((box[dim][0], at), (at, box[dim][1])):
            boxes.append((*box[:dim], edge, *box[dim + 1 :]))
    return boxes


def part(name: str, tensor: torch.Tensor, box: Box | None) -> Part:
    content = tensor if box is None else tensor[index_of(box)]
    shape = tuple(tensor.shape)
    return TensorMeta(name, tensor.dtype, shape, None if box == whole_box(shape) else box), content.contiguous()


def cut_up(tensors: dict[str, torch.Tensor], rng: random.Random, cuts: int) -> list[Part]:
    return [
        part(name, tensor, box) for name, tensor in tensors.items() for box in random_boxes(tensor.shape, rng, cuts)
    ]


def send(updater: LoopbackUpdater, parts: Iterable[Part]) -> None:
    given = list(parts)
    named = [(meta.name, content) for meta, content in given]
    updater.receive(LoopbackSource(named, metas=[meta for meta, _ in given]))


def finish(updater: LoopbackUpdater) -> None:
    updater.verify()
    updater.commit()


def manifest(tensors: dict[str, torch.Tensor]) -> list[tuple[TensorMeta, int]]:
    return [(TensorMeta(name, each.dtype, tuple(each.shape)), fingerprint(each)) for name, each in tensors.items()]


def journal_updater(weights: FakeWeights) -> LoopbackUpdater:
    """Return an updater that writes each box into the model as it comes, once the old content is in a file."""
    return LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, staging="journal")


def in_place_updater(vote: Any = lambda mine: mine) -> LoopbackUpdater:
    made = {"device": "cpu", "timeout_s": 1.0, "vote": lambda mine: mine, "commit_vote": vote}
    return LoopbackUpdater(FakeWeights(), staging="in_place", **made)  # type: ignore[arg-type]


NEW = pytest.mark.parametrize("new", [new_updater, journal_updater])
EMBEDDING = version(1)[EMBED]


@pytest.mark.parametrize("form", [dict, fused])
@NEW
@pytest.mark.parametrize("cast", [False, True])
def test_boxes_leave_what_whole_tensors_leave(form: Any, new: Any, cast: bool) -> None:
    """Random boxes in random order over several calls, twice the same, with fingerprints of the whole tensors."""
    for seed in range(6):
        boxed, whole = FakeWeights(), FakeWeights()
        one, other = new(boxed), new_updater(whole)
        tensors = [version(label) for label in (1, 2, 3)]
        if cast:
            tensors = [{name: each.float() for name, each in some.items()} for some in tensors]
        for label, some in enumerate(tensors):
            rng = random.Random(seed)
            parts = cut_up(form(some), rng, cuts=1 + seed)
            rng.shuffle(parts)
            one.begin(str(label), manifest=manifest(some), cast=cast)
            for start in range(0, len(parts), 9):
                send(one, parts[start : start + 9])
            finish(one)
            other.begin(str(label), cast=cast)
            other.receive(LoopbackSource(list(form(some).items())))
            finish(other)
            assert boxed.snapshot() == whole.snapshot()
            assert one.model.content.digests == other.model.content.digests


class WideWeights(FakeWeights):
    """One tensor of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.zeros(3, 4, 5, 2)
        self._metas = {"wide": TensorMeta("wide", torch.float32, (3, 4, 5, 2))}

    def split(self, wire: TensorMeta) -> list[Any]:
        return [Piece("wide")]

    def _places(self, name: str) -> list[torch.Tensor]:
        return [self.wide] if name == "wide" else super()._places(name)


@NEW
def test_halves_of_a_pair_wait_until_they_are_whole(new: Any) -> None:
    """Blocks of FP8 are converted with their scales, which no box has all of."""
    pair = {EMBED: EMBEDDING.to(torch.float8_e4m3fn), f"{EMBED}_scale_inv": torch.full((1, 1), 0.5)}
    boxed, whole = FakeWeights(), FakeWeights()
    one, other = new(boxed), new_updater(whole)
    parts = [
        *cut_up({EMBED: pair[EMBED]}, random.Random(1), 3),
        part(f"{EMBED}_scale_inv", torch.full((1, 1), 0.5), None),
    ]
    for updater in (one, other):
        updater.begin("1", coverage="partial")
    send(one, parts[:2])
    assert one.status()["received"] == 0
    send(one, parts[2:])
    other.receive(LoopbackSource(list(pair.items())))
    for updater in (one, other):
        finish(updater)
    assert boxed.snapshot() == whole.snapshot() and boxed.snapshot() != FakeWeights().snapshot()
    assert one.model.content.digests == other.model.content.digests


def test_tensors_in_blocks_of_8_bits_wait_until_they_are_whole() -> None:
    weights = FakeWeights()
    updater = LoopbackUpdater(
        weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, quantised={EMBED: INT8_BLOCKS}
    )
    updater.begin("1", coverage="partial")
    columns = [part(EMBED, EMBEDDING, ((0, 6), (at, at + 2))) for at in (0, 2)]
    for each in columns:
        send(updater, [each])
    finish(updater)
    assert torch.equal(weights.embed, held_values(EMBEDDING))
    assert not torch.equal(weights.embed, EMBEDDING)


@pytest.mark.parametrize("cuts", [1, 3, 12])
def test_a_box_that_no_matrix_has_is_cut(cuts: int) -> None:
    for seed in range(20):
        weights = WideWeights()
        wide = torch.randn(3, 4, 5, 2, generator=torch.Generator().manual_seed(seed))
        updater = new_updater(weights)
        updater.begin("1", manifest=manifest({"wide": wide}))
        with mock.patch.object(ShadowStaging, "write", side_effect=AssertionError("it came by itself")):
            send(updater, cut_up({"wide": wide}, random.Random(seed), cuts))
        finish(updater)
        assert torch.equal(weights.wide, wide)


def test_experts_that_lie_in_a_box_are_whole_at_once() -> None:
    """A rank of expert parallelism sends a box of a fused tensor: its experts have come then."""
    updater = new_updater(FakeWeights())
    updater.begin("1", coverage="partial")
    gate_up = fused(version(1))[GATE_UP]
    send(updater, [part(GATE_UP, gate_up, ((1, 3), (0, 4), (0, 4)))])
    update = updater.update
    assert update is not None
    assert set(update.transaction.received) == {
        expert_name(expert, projection) for expert in (1, 2) for projection in ("gate_proj", "up_proj")
    }


def test_the_second_refresh_of_boxes_makes_no_plan() -> None:
    weights = FakeWeights()
    updater = new_updater(weights)
    with mock.patch.object(plan_module, "plan_bucket", wraps=plan_module.plan_bucket) as made:
        for seed in (1, 2, 3):
            updater.begin(str(seed))
            send(updater, cut_up(version(seed), random.Random(0), 3))
            finish(updater)
    assert made.call_count == 1


def test_status_counts_a_tensor_once_all_of_it_came() -> None:
    updater = new_updater(FakeWeights())
    updater.begin("1")
    embed = version(1)[EMBED]
    send(updater, [part(EMBED, embed, HALF)])
    assert updater.status()["received"] == 0 and EMBED in updater.status()["missing_names"]
    assert updater.staged(EMBED) is None
    send(updater, [part(EMBED, embed, ((3, 6), (0, 4)))])
    assert updater.status()["received"] == 1
    (staged,) = updater.staged(EMBED) or ()
    assert torch.equal(staged.content, embed)


# --- boxes that are written as they come ------------------------------------------------------------------------------


def end_boxes(end: str) -> LoopbackUpdater:
    """Send half of the embedding alone in place, check that steps are held, and end the update."""
    updater = in_place_updater(vote=lambda mine: end != "vote")
    before = updater.weights.snapshot()  # type: ignore[attr-defined]
    updater.begin("v1", "partial", lease_s=100.0)
    assert not updater.is_dirty
    send(updater, [part(EMBED, EMBEDDING, HALF)])
    assert updater.status()["received"] == 0 and updater.weights.snapshot() != before  # type: ignore[attr-defined]
    assert updater.is_dirty
    if end == "abort":
        updater.abort()
    elif end == "lost":
        assert updater.update is not None
        updater.update.lease.deadline = 0.0
        assert updater.expire()
    elif end == "refused":
        with pytest.raises(WeightSyncError):
            send(updater, [part("ghost", EMBEDDING, HALF)])
    elif end == "elsewhere":
        updater.fail("rank 1: the peer is gone")
    elif end == "gap":
        with pytest.raises(CoverageError):
            updater.verify()
    else:
        send(updater, [part(EMBED, EMBEDDING, ((3, 6), (0, 4)))])
        updater.verify()
        assert updater.is_dirty
        with pytest.raises(CommitError) as caught:
            updater.commit()
        assert not caught.value.restored and "the old weights were restored" not in str(caught.value)
    return updater


ENDS = ("abort", "lost", "refused", "elsewhere", "gap", "vote")


@pytest.mark.parametrize("end", ENDS)
def test_boxes_in_place_that_are_not_committed_leave_torn_weights(end: str) -> None:
    updater = end_boxes(end)
    assert updater.torn is not None and "could NOT be restored" in updater.torn and not updater.is_dirty


def test_a_box_that_is_refused_at_first_tears_nothing() -> None:
    updater = in_place_updater()
    before = updater.weights.snapshot()  # type: ignore[attr-defined]
    updater.begin("v1")
    with pytest.raises(ContentError):
        send(updater, [part(EMBED, torch.full_like(EMBEDDING, float("nan")), HALF)])
    assert updater.torn is None and updater.weights.snapshot() == before  # type: ignore[attr-defined]


def names_alone(self: Any, storages: Any, names: Sequence[str]) -> None:
    """Note a write if a whole tensor is written: wrong."""
    self._has_written |= bool(names)


@pytest.mark.mutant
@pytest.mark.parametrize("end", ENDS)
def test_a_staging_that_goes_by_whole_tensors_is_noticed(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InPlaceStaging, "_before", names_alone)
    monkeypatch.setattr(BucketPlan, "all_names", property(lambda self: self.names))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_boxes_in_place_that_are_not_committed_leave_torn_weights(end)


def test_a_full_disk_names_the_tensor_of_a_box() -> None:
    weights = FakeWeights()
    updater, before = journal_updater(weights), weights.snapshot()
    updater.begin("v1")
    full = mock.patch.object(UnnamedFile, "append", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(StagingError, match=f"the storage of {EMBED} .* cannot be written to the journal"):
        send(updater, [part(EMBED, EMBEDDING, HALF)])
    assert weights.snapshot() == before and updater.torn is None


# --- refusals ----------------------------------------------------------------------------------------------------


def refusal(new: Any, calls: Sequence[Sequence[Part]], coverage: str = "partial", **options: Any) -> WeightSyncError:
    """Return why boxes are refused, at the latest at the end; the weights are as they were."""
    weights = FakeWeights()
    before = weights.snapshot()
    updater = new(weights)
    with pytest.raises(WeightSyncError) as refused:
        updater.begin("1", coverage, **options)
        for parts in calls:
            send(updater, parts)
        updater.verify()
    if updater.is_open:
        updater.abort()
    assert weights.snapshot() == before
    return refused.value


@NEW
def test_boxes_that_overlap_are_refused(new: Any) -> None:
    for other in (HALF, ((2, 6), (0, 4)), ((2, 5), (1, 3))):
        error = refusal(new, [[part(EMBED, EMBEDDING, HALF)], [part(EMBED, EMBEDDING, other)]])
        assert isinstance(error, CoverageError)
        assert "overlap" in str(error) or "lacks" in str(error)


@NEW
def test_boxes_with_as_many_elements_as_the_tensor_are_refused_if_they_overlap(new: Any) -> None:
    """18 elements and 6 of them again are as many as the tensor has, and leave a gap: counts alone do not tell."""
    boxes = (HALF, ((2, 4), (0, 4)), ((5, 6), (0, 4)))
    error = refusal(new, [[part(EMBED, EMBEDDING, box)] for box in boxes])
    assert isinstance(error, CoverageError)
    assert str(error) == f"{EMBED}: the boxes [0:3, 0:4] and [2:4, 0:4] overlap"


def twice_whole() -> list[list[Part]]:
    """Return calls that bring expert 0 whole in one box of the fused tensor, and some of it, or all, in others."""
    sent = fused(version(1))[GATE_UP]
    expert, upper, lower = (part(GATE_UP, sent, ((0, 1), (0, 4), columns)) for columns in ((0, 4), (0, 2), (2, 4)))
    return [[expert, expert], [expert, upper], [upper, expert], [expert, upper, lower], [upper, lower, expert]]


@NEW
@pytest.mark.parametrize("separately", [False, True])
def test_experts_that_come_twice_are_refused(new: Any, separately: bool) -> None:
    """A box that has all of an expert is no box of that."""
    for call in twice_whole():
        calls = [[each] for each in call] if separately else [call]
        assert isinstance(refusal(new, calls), CoverageError)


def test_a_plan_that_takes_a_tensor_twice_is_noticed() -> None:
    """A wrong variant: boxes that are all of a tensor are not compared with the others."""
    call, *_ = twice_whole()
    with (
        mock.patch.object(plan_module._Rows, "require_apart", lambda self: None),
        pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"),
    ):
        refusal(new_updater, [call])


@NEW
@pytest.mark.parametrize("coverage", ["partial", "full"])
def test_a_gap_is_refused_with_the_box_that_is_missing(new: Any, coverage: str) -> None:
    boxes = (HALF, ((3, 5), (0, 4)), ((5, 6), (1, 4)))
    error = refusal(new, [[part(EMBED, EMBEDDING, box) for box in boxes]], coverage)
    assert isinstance(error, CoverageError)
    assert str(error) == f"1 tensors came in part: {EMBED} lacks [5:6, 0:1]"


@NEW
def test_a_tensor_comes_whole_or_in_boxes(new: Any) -> None:
    whole, half = part(EMBED, EMBEDDING, None), part(EMBED, EMBEDDING, HALF)
    for calls in ([[half], [whole]], [[whole], [half]], [[half, whole]], [[whole, half]]):
        assert isinstance(refusal(new, calls), CoverageError)


@NEW
def test_a_box_after_all_boxes_is_refused(new: Any) -> None:
    lower = part(EMBED, EMBEDDING, ((3, 6), (0, 4)))
    error = refusal(new, [[part(EMBED, EMBEDDING, HALF), lower], [lower]])
    assert "came" in str(error)


def test_boxes_under_two_names_are_refused() -> None:
    error = refusal(new_updater, [[part(EMBED, EMBEDDING, HALF)], [part(LM_HEAD, EMBEDDING, ((3, 6), (0, 4)))]])
    assert f"{EMBED}: its boxes come under two names, or in two dtypes; the last one as {LM_HEAD}" in str(error)


@NEW
def test_boxes_in_two_dtypes_are_refused(new: Any) -> None:
    lower = part(EMBED, EMBEDDING.float(), ((3, 6), (0, 4)))
    error = refusal(new, [[part(EMBED, EMBEDDING, HALF)], [lower]], cast=True)
    assert (isinstance(error, DtypeMismatchError | CoverageError) and "dtype" in str(error)) or "float32" in str(error)


@NEW
def test_one_wrong_element_in_one_box_is_refused(new: Any) -> None:
    """Shares of all boxes add up to the fingerprint that was stated, or the version is refused."""
    sent = fused(version(1))
    wrong = sent[DOWN].clone()
    wrong[E - 1, 2, 1] += 1
    parts = cut_up(sent | {DOWN: wrong}, random.Random(1), 4)
    error = refusal(new, [parts], "full", manifest=manifest(version(1)))
    assert isinstance(error, ContentError)
    assert expert_name(E - 1, "down_proj") in str(error) and "the manifest expects" in str(error)


@NEW
def test_a_value_that_is_not_finite_is_refused_in_a_box(new: Any) -> None:
    norm = version(1)[NORM].clone()
    norm[3] = torch.nan
    error = refusal(new, [[part(NORM, norm, ((0, 2),)), part(NORM, norm, ((2, 4),))]])
    assert f"values that are not finite in {NORM}" in str(error)


def test_shares_in_another_place_are_refused() -> None:
    """A wrong variant: the engine takes the share of a box as if it began the tensor."""
    real = plan_module._matrices

    def at_the_start(*arguments: Any) -> Any:
        return [(box, start, (*at[:4], 0, at[5], 0, at[7])) for box, start, at in real(*arguments) or ()]

    parts = [part(EMBED, EMBEDDING, HALF), part(EMBED, EMBEDDING, ((3, 6), (0, 4)))]
    with mock.patch.object(plan_module, "_matrices", at_the_start):
        error = refusal(new_updater, [parts], manifest=manifest({EMBED: EMBEDDING}))
    assert isinstance(error, WeightRequestError)


def test_a_plan_of_other_boxes_is_noticed() -> None:
    """A wrong variant: calls are known by names, dtypes and shapes alone, so that other boxes find the first plan."""
    weights, updater = FakeWeights(), None
    updater = new_updater(weights)
    whole = {name: each for name, each in version(1).items() if name == EMBED}
    rows = [part(EMBED, EMBEDDING, ((0, 3), (0, 4))), part(EMBED, EMBEDDING, ((3, 6), (0, 4)))]
    columns = [part(EMBED, EMBEDDING, ((0, 6), (0, 2))), part(EMBED, EMBEDDING, ((0, 6), (2, 4)))]
    updater.begin("1", manifest=manifest(whole), coverage="partial")
    send(updater, rows)
    finish(updater)
    updater.begin("2", manifest=manifest(whole), coverage="partial")
    stale = [(meta, content) for (meta, _), (_, content) in zip(rows, columns, strict=True)]
    with pytest.raises(ContentError, match="the manifest expects"):
        send(updater, [(meta, content.reshape(3, 4)) for meta, content in stale])


# --- geometry ----------------------------------------------------------------------------------------------------


def test_gaps_and_overlaps_are_found_in_any_boxes() -> None:
    """Compare with a count of each element."""
    for seed in range(300):
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
        boxes = random_boxes(shape, rng, rng.randint(0, 6))
        if rng.random() < 0.6:
            boxes.pop(rng.randrange(len(boxes)))
        if rng.random() < 0.4:
            boxes.append(tuple(sorted(rng.sample(range(size + 1), 2)) for size in shape))  # type: ignore[arg-type]
            boxes[-1] = tuple((start, stop) for start, stop in boxes[-1])
        count = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            count[index_of(box)] += 1
        gap = first_gap(shape, boxes)
        assert (gap is None) == bool((count > 0).all())
        assert gap is None or not count[index_of(gap)].any()
        assert (overlapping(boxes) is None) == bool((count <= 1).all())


def test_shares_of_boxes_add_up() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        whole = torch.randn(13, 7, 5, generator=torch.Generator().manual_seed(seed))
        boxes = random_boxes(whole.shape, rng, 7)
        shares = [fingerprint_slice(whole[index_of(box)], whole.shape, index_of(box)) for box in boxes]
        assert combine(*shares) == fingerprint(whole)


WRONG_BOXES = [
    [[0, 2]],
    [[0, 2], [0, 2], [0, 1]],
    [[0, 7], [0, 4]],
    [[-1, 2], [0, 4]],
    [[2, 2], [0, 4]],
    [[3, 2], [0, 4]],
    [[0, 2], [0, 2.0]],
    [[0, 2], [0, True]],
    [[0, 2], "02"],
    [[0, 2], [0]],
    [0, 2],
    "box",
    {},
]


@pytest.mark.parametrize("box", WRONG_BOXES, ids=str)
def test_a_wrong_box_is_refused(box: Any) -> None:
    with pytest.raises(WeightRequestError, match=r"^w: .*box"):
        parse_metas(["w"], ["float32"], [[6, 4]], [box])


def test_boxes_are_as_many_as_names() -> None:
    with pytest.raises(WeightRequestError, match="boxes and names must be equally long, got 1 and 2"):
        parse_metas(["v", "w"], ["float32"] * 2, [[6], [4]], [None])


def test_a_box_of_everything_is_none() -> None:
    assert parse_box("w", (6, 4), [[0, 6], [0, 4]]) is None
    assert parse_box("w", (), []) is None
    assert parse_box("w", (0, 4), [[0, 0], [0, 4]]) is None
    (meta,) = parse_metas(["w"], ["float32"], [[6, 4]], [[[1, 3], [0, 4]]])
    assert meta.sizes == (2, 4) and meta.nbytes == 32 and meta.shape == (6, 4)
    assert meta._replace(box=None).nbytes == 96
