"""Updates in which each rank of an engine is sent what it keeps: bits, bytes, and wrong senders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb.expert_location import ExpertLocationMetadata
from rollout.control import rank_consensus
from rollout.control.rank_consensus import PeerRankError
from rollout.distributed.communicator import RankLostError
from rollout.distributed.parallel import Parallel
from tests.kernels import native_ops
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_engine import RankEngine
from tests.rank_updates import RankUpdater, Sent, metas_of, own, part_of
from tests.ranks import run_ranks
from tests.unit.weight_sync.test_parallel_weights import MOVED, REDUNDANT, Sizes, layout_of
from weight_sync.errors import CoverageError, WeightSyncError
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import TensorMeta

TP2, EP2, EP2_TP2, DP2_EP2, EP4 = (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 2, 2), (4, 1, 4)
Meddle = Callable[[list[Sent], int], Sent]
"""A wrong sender: what it sends to a rank, from what it should send to each."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("weights")
    return (
        tiny_checkpoint(base / "old", "moe_dense_first", 1),
        tiny_checkpoint(base / "new", "moe_dense_first", 2),
    )


def version(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.float32) for name, tensor in logical_tensors(folder).items()}


def engine(
    folder: Path, parallel: Parallel, where: ExpertLocationMetadata = REDUNDANT, packed: bool = False
) -> RankEngine:
    return RankEngine(folder, parallel, metadata=where, dtype=torch.float32, ops=native_ops() if packed else None)


def bytes_of(sent: Sent) -> int:
    return sum(meta.nbytes for meta, _ in sent)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("sizes", [TP2, EP2, EP2_TP2, DP2_EP2, EP4], ids=["tp2", "ep2", "ep2_tp2", "dp2_ep2", "ep4"])
def test_each_rank_is_sent_what_it_keeps(folders: tuple[Path, Path], sizes: Sizes, packed: bool) -> None:
    """The same bits as a whole broadcast leaves, the same digest, and as many bytes as the places of a rank hold."""
    new = version(folders[1])

    def work(parallel: Parallel) -> tuple[bool, str | None, int, int]:
        rank = RankUpdater(parallel, engine(folders[0], parallel, packed=packed))
        sent = own(rank.stated(new), rank.rank, new)
        for _ in range(2):  # the second one replays the plans
            rank.begin(new)
            rank.receive(sent)
            rank.end()
        weights = rank.engine.model.weights
        kept = sum(places[0].num_bytes for name in new if (places := weights.places(name)))
        assert rank.updater.update is None and len(rank.updater.book.ended) == 0
        return rank.holds(new), rank.updater.model.content.digests.sent, bytes_of(sent), kept

    found = run_ranks(layout_of(sizes), work)
    assert all(right for right, _, _, _ in found)
    assert len({digest for _, digest, _, _ in found}) == 1 and found[0][1] is not None
    whole = sum(tensor.nbytes for tensor in new.values())
    print(sizes, packed, [sent for _, _, sent, _ in found], "of", whole)
    for _, _, sent, kept in found:
        assert sent == kept < whole


