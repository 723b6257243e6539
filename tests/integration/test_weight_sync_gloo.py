"""A real sender and a real engine process over gloo: what is sent arrives, and what goes wrong is told and survived.

torch looks up the name of every address that joins its store.  Where reverse DNS is slow a rendezvous takes seconds now
and then, so deadlines are generous except where the deadline itself is the subject.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.logical_weights_fake import EMBED, LM_HEAD, NORM, FakeWeights, fused, version
from tests.weight_engine_process import Engine, Refused
from weight_sync.bucket import pack
from weight_sync.errors import TransportError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.process_group import GroupHandle, free_port, init_process_group
from weight_sync.sender import WeightSender
from weight_sync.tensor_meta import dtype_name

TIMEOUT_S = 20.0
SHORT_S = 3.0
Named = Sequence[tuple[str, torch.Tensor]]
seeds = itertools.count(1)
names = (f"group{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    engine = Engine(TIMEOUT_S)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    if shared_engine.call("status")["open"]:
        shared_engine.call("abort")


@pytest.fixture
def impatient_engine() -> Iterator[Engine]:
    engine = Engine(SHORT_S)
    yield engine
    engine.close()


@pytest.fixture
def sender(engine: Engine) -> Iterator[WeightSender]:
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    yield sender
    sender.close()


def content_of(seed: int) -> list[str]:
    return [block.hex() for block in FakeWeights(seed).snapshot()]


def in_background(call: Callable[[], Any]) -> Callable[[float], BaseException | None]:
    """Start `call`; the result waits for it and returns what it raised."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def outcome(within_s: float) -> BaseException | None:
        thread.join(within_s)
        assert raised, f"no answer within {within_s} s"
        return raised[0]

    return outcome


