"""Shards of trainer ranks: what they are sent as, who sends them, and what is refused before anything is sent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.logical_weights_fake import DOWN, EMBED, GATE_UP, NORM, D, E, I, expert_name, fused, version
from tests.troubleshooting import require_entry
from tests.unit.weight_sync.test_boxes import random_boxes
from tests.weight_engine_process import Engine
from tests.weight_group_helpers import TIMEOUT_S, broadcast, content_of, in_background, join
from weight_sync.boxes import index_of
from weight_sync.errors import TransactionStateError, WeightRequestError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.sender import Shard, ShardSender
from weight_sync.sender.shard import assigned, decoded, encoded, parts_of
from weight_sync.tensor_meta import TensorMeta, dtype_name

W = TensorMeta("w", torch.float32, (4, 6))
UPPER, LOWER = ((0, 2), (0, 6)), ((2, 4), (0, 6))


def box_of(box: tuple[tuple[int, int], ...]) -> TensorMeta:
    return W._replace(box=box)


def shards_of(tensors: dict[str, torch.Tensor], seed: int, cuts: int) -> list[Shard]:
    """Cut tensors into boxes; every other shard is no dense one."""
    rng, found = random.Random(seed), []
    for name, tensor in tensors.items():
        for number, box in enumerate(random_boxes(tensor.shape, rng, cuts)):
            content = tensor[index_of(box)]
            found.append(Shard(name, tuple(tensor.shape), box, content if number % 2 else content.clone()))
    return found


# --- who sends what ----------------------------------------------------------------------------------------------


def test_of_equal_boxes_one_is_sent_by_turns_of_bytes() -> None:
    other = TensorMeta("v", torch.float32, (4, 6))
    held = [[W, other], [W, other], [W]]
    metas, sent = assigned(held)
    assert metas == [W, other] and sent == [[0], [1], []]


def test_boxes_of_several_ranks_make_up_a_tensor() -> None:
    assert assigned([[box_of(UPPER)], [box_of(LOWER), box_of(UPPER)]]).sent == [[0], [0]]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            [[box_of(UPPER)], [box_of(((1, 4), (0, 6)))]],
            r"\[0:2, 0:6\] of trainer rank 0 and \[1:4, 0:6\] of trainer",
        ),
        ([[W], [box_of(LOWER)]], "of trainer rank 0 and .* of trainer rank 1 overlap"),
        ([[box_of(UPPER)], [box_of(((2, 4), (0, 5)))]], r"no trainer rank has \[2:4, 5:6\] of \[4, 6\]"),
        ([[box_of(UPPER)], []], r"no trainer rank has \[2:4, 0:6\]"),
        ([[box_of(UPPER)], [box_of(LOWER)._replace(dtype=torch.float64)]], "float32 .* and float64 .* on rank 1"),
        (
            [[box_of(UPPER)], [box_of(LOWER)._replace(shape=(4, 7))]],
            r"\[4, 6\] on one .* and float32 \[4, 7\] on",
        ),
    ],
)
def test_shards_that_do_not_make_up_their_tensors_are_refused(held: list[list[TensorMeta]], said: str) -> None:
    with pytest.raises(WeightRequestError, match=said):
        assigned(held)


def test_metas_come_back_as_they_were() -> None:
    metas = [W, box_of(UPPER), TensorMeta("s", torch.bfloat16, ())]
    assert decoded(encoded(metas)) == metas and decoded(encoded([])) == []


# --- what is sent ------------------------------------------------------------------------------------------------


def test_fused_shards_are_sent_as_their_experts_parts() -> None:
    """Send the first columns of experts 1 and 2: each expert's gate and up rows are boxes of their own."""
    shape, box = (E, 2 * I, D), ((1, 3), (0, 2 * I), (0, 2))
    parts = parts_of([Shard(GATE_UP, shape, box, torch.zeros(2, 2 * I, 2))], torch.bfloat16)
    assert [part.meta for part in parts] == [
        TensorMeta(expert_name(expert, projection), torch.bfloat16, (I, D), ((0, I), (0, 2)))
        for expert in (1, 2)
        for projection in ("gate_proj", "up_proj")
    ]


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ([Shard("w", (4, 6), UPPER, torch.zeros(3, 6))], r"shape \[3, 6\], but its box \[0:2, 0:6\] is \[2, 6\]"),
        ([Shard("w", (4, 6), ((3, 5), (0, 6)), torch.zeros(2, 6))], r"\[3:5, 0:6\] is not a box inside of \[4, 6\]"),
        ([Shard("w", (4, 6), UPPER, torch.zeros(2, 6))] * 2, "w is given twice"),
        ([Shard("w", (4, 6), None, torch.zeros(4, 5))], r"shape \[4, 5\], but its box"),
    ],
)
def test_a_shard_that_is_not_its_box_is_refused(shards: list[Shard], said: str) -> None:
    with pytest.raises(WeightRequestError, match=said):
        parts_of(shards, None)


# --- to an engine ------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(10.0)
    yield engine
    engine.close()


@pytest.fixture
def sender(engine: Engine) -> Iterator[ShardSender]:
    sender = ShardSender(engine, timeout_s=10.0)
    sender.connect()
    yield sender
    sender.close()


@pytest.mark.parametrize("form", [dict, fused])
def test_one_process_sends_all_shards(engine: Engine, sender: ShardSender, form: type) -> None:
    for seed in (1, 2):
        tensors = version(seed)
        report = sender.refresh_shards(shards_of(form(tensors), 3, 4), str(seed), bucket_bytes=64)
        assert engine.call("content") == content_of(seed)
        assert report.fingerprints == {name: fingerprint_hex(fingerprint(each)) for name, each in tensors.items()}
        assert report.digest == engine.call("content_digest") and report.num_buckets > 3


