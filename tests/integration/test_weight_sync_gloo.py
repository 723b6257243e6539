"""An engine process receives over gloo: what is sent arrives, and failures are reported and survived."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.logical_weights_fake import EMBED, LM_HEAD, NORM, version
from tests.weight_engine_process import Engine, Refused
from tests.weight_group_helpers import TIMEOUT_S, announce, broadcast, content_of, in_background, join, seeds
from weight_sync.bucket import pack
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group

SHORT_S = 3.0


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    engine = Engine(TIMEOUT_S)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    shared_engine.settle()


@pytest.fixture
def impatient_engine() -> Iterator[Engine]:
    engine = Engine(SHORT_S)
    yield engine
    engine.close()


@pytest.fixture
def group(engine: Engine) -> Iterator[GroupHandle]:
    group = join(engine)
    yield group
    group.destroy()


def test_a_broadcast_per_tensor(engine: Engine, group: GroupHandle) -> None:
    seed = next(seeds)
    named = [*version(seed).items(), (LM_HEAD, version(seed)[EMBED])]
    engine.begin_weight_update(coverage="full")
    outcome = announce(engine, group, named)
    for _, tensor in named:
        broadcast(group, tensor)
    assert outcome(TIMEOUT_S) is None
    engine.end_weight_update()
    assert engine.call("content") == content_of(seed)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_an_empty_bucket_is_fine(engine: Engine, group: GroupHandle, load_format: str | None) -> None:
    engine.begin_weight_update(coverage="partial")
    outcome = announce(engine, group, [], load_format=load_format)
    if load_format:
        broadcast(group, pack([]))
    assert outcome(TIMEOUT_S) is None
    assert engine.call("status")["received"] == 0


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@pytest.mark.parametrize("change", [-48, -2, 2, 48, 4096, 5 << 20])
def test_a_message_of_another_size(engine: Engine, group: GroupHandle, load_format: str | None, change: int) -> None:
    """A message shorter or longer than announced is refused and changes nothing; the group serves the next refresh."""
    before = engine.call("content")
    named = [(EMBED, version(next(seeds))[EMBED])]
    data = pack(named)
    sent = data[:change] if change < 0 else torch.cat([data, torch.ones(change, dtype=torch.uint8)])
    engine.begin_weight_update(coverage="partial")
    outcome = announce(engine, group, named, load_format=load_format)
    broadcast(group, sent)
    error = outcome(TIMEOUT_S)
    assert isinstance(error, Refused)
    assert error.kind == "ContentError"
    assert ("shorter" if change < 0 else "longer") in str(error)
    with pytest.raises(Refused, match=r"TransactionStateError.*failed"):
        engine.end_weight_update()
    assert engine.call("content") == before

    engine.begin_weight_update(coverage="partial")
    outcome = announce(engine, group, named, load_format=load_format)
    broadcast(group, data)
    assert outcome(TIMEOUT_S) is None
    engine.end_weight_update()
    assert engine.call("content") != before


def test_a_wrong_tensor_amid_a_list_does_not_leave_the_sender_waiting(engine: Engine, group: GroupHandle) -> None:
    named = list(version(99).items())
    engine.begin_weight_update(coverage="full")
    outcome = announce(engine, group, named)
    for i, (_, tensor) in enumerate(named):
        broadcast(group, tensor.double() if i == 3 else tensor)
    error = outcome(TIMEOUT_S)
    assert isinstance(error, Refused)
    assert error.kind == "ContentError"
    assert named[3][0] in str(error)


def test_a_bucket_where_single_tensors_were_announced(impatient_engine: Engine) -> None:
    """The rest of the announced tensors never comes: the engine lives, and leaves the group."""
    group = join(impatient_engine)
    named = list(version(99).items())
    impatient_engine.begin_weight_update(coverage="full")
    outcome = announce(impatient_engine, group, named)
    broadcast(group, pack(sorted(named, key=lambda item: -item[1].dtype.itemsize)))
    error = outcome(SHORT_S + 2)
    assert isinstance(error, Refused)
    assert error.kind == "ContentError"
    with pytest.raises(Refused, match="UnknownGroupError"):
        impatient_engine.destroy_weights_update_group(group_name=group.name)
    group.destroy()


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        ("ghost", torch.zeros(1 << 20), "UnknownTensorError"),
        (NORM, torch.zeros(1 << 20), "ShapeMismatchError"),
        (NORM, torch.zeros(4, dtype=torch.float64), "DtypeMismatchError"),
    ],
)
def test_a_refused_tensor_does_not_leave_the_sender_waiting(
    engine: Engine, group: GroupHandle, name: str, tensor: torch.Tensor, kind: str
) -> None:
    before = engine.call("content")
    engine.begin_weight_update(coverage="partial")
    outcome = announce(engine, group, [(name, tensor)])
    broadcast(group, tensor)
    error = outcome(TIMEOUT_S)
    assert isinstance(error, Refused)
    assert error.kind == kind
    assert engine.call("status")["failed"] is not None
    with pytest.raises(Refused, match="TransactionStateError"):
        engine.end_weight_update()
    assert engine.call("content") == before


def test_a_bucket_with_nothing_open_or_of_another_version(engine: Engine, group: GroupHandle) -> None:
    named = [(NORM, torch.ones(4))]
    outcome = announce(engine, group, named)
    broadcast(group, named[0][1])
    assert "no weight update is open" in str(outcome(TIMEOUT_S))
    engine.begin_weight_update(coverage="partial", weight_version="v1")
    outcome = announce(engine, group, named, weight_version="v2")
    broadcast(group, named[0][1])
    assert "'v2', the open weight update of 'v1'" in str(outcome(TIMEOUT_S))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtypes": ["int4"]}, "unknown dtype 'int4'"),
        ({"dtypes": []}, "equally long"),
        ({"shapes": [[-4]]}, "at least 0"),
        ({"shapes": [[1 << 30]]}, "at most"),
        ({"load_format": "zip"}, "unknown load_format 'zip'"),
        ({"group_name": "nobody"}, "'nobody' does not exist"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_at_once(
    engine: Engine, group: GroupHandle, change: dict[str, Any], text: str
) -> None:
    engine.begin_weight_update(coverage="partial")
    error = announce(engine, group, [(NORM, torch.ones(4))], **change)(1.0)
    assert isinstance(error, Refused)
    assert error.status in (400, 404)
    assert text in str(error)
    assert engine.call("status")["failed"] is not None


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"dtypes": ["int4"]},
        {"shapes": [[-4]]},
        {"shapes": [[1 << 30]]},
        {"load_format": "zip"},
        {"load_format": "delta"},
        *(
            {"names": ["odd", NORM], "dtypes": ["uint8", "float32"], "shapes": [[3], [4]], "load_format": load_format}
            for load_format in ("flattened_bucket", "pieces")
        ),
    ],
)
def test_what_was_broadcast_for_a_refused_call_is_never_taken_for_the_next(
    engine: Engine, group: GroupHandle, change: dict[str, Any]
) -> None:
    """Its sender broadcasts before it hears of the refusal, and then goes on with a bucket of the same size."""
    before = engine.call("content")
    engine.begin_weight_update(coverage="partial")
    refused = announce(engine, group, [(NORM, torch.ones(4))], **change)
    group.start_broadcast(torch.full((4,), 111.0))
    assert isinstance(refused(TIMEOUT_S), Refused)
    engine.abort_weight_update()

    engine.begin_weight_update(coverage="partial")
    error = announce(engine, group, [(NORM, torch.ones(4))])(TIMEOUT_S)
    assert isinstance(error, Refused) and error.kind == "UnknownGroupError"
    engine.abort_weight_update()
    assert engine.call("content") == before

    again = join(engine)
    engine.begin_weight_update(coverage="partial")
    outcome = announce(engine, again, [(NORM, torch.ones(4))])
    broadcast(again, torch.full((4,), 222.0))
    assert outcome(TIMEOUT_S) is None
    engine.end_weight_update()
    assert torch.full((4,), 222.0).numpy().tobytes().hex() in engine.call("content")
    again.destroy()


def test_a_sender_of_a_refused_call_does_not_wait(engine: Engine, group: GroupHandle) -> None:
    """The sender of a call that was never received does not wait either: its broadcast exceeds the system's buffers."""
    engine.begin_weight_update(coverage="partial")
    refused = announce(engine, group, [(NORM, torch.ones(4))], load_format="zip")
    start = time.monotonic()
    with pytest.raises(TransportError):
        broadcast(group, torch.zeros(64 << 20, dtype=torch.uint8))
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert isinstance(refused(TIMEOUT_S), Refused)


