"""A bucket that is received in pieces: the same tensors, faults in single pieces, and memory that is kept.

The group is one whose broadcasts arrive at once, as `PlayedGroup` of the fault matrix; gloo itself is met in the
integration tests of the sender.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.logical_weights_fake import FakeWeights, version
from weight_sync.bucket import cut_packed, cut_pieces, pack
from weight_sync.errors import ContentError, TransactionStateError, TransportError, WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.known_calls import KnownCalls, without_collections
from weight_sync.process_group import GroupHandle
from weight_sync.receivers import distributed
from weight_sync.receivers.base import BucketSource, Receiver, deliver
from weight_sync.receivers.distributed import PACKED, PIECES, DistributedSource
from weight_sync.tensor_meta import TensorMeta, dtype_name
from weight_sync.update_groups import WeightUpdateGroups
from weight_sync.updater import WeightUpdater
from weight_sync.waiting import Patience

PIECE = 64  # bytes: a few tensors of the small model
PACKED_BYTES = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "PIECE_BYTES", PIECE)


class Messages(GroupHandle):
    """Plays `messages`; None: the peer is gone.  `posted` counts the broadcasts that were joined."""

    def __init__(self, messages: list[torch.Tensor | None]) -> None:
        super().__init__("played", rank=1, world_size=2, backend="gloo", timeout_s=1.0, process_group=None)
        self.messages = messages
        self.posted = self.finished = 0
        self.ahead = 0

    def start_broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        message = self.messages[self.posted]
        self.posted += 1
        self.ahead = max(self.ahead, self.posted - self.finished)
        if message is None:
            self.broken = True
            raise TransportError("the peer is gone")
        tensor[: message.numel()].copy_(message)
        return None

    def finish(self, work: Any, deadline: float) -> None:
        self.finished += 1


def cut(tensors: dict[str, torch.Tensor], cutter: Any = cut_pieces) -> list[list[tuple[str, torch.Tensor]]]:
    named = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    return [
        [(meta.name, tensors[meta.name]) for meta in piece]
        for piece in cutter(metas, PACKED_BYTES if cutter is cut_packed else PIECE)
    ]


class OneGroup(WeightUpdateGroups):
    """A group that was joined already."""

    def __init__(self, group: GroupHandle) -> None:
        self._groups = {"g": group}

    def destroy(self, group_name: str) -> None:
        """Leave the group alone, which belongs to the test."""


def source_of(
    tensors: dict[str, torch.Tensor],
    group: GroupHandle,
    memory: Areas | None = None,
    whole: bool = False,
    **options: Any,
) -> DistributedSource:
    named = [item for piece in cut(tensors) for item in piece]
    lists = (
        [name for name, _ in named],
        [dtype_name(tensor.dtype) for _, tensor in named],
        [list(tensor.shape) for _, tensor in named],
        None,
    )
    receiver = Receiver(torch.device("cpu"), 5.0, OneGroup(group), Patience(), memory, whole, KnownCalls(1000))
    return DistributedSource(lambda: lists, "g", receiver, **({"load_format": PIECES} | options))


def messages_of(tensors: dict[str, torch.Tensor], cutter: Any = cut_pieces) -> list[torch.Tensor | None]:
    return [pack(piece) for piece in cut(tensors, cutter)]


def updater_of(weights: FakeWeights, mode: Any = "host") -> WeightUpdater:
    return WeightUpdater(weights, device="cpu", timeout_s=5.0, vote=lambda mine: mine, staging=mode)


@pytest.mark.parametrize("sizes", [[], [0], [5, 5], [64], [65], [30, 30, 30], [200, 1, 63, 1, 64]])
def test_pieces_keep_the_order_and_the_limit(sizes: list[int]) -> None:
    metas = [TensorMeta(f"t{i}", torch.uint8, (size,)) for i, size in enumerate(sizes)]
    pieces = cut_pieces(metas, PIECE)
    assert list(itertools.chain.from_iterable(pieces)) == metas
    assert all(len(piece) == 1 or sum(meta.nbytes for meta in piece) <= PIECE for piece in pieces)
    for one, other in itertools.pairwise(pieces):
        size = sum(meta.nbytes for meta in one)
        run = next(itertools.groupby(metas[metas.index(other[0]) :], lambda meta: meta.shape))[1]
        is_long_run = one[-1].shape != other[0].shape and 4 * sum(meta.nbytes for meta in run) >= PIECE
        assert size + other[0].nbytes > PIECE or (is_long_run and 4 * size >= PIECE)


def test_a_piece_ends_where_a_long_run_of_another_shape_begins() -> None:
    """A piece that has hardly begun goes on, and so does one before short runs: small tensors stay together."""
    wide, tall = (8, 2), (2, 8)
    shapes = [(3,), (2,), wide, wide, tall, tall, tall, tall, tall, (1,), (5,), wide]
    metas = [TensorMeta(f"t{i}", torch.uint8, shape) for i, shape in enumerate(shapes)]
    found = [[meta.shape for meta in piece] for piece in cut_pieces(metas, 64)]
    assert found == [[(3,), (2,), wide, wide], [tall] * 4, [tall, (1,), (5,)], [wide]]


def test_layers_of_many_small_tensors_fill_their_pieces() -> None:
    """A run of each layer fills an eighth of a piece, and ends none."""
    shapes = [(8,), (3,)] * 16
    metas = [TensorMeta(f"t{i}", torch.uint8, shape) for i, shape in enumerate(shapes)]
    sizes = [sum(meta.nbytes for meta in piece) for piece in cut_pieces(metas, 64)]
    assert len(sizes) == 3 and min(sizes[:-1]) > 64 - 8


@pytest.mark.parametrize("mode", ["host", "device", "journal", "in_place"])
@pytest.mark.parametrize(("form", "cutter"), [(PIECES, cut_pieces), (PACKED, cut_packed)])
def test_a_refresh_in_pieces(mode: str, form: str, cutter: Any) -> None:
    weights, sent = FakeWeights(0), version(1)
    group = Messages(messages_of(sent, cutter))
    assert len(group.messages) > 3
    updater = updater_of(weights, mode)
    updater.begin("v1")
    updater.receive(source_of(sent, group, load_format=form, packed_bytes=PACKED_BYTES, whole=updater.holds_steps))
    updater.verify()
    updater.commit()
    assert weights.snapshot() == FakeWeights(1).snapshot()
    assert group.posted == group.finished == len(group.messages)
    assert group.ahead == (1 if updater.holds_steps else 3)  # at most two are on their way while a piece is looked at


def test_buffers_of_another_size_than_the_sender_packs_are_refused() -> None:
    weights, sent = FakeWeights(0), version(1)
    before = weights.snapshot()
    updater = updater_of(weights)
    updater.begin("v1")
    group = Messages(3 * messages_of(sent))
    with pytest.raises(ContentError, match=r"buffer \d+: the message is longer"):
        updater.receive(source_of(sent, group, load_format=PACKED, packed_bytes=1))
    assert weights.snapshot() == before


def test_packed_buffers_need_their_size() -> None:
    with pytest.raises(WeightRequestError, match="'packed' with packed_buffer_size_bytes"):
        source_of(version(1), Messages([]), load_format=PACKED).announce(1 << 20)


@pytest.mark.parametrize("wrong", ["short", "long"])
@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_piece_of_another_length_is_refused_and_the_rest_taken(wrong: str, at: int) -> None:
    weights, sent = FakeWeights(0), version(1)
    before = weights.snapshot()
    messages = messages_of(sent)
    piece = messages[at]
    assert piece is not None
    messages[at] = piece[:-4] if wrong == "short" else torch.cat((piece, piece[:4]))
    group = Messages(messages)
    updater = updater_of(weights)
    updater.begin("v1")
    with pytest.raises(ContentError, match=f"piece .*the message is {wrong}er"):
        updater.receive(source_of(sent, group))
    assert group.finished == len(messages) and not group.broken
    assert weights.snapshot() == before
    with pytest.raises(TransactionStateError):
        updater.verify()


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_value_that_is_refused_leaves_nobody_waiting(at: int) -> None:
    weights, sent = FakeWeights(0), version(1)
    before = weights.snapshot()
    name, _ = cut(sent)[at][0]
    sent[name].view(-1)[0] = float("nan")
    group = Messages(messages_of(sent))
    updater = updater_of(weights)
    updater.begin("v1")
    with pytest.raises(ContentError, match="not finite"):
        updater.receive(source_of(sent, group))
    assert group.finished == len(group.messages)
    assert weights.snapshot() == before


@pytest.mark.parametrize("mode", ["journal", "in_place"])
def test_where_steps_are_held_all_is_checked_before_any_is_written(mode: str) -> None:
    weights, sent = FakeWeights(0), version(1)
    before = weights.snapshot()
    name, _ = cut(sent)[-1][-1]
    sent[name].view(-1)[0] = float("nan")
    updater = updater_of(weights, mode)
    updater.begin("v1")
    with pytest.raises(ContentError):
        updater.receive(source_of(sent, Messages(messages_of(sent)), whole=updater.holds_steps))
    assert weights.snapshot() == before and updater.torn is None


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_peer_that_goes_away_between_pieces(at: int) -> None:
    weights, sent = FakeWeights(0), version(1)
    before = weights.snapshot()
    messages = messages_of(sent)
    messages[at] = None
    memory = Areas()
    updater = updater_of(weights)
    updater.begin("v1")
    with pytest.raises(TransportError, match="the peer is gone"):
        updater.receive(source_of(sent, Messages(messages), memory=memory))
    assert weights.snapshot() == before
    assert not memory._areas, "a broadcast that was given up may still write into it"


def test_a_bucket_that_is_received_whole_takes_no_more_than_itself() -> None:
    memory, sent = Areas(), version(1)
    source = source_of(sent, Messages(messages_of(sent)), memory=memory, whole=True)
    source.announce(1 << 20)
    (bucket,) = source.receive()
    part = bucket.named()
    assert {name: tensor.tolist() for name, tensor in part} == {name: t.tolist() for name, t in sent.items()}
    ends = [tensor.data_ptr() + tensor.nbytes for _, tensor in part]
    (area,) = memory._areas.values()
    assert max(ends) - area.data_ptr() <= sum(t.nbytes for t in sent.values()) + 64 * len(cut(sent))


def test_memory_is_kept_from_call_to_call() -> None:
    memory, sent = Areas(), version(1)
    places = []
    for _ in range(3):
        parts = source_of(sent, Messages(messages_of(sent)), memory=memory)
        parts.announce(1 << 20)
        places.append({tensor.untyped_storage().data_ptr() for part in parts.receive() for _, tensor in part.named()})
    assert places[0] == places[1] == places[2] and len(places[0]) == 3
    memory.close()
    assert not memory._areas


class Counting(BucketSource):
    """A source of three buckets that counts the buckets that were asked for."""

    def __init__(self, must_drain: bool) -> None:
        self.must_drain = must_drain
        self.given = 0

    def announce(self, max_bytes: int) -> list[TensorMeta]:
        return []

    def receive(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for _ in range(3):
            self.given += 1
            yield []


@pytest.mark.parametrize("must_drain", [True, False])
def test_what_is_refused_is_drained_where_the_sender_would_wait(must_drain: bool) -> None:
    taken = 0

    def take(bucket: Any) -> None:
        nonlocal taken
        taken += 1
        raise WeightRequestError("no")

    source = Counting(must_drain)
    with pytest.raises(WeightRequestError, match="no"):
        deliver(source, take)
    assert (source.given, taken) == (3 if must_drain else 1, 1)
    source = Counting(must_drain)
    with pytest.raises(TransactionStateError, match="early"):
        deliver(source, take, TransactionStateError("early"))
    assert (source.given, taken) == (3 if must_drain else 0, 1)


def test_steps_get_their_turn_between_the_parts_that_were_taken() -> None:
    taken: list[float] = []

    def take(named: Any) -> None:
        if len(taken) == 2:
            raise ContentError("the third is bad")
        time.sleep(0.01)

    with pytest.raises(ContentError):
        deliver(Counting(must_drain=True), take, pace=taken.append)
    assert len(taken) == 2 and min(taken) >= 0.01
    taken.clear()
    with pytest.raises(ContentError):
        deliver(Counting(must_drain=True), take, ContentError("refused before"), pace=taken.append)
    assert not taken


@pytest.mark.parametrize("must_drain", [True, False])
def test_a_refused_bucket_is_freed_at_once(must_drain: bool) -> None:
    """Its error leads to all that was staged, which must not wait for a search for cycles."""
    staged: list[weakref.ref[set[int]]] = []

    def take(named: Any) -> None:
        class Staged(set[int]):
            pass

        held = Staged()
        staged.append(weakref.ref(held))
        raise ContentError("no")

    gc.disable()
    try:
        with contextlib.suppress(ContentError):
            deliver(Counting(must_drain), take)
        assert len(staged) == 1 and staged[0]() is None
    finally:
        gc.enable()


def test_pauses_of_two_threads_end_together() -> None:
    """The second one begins before the first one has ended, and ends after it."""
    first, second = without_collections(), without_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