def test_shards_are_cast_on_their_way(engine: Engine, sender: ShardSender) -> None:
    tensors = {name: each.float() for name, each in version(1).items()}
    norm = Shard(NORM, (D,), None, tensors.pop(NORM))
    sender.refresh_shards(shards_of(tensors, 5, 2), "1", dtype=torch.bfloat16, coverage="partial")
    sender.refresh_shards([norm], "1", coverage="partial")
    assert engine.call("content") == content_of(1)


def test_a_plan_is_made_once_for_shards_of_one_form(engine: Engine, sender: ShardSender) -> None:
    shards = shards_of(fused(version(1)), 3, 4)
    sender.refresh_shards(shards, "1")
    first = sender._kept
    sender.refresh_shards([shard._replace(tensor=shard.tensor.clone()) for shard in shards_of(fused(version(2)), 3, 4)])
    assert sender._kept is not first  # no shard is a part of a larger tensor any more
    second = sender._kept
    dense = [shard._replace(tensor=shard.tensor.clone()) for shard in shards_of(fused(version(3)), 3, 4)]
    sender.refresh_shards(dense)
    assert sender._kept is second
    assert engine.call("content") == content_of(3)


def test_a_gap_is_refused_before_the_engine_hears_of_it(engine: Engine, sender: ShardSender) -> None:
    shards = [shard for shard in shards_of(fused(version(1)), 3, 4) if shard.name != DOWN or shard.box[0][0] == 0]
    with pytest.raises(WeightRequestError, match="no trainer rank has"):
        sender.refresh_shards(shards, "1")
    assert engine.call("status")["last_failure"] is None
    sender.refresh_shards(shards_of(fused(version(1)), 3, 4), "1")


def test_what_is_left_of_a_shared_group_joins_again_at_the_next_refresh(engine: Engine) -> None:
    other = Engine(10.0)
    sender = ShardSender({"a": engine, "b": other}, timeout_s=10.0)
    sender.connect(shared=True)
    group = sender._links["a"].require_group()
    group.leave_failed()
    assert sender.connected == ["a", "b"]
    sender.refresh_shards(shards_of(fused(version(1)), 3, 4), "1")
    assert engine.call("content") == other.call("content") == content_of(1)
    assert sender._links["a"].group is sender._links["b"].group is not group
    sender.close()
    other.close()


def test_several_trainer_ranks_share_no_group_of_engines(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone does.  `tests/shard_trainer.py` has real ranks be refused."""
    sender = ShardSender({"a": engine}, timeout_s=10.0)
    with monkeypatch.context() as several:
        several.setattr(sender, "_ranks", lambda: SimpleNamespace(rank=1, world_size=2))
        with pytest.raises(
            WeightRequestError, match="several trainer ranks come in any order: leave out shared"
        ) as refused:
            sender.connect(shared=True)
    require_entry(str(refused.value))
    assert not sender.connected
    sender.connect(shared=True)
    assert sender.connected == ["a"]
    sender.close()


def test_a_sender_that_is_not_connected_is_refused() -> None:
    with pytest.raises(TransactionStateError, match="not connected"):
        ShardSender({}).refresh_shards([Shard(EMBED, (1, 1), None, torch.zeros(1, 1))])


# --- senders that do what `ShardSender` would not --------------------------------------------------------------------


@pytest.mark.parametrize("change", [-1, 1])
def test_a_message_of_another_size_than_its_box_is_refused(engine: Engine, change: int) -> None:
    """A row too few or too many: the box tells the number of bytes, not the full shape."""
    group, embed = join(engine), version(1)[EMBED]
    engine.begin_weight_update(update_id="u", coverage="partial")
    told = in_background(
        lambda: engine.update_weights_from_distributed(
            names=[EMBED],
            dtypes=["bfloat16"],
            shapes=[list(embed.shape)],
            boxes=[[[0, 3], [0, D]]],
            group_name=group.name,
            load_format="flattened_bucket",
            update_id="u",
        )
    )
    broadcast(group, embed[: 3 + change].contiguous().view(-1).view(torch.uint8))
    error = told(TIMEOUT_S)
    assert ("shorter" if change < 0 else "longer") in str(error)
    engine.settle()
    group.destroy()
    assert engine.call("content") == content_of(0)


def test_two_senders_in_groups_of_their_own_make_up_one_update(engine: Engine) -> None:
    """Neither of them knows the other: they share the id of the update alone."""
    tensors = version(1)
    engine.begin_weight_update(update_id="u", weight_version="1", coverage="full")
    for number in (0, 1):
        shards = [shard for at, shard in enumerate(shards_of(tensors, 3, 4)) if at % 2 == number]
        shards.sort(key=lambda shard: -shard.tensor.itemsize)  # so that each lies well
        group = join(engine)
        told = in_background(lambda: send_all(engine, group.name, shards))  # noqa: B023
        broadcast(group, torch.cat([shard.tensor.contiguous().view(-1).view(torch.uint8) for shard in shards]))
        assert told(TIMEOUT_S) is None
        group.destroy()
    engine.end_weight_update(update_id="u")
    assert engine.call("content") == content_of(1)


def send_all(engine: Engine, group_name: str, shards: list[Shard]) -> None:
    engine.update_weights_from_distributed(
        names=[shard.name for shard in shards],
        dtypes=[dtype_name(shard.tensor.dtype) for shard in shards],
        shapes=[list(shard.full_shape) for shard in shards],
        boxes=[shard.box for shard in shards],
        group_name=group_name,
        load_format="flattened_bucket",
        update_id="u",
    )