@pytest.mark.full
def test_a_sender_that_never_sends(impatient_engine: Engine) -> None:
    """The engine gives up at its deadline, leaves the group, and joins again under the same name."""
    before = impatient_engine.call("content")
    norm = version(next(seeds))[NORM]
    group = join(impatient_engine)
    impatient_engine.begin_weight_update(coverage="partial")
    start = time.monotonic()
    error = announce(impatient_engine, group, [(NORM, norm)])(SHORT_S + 2)
    assert isinstance(error, Refused)
    assert (error.kind, error.status) == ("TransportError", 502)
    assert SHORT_S - 0.5 < time.monotonic() - start < SHORT_S + 1.5
    impatient_engine.abort_weight_update()
    assert impatient_engine.call("content") == before
    name = group.name
    group.destroy()

    group = join(impatient_engine, name)
    impatient_engine.begin_weight_update(coverage="partial")
    outcome = announce(impatient_engine, group, [(NORM, norm)])
    broadcast(group, norm)
    assert outcome(SHORT_S) is None
    impatient_engine.end_weight_update()
    assert impatient_engine.call("content") != before
    group.destroy()


def test_a_sender_that_leaves(engine: Engine) -> None:
    group = join(engine)
    engine.begin_weight_update(coverage="partial")
    outcome = announce(engine, group, [(NORM, torch.ones(4))])
    time.sleep(0.2)
    group.destroy()
    error = outcome(1.0)
    assert isinstance(error, Refused)
    assert error.kind == "TransportError"