def announce(engine: Engine, group: GroupHandle, named: Named, **more: Any) -> Callable[[float], BaseException | None]:
    """Tell the engine that `named` comes; broadcasting is left to the test."""
    arguments = {
        "names": [name for name, _ in named],
        "dtypes": [dtype_name(tensor.dtype) for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        "group_name": group.name,
        "load_format": None,
        "weight_version": None,
        **more,
    }
    return in_background(lambda: engine.update_weights_from_distributed(**arguments))


def broadcast(group: GroupHandle, tensor: torch.Tensor) -> None:
    group.finish(group.start_broadcast(tensor), time.monotonic() + TIMEOUT_S)


def join(engine: Engine, name: str | None = None, attempts: int = 3) -> GroupHandle:
    """A raw group with the engine, for a sender that does what `WeightSender` would not."""
    name = name or next(names)
    port = free_port()
    joined = in_background(
        lambda: engine.init_weights_update_group(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=name, backend="nccl"
        )
    )
    try:
        group = init_process_group("127.0.0.1", port, 0, 2, name, "gloo", TIMEOUT_S)
    except TransportError:
        assert attempts > 1
        joined(TIMEOUT_S)
        return join(engine, name, attempts - 1)
    if joined(TIMEOUT_S) is not None:  # an impatient engine gave up on a slow rendezvous
        assert attempts > 1
        group.destroy()
        return join(engine, name, attempts - 1)
    return group


@pytest.fixture
def group(engine: Engine) -> Iterator[GroupHandle]:
    group = join(engine)
    yield group
    group.destroy()


@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_refresh(engine: Engine, sender: WeightSender, bucket_bytes: int, with_manifest: bool) -> None:
    seed = next(seeds)
    sent = version(seed)
    progress: list[tuple[int, int]] = []
    report = sender.refresh(
        sent.items(),
        f"v{seed}",
        bucket_bytes=bucket_bytes,
        progress=lambda done, total: progress.append((done, total)),
        with_manifest=with_manifest,
    )
    assert engine.call("content") == content_of(seed)
    total = sum(tensor.nbytes for tensor in sent.values())
    assert report.num_bytes == total
    assert progress[-1] == (total, total)
    assert len(progress) == report.num_buckets == {1: 11, 60: 5, 1 << 20: 1}[bucket_bytes]
    checksums = engine.call("checksums")
    assert checksums == {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in sent.items()}
    if with_manifest:
        assert report.fingerprints == checksums
        assert report.digest == engine.call("content_digest")
    else:
        assert report.digest is None


@pytest.mark.parametrize("split_experts", [True, False])
def test_refresh_from_fused_tensors(engine: Engine, sender: WeightSender, split_experts: bool) -> None:
    seed = next(seeds)
    report = sender.refresh(fused(version(seed)).items(), split_experts=split_experts)
    assert engine.call("content") == content_of(seed)
    assert report.digest == (engine.call("content_digest") if split_experts else None)


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
    """Shorter or longer than announced: told, nothing changed, and the same group serves the next refresh."""
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
    """The formats were mixed up: the rest of the list never comes, the engine lives and the group is left."""
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


def test_nobody_at_the_rendezvous(impatient_engine: Engine) -> None:
    start = time.monotonic()
    with pytest.raises(Refused, match=r"TransportError.*nobody listens") as caught:
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


class Meddling:
    """Passes control calls on, with one of them changed."""

    def __init__(self, engine: Engine, verb: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._engine, self._verb, self._change = engine, verb, change
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self.calls.append(verb)
            changed = self._change(arguments) if verb == self._verb else arguments
            return getattr(self._engine, verb)(**changed)

        return call


def test_sender_is_told_at_once_when_the_engine_will_not_join(engine: Engine) -> None:
    control = Meddling(engine, "init_weights_update_group", lambda sent: {**sent, "rank_offset": 0})
    start = time.monotonic()
    with pytest.raises(Refused, match="rank 0"):
        WeightSender(control, timeout_s=TIMEOUT_S).connect(group_name=next(names))
    assert time.monotonic() - start < 2


def test_sender_is_told_at_once_when_the_engine_refuses_before_receiving(engine: Engine) -> None:
    """The broadcast is under way and nobody takes it; the sender leaves, aborts, and can connect again."""
    control = Meddling(engine, "update_weights_from_distributed", lambda sent: {**sent, "dtypes": ["int4"] * 11})
    sender = WeightSender(control, timeout_s=TIMEOUT_S)
    sender.connect(group_name="meddled")
    start = time.monotonic()
    with pytest.raises(Refused, match="int4"):
        sender.refresh(version(99).items(), "v99")
    assert time.monotonic() - start < 5
    assert control.calls[-1] == "abort_weight_update"
    assert "end_weight_update" not in control.calls
    assert not engine.call("status")["open"]
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name="meddled")
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert engine.call("content") == content_of(seed)
    sender.close()


def test_a_bit_that_flips_on_the_way(engine: Engine, sender: WeightSender, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.call("content")
    send = GroupHandle.start_broadcast

    def flip(group: GroupHandle, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        damaged = tensor.clone()
        damaged[0] ^= 1
        return send(group, damaged, timeout_s)

    monkeypatch.setattr(GroupHandle, "start_broadcast", flip)
    with pytest.raises(Refused, match=r"ContentError.*fingerprint"):
        sender.refresh(version(99).items())
    assert engine.call("content") == before


def test_sender_refusals_change_nothing(engine: Engine, sender: WeightSender) -> None:
    before = engine.call("content")
    with_nan = version(99)
    with_nan[NORM] = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    with pytest.raises(Refused, match=r"ContentError.*not finite"):
        sender.refresh(with_nan.items(), with_manifest=False)
    incomplete = version(99)
    del incomplete[NORM]
    with pytest.raises(Refused, match=r"CoverageError.*manifest lacks 1"):
        sender.refresh(incomplete.items())
    with pytest.raises(Refused, match=r"CoverageError.*1 of 11 tensors missing"):
        sender.refresh(incomplete.items(), with_manifest=False)
    with pytest.raises(Refused, match="UnknownTensorError"):
        sender.refresh({**version(99), "ghost": torch.ones(2)}.items(), with_manifest=False)

    def lose_patience(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sender.refresh(version(99).items(), progress=lose_patience)
    assert not engine.call("status")["open"]
    assert engine.call("content") == before
    seed = next(seeds)
    sender.refresh(version(seed).items())
    assert engine.call("content") == content_of(seed)


def test_an_engine_that_dies() -> None:
    """The sender notices within its deadline and says what it could not clean up."""
    engine = Engine(TIMEOUT_S)
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    start = time.monotonic()
    with pytest.raises((TransportError, ConnectionError, BrokenPipeError)) as caught:
        sender.refresh(version(99).items(), bucket_bytes=1, progress=lambda done, total: engine.kill())
    assert time.monotonic() - start < 6
    assert any("aborting the weight update failed" in note for note in caught.value.__notes__)


def test_three_engines_in_one_group() -> None:
    """With four members gloo passes messages on from engine to engine."""
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