@pytest.mark.parametrize("is_able", [True, False])
@pytest.mark.parametrize("staging", ["host", "journal", "in_place"])
def test_only_a_device_without_a_kernel_takes_whole_tensors(
    folders: tuple[Path, Path], staging: StagingMode, is_able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = version(folders[1])
    for module in ("staging", "per_rank"):
        monkeypatch.setattr(f"weight_sync.{module}.takes_spans", lambda homes: is_able)

    def work(parallel: Parallel) -> bool:
        rank = RankUpdater(parallel, engine(folders[0], parallel), staging)
        sent = own(rank.stated(new), rank.rank, new)
        assert any(meta.box for meta, _ in sent) == is_able and len(sent) < len(new)
        rank.begin(new)
        rank.receive(sent)
        rank.end()
        return rank.holds(new)

    assert all(run_ranks(layout_of(EP2), work))


def test_a_box_for_one_rank_alone_holds_the_steps_of_both(folders: tuple[Path, Path]) -> None:
    """One rank was sent nothing, and the other a part of a tensor: no tensor counts as received on either."""
    new = version(folders[1])

    def work(parallel: Parallel) -> tuple[bool, int, bool, bool]:
        rank = RankUpdater(parallel, engine(folders[0], parallel), "in_place")
        boxes = [item for item in own(rank.stated(new), rank.rank, new) if item[0].box]
        rank.begin(new)
        before = rank.updater.is_dirty
        rank.receive(boxes[:1] if rank.rank == 1 else [])
        assert rank.updater.update is not None
        is_dirty = rank.updater.is_dirty
        is_written = rank.updater.update.transaction.dirty
        rank.verb(rank.updater.abort)
        assert not rank.updater.is_dirty and (rank.updater.torn is not None) == is_written
        return before, rank.rank, is_dirty, is_written

    assert run_ranks(layout_of(TP2), work) == [(False, 0, True, False), (False, 1, True, True)]


def test_a_rebalance_in_between_makes_other_parts(folders: tuple[Path, Path]) -> None:
    """Parts of the map before are refused, parts of the map in force are taken."""
    old, new = version(folders[0]), version(folders[1])

    def work(parallel: Parallel) -> tuple[bool, bool, str]:
        rank = RankUpdater(parallel, engine(folders[0], parallel))
        stale = own(rank.stated(new), rank.rank, new)
        rank.engine.placement.adopt(MOVED)
        for name, tensor in old.items():
            rank.engine.model.weights.write(name, tensor)
        rank.begin(new)
        with pytest.raises(WeightSyncError) as error:
            rank.receive(stale)
            rank.end()
        kept_old = rank.holds(old)
        if rank.updater.is_open:
            rank.updater.abort()
        rank.begin(new)
        rank.receive(own(rank.stated(new), rank.rank, new))
        rank.end()
        return kept_old, rank.holds(new), str(error.value)

    found = run_ranks(layout_of(EP2), work)
    assert all(kept_old and right for kept_old, right, _ in found)
    assert any("missing" in said for _, _, said in found)


# --- wrong senders ---------------------------------------------------------------------------------------------------


def _boxed(sent: Sent) -> int:
    return next(at for at, (meta, _) in enumerate(sent) if meta.box is not None and "proj" in meta.name)


def neighbours_box(sent: list[Sent], rank: int) -> Sent:
    """Send rank 1 rank 0's box of one tensor."""
    at = _boxed(sent[1])
    return sent[0] if rank == 0 else [*sent[1][:at], sent[0][at], *sent[1][at + 1 :]]


def neighbours_content(sent: list[Sent], rank: int) -> Sent:
    """Rank 1 is sent rank 0's content of one tensor as its own box."""
    at = _boxed(sent[1])
    return sent[0] if rank == 0 else [*sent[1][:at], (sent[1][at][0], sent[0][at][1]), *sent[1][at + 1 :]]


def no_box(sent: list[Sent], rank: int) -> Sent:
    at = _boxed(sent[1])
    return sent[0] if rank == 0 else [*sent[1][:at], *sent[1][at + 1 :]]


def half_a_box(sent: list[Sent], rank: int) -> Sent:
    """Rank 1 is sent a half of its box."""
    at = _boxed(sent[1])
    (meta, content), mine = sent[1][at], list(sent[1])
    (start, stop), *rest = meta.box or ()
    middle = (start + stop) // 2
    mine[at] = (meta._replace(box=((start, middle), *rest)), content[: middle - start].contiguous())
    return sent[0] if rank == 0 else mine


def one_bit(sent: list[Sent], rank: int) -> Sent:
    """Change one value of a box of rank 1."""
    at = _boxed(sent[1])
    meta, content = sent[1][at]
    wrong = content.clone()
    wrong.view(-1)[-1] *= -1
    return sent[0] if rank == 0 else [*sent[1][:at], (meta, wrong), *sent[1][at + 1 :]]


def another_norm(sent: list[Sent], rank: int) -> Sent:
    """Rank 1 is sent another norm than rank 0."""
    return [
        (meta, content * (1 + rank) if meta.name == "model.norm.weight" else content) for meta, content in sent[rank]
    ]


def whole_on_one(sent: list[Sent], rank: int) -> Sent:
    """Rank 1 is sent all of a tensor of which rank 0 is sent its box."""
    at = _boxed(sent[1])
    meta = sent[1][at][0]
    if rank == 0:
        return sent[0]
    whole = torch.zeros(meta.shape)
    return [*sent[1][:at], (TensorMeta(meta.name, meta.dtype, meta.shape), whole), *sent[1][at + 1 :]]


@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        (neighbours_box, "which it does not keep"),
        (neighbours_content, "fingerprint"),
        (no_box, "missing"),
        (half_a_box, "came in part"),
        (one_bit, "fingerprint"),
        (another_norm, "fingerprint"),
        (whole_on_one, "fingerprint"),
    ],
)
def test_a_wrong_sender_is_refused_on_all_ranks(folders: tuple[Path, Path], meddle: Meddle, said: str) -> None:
    old, new = version(folders[0]), version(folders[1])

    def work(parallel: Parallel) -> tuple[str, bool, bool]:
        rank = RankUpdater(parallel, engine(folders[0], parallel))
        stated = rank.stated(new)
        rank.begin(new)
        with pytest.raises(WeightSyncError if rank.rank else Exception) as error:
            rank.receive(meddle([own(stated, each, new) for each in range(2)], rank.rank))
            rank.end()
        failed = rank.updater.update is None or rank.updater.update.transaction.failure is not None
        return str(error.value), failed, rank.holds(old)

    found = run_ranks(layout_of(TP2), work)
    assert all(failed and right for _, failed, right in found)
    assert said in found[1][0]