def test_joining_again_under_a_name_replaces_the_group(engine: Engine) -> None:
    first = join(engine)
    first.destroy()
    second = join(engine, first.name)
    engine.begin_weight_update(coverage="partial")
    outcome = announce(engine, second, [(NORM, torch.ones(4))])
    broadcast(second, torch.ones(4))
    assert outcome(TIMEOUT_S) is None
    second.destroy()


@pytest.mark.parametrize("address", ["x" * 64, ".."])
def test_an_address_that_can_be_no_host(engine: Engine, address: str) -> None:
    with pytest.raises(Refused, match=r"WeightRequestError.*not a host name"):
        engine.init_weights_update_group(
            master_address=address, master_port=free_port(), rank_offset=1, world_size=2, group_name="nowhere"
        )


@pytest.mark.full
def test_nobody_at_the_rendezvous(impatient_engine: Engine) -> None:
    start = time.monotonic()
    with pytest.raises(Refused, match=r"TransportError.*no process listens") as caught:
        impatient_engine.init_weights_update_group(
            master_address="127.0.0.1", master_port=free_port(), rank_offset=1, world_size=2, group_name="g"
        )
    assert caught.value.status == 502
    assert time.monotonic() - start < SHORT_S + 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank_offset": 0},
        {"rank_offset": 2},
        {"world_size": 1},
        {"group_name": ""},
        {"master_port": 0},
        {"backend": "mpi"},
    ],
)
def test_a_rendezvous_that_cannot_work_is_refused_at_once(engine: Engine, arguments: dict[str, Any]) -> None:
    good = {"master_address": "127.0.0.1", "master_port": 1234, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    with pytest.raises(Refused) as caught:
        engine.init_weights_update_group(**{**good, **arguments})
    assert caught.value.status == 400


@pytest.mark.full
def test_three_engines_in_one_group() -> None:
    """With four members gloo passes messages on from engine to engine: one that is too long ends the group for all."""
    engines = [Engine(TIMEOUT_S, rank) for rank in range(3)]
    port = free_port()
    joined = [
        in_background(
            lambda engine=engine: engine.init_weights_update_group(  # type: ignore[misc]
                master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=4, group_name="four"
            )
        )
        for engine in engines
    ]
    group = init_process_group("127.0.0.1", port, 0, 4, "four", "gloo", TIMEOUT_S)
    assert [outcome(TIMEOUT_S) for outcome in joined] == [None] * 3
    seed = next(seeds)
    named = list(version(seed).items())
    for extra, kind in ((0, None), (48, "ContentError")):
        for engine in engines:
            engine.begin_weight_update(coverage="full")
        outcomes = [announce(engine, group, named) for engine in engines]
        with pytest.raises(TransportError) if extra else nullcontext():
            for _, tensor in named:
                data = tensor.contiguous().view(-1).view(torch.uint8)
                broadcast(group, torch.cat([data, torch.ones(extra, dtype=torch.uint8)]))
        for outcome in outcomes:
            error = outcome(TIMEOUT_S)
            assert (error.kind if isinstance(error, Refused) else error) == kind
        for engine in engines:
            if kind is None:
                engine.end_weight_update()
            assert engine.call("content") == content_of(seed)
    group.destroy()
    for engine in engines:
        engine.close()