POINTS = {"write_spans": "a bucket", "ledger": "before ranks compare", "prepare": "after they compared"}
"""Parts of a transaction that fail on one rank, and when that is."""


def refusal_of_one(folders: tuple[Path, Path], point: str) -> list[str]:
    """Refresh two ranks, of which the second one fails at a point; return the error of each."""
    new = version(folders[1])

    def refuse(*_: object) -> None:
        raise MemoryError("no memory")

    def work(parallel: Parallel) -> str:
        rank = RankUpdater(parallel, engine(folders[0], parallel))
        sent = own(rank.stated(new), rank.rank, new)
        rank.begin(new)
        assert rank.updater.update is not None
        transaction: Any = rank.updater.update.transaction
        owner, name = (transaction._ledger, "settle") if point == "ledger" else (transaction._staging, point)
        if rank.rank == 1:
            setattr(owner, name, refuse)
        with pytest.raises((MemoryError, PeerRankError, WeightSyncError)) as error:
            rank.receive(sent)
            rank.end()
        return str(error.value)

    return run_ranks(layout_of(TP2), work)


@pytest.mark.parametrize("point", POINTS)
def test_the_caller_gets_the_reason_of_the_rank_that_refuses(folders: tuple[Path, Path], point: str) -> None:
    """Rank 0 answers the caller, and could go on itself."""
    assert refusal_of_one(folders, point) == ["rank 1: no memory", "no memory"]


@pytest.mark.mutant
def test_a_lost_vote_without_its_reason_is_noticed(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_consensus, "LostVoteError", RankLostError)
    assert refusal_of_one(folders, "prepare")[0] == "another rank could not verify the weight update"


def test_a_tensor_that_one_copy_lacks_is_missing_without_a_manifest(folders: tuple[Path, Path]) -> None:
    """Nothing states what comes: rank 1 is sent no norm, which rank 0 is sent."""
    new = version(folders[1])

    def work(parallel: Parallel) -> None:
        rank = RankUpdater(parallel, engine(folders[0], parallel))
        sent = own(rank.stated(new), rank.rank, new)
        rank.verb(lambda: rank.updater.begin("v1", "partial", per_rank=True))
        rank.receive([item for item in sent if rank.rank == 0 or item[0].name != "model.norm.weight"])
        with pytest.raises(CoverageError, match=r"not on all: model\.norm\.weight"):
            rank.end()

    run_ranks(layout_of(TP2), work)


@pytest.mark.parametrize("per_rank", [True, False])
def test_a_bucket_of_the_other_form_is_refused(folders: tuple[Path, Path], per_rank: bool) -> None:
    new = version(folders[1])

    def work(parallel: Parallel) -> None:
        rank = RankUpdater(parallel, engine(folders[0], parallel))
        rank.begin(new, per_rank)
        with pytest.raises(WeightSyncError, match="tensors_per_rank" if per_rank else "was not begun with per_rank"):
            rank.receive([part_of(metas_of(new)[0], None, next(iter(new.values())))], is_per_rank=not per_rank)
        rank.updater.abort()

    run_ranks(layout_of(TP2), work)
