"""The engine's side of checkpoint-engine's conversation, against a stand-in for the sender over real sockets."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from tests.ipc_wire import cuda_handle, entry
from tests.logical_weights_fake import NORM, FakeWeights, expert_name, fused, version
from tests.parameter_server_stand_in import ParameterServerStandIn, Sending, give_up_at
from weight_sync.errors import (
    ContentError,
    TransactionStateError,
    TransportError,
    UnknownTensorError,
    WeightRequestError,
)
from weight_sync.held_memory import Areas
from weight_sync.ipc_messages import IpcBuffer, SenderFailure, read_bucket, read_end, read_handle
from weight_sync.receivers.ipc import IpcPeer, IpcSource, choose_endpoint
from weight_sync.stored_tensors import parts_of
from weight_sync.updater import WeightUpdater

CPU = torch.device("cpu")
REMOTE_ERRORS = "failed to update weights due to remote errors"


@pytest.fixture
def weights() -> FakeWeights:
    return FakeWeights()


@pytest.fixture
def updater(weights: FakeWeights) -> WeightUpdater:
    return new_updater(weights)


@pytest.fixture(params=["pickle", "json"])
def server(request: pytest.FixtureRequest) -> Iterator[ParameterServerStandIn]:
    before = own_shared_files()
    with ParameterServerStandIn(512, request.param) as stand_in:
        yield stand_in
    assert own_shared_files() == before, "the engine holds on to what the sender shares"


def new_updater(weights: FakeWeights, timeout_s: float = 10.0, **more: Any) -> WeightUpdater:
    return WeightUpdater(weights, device="cpu", timeout_s=timeout_s, vote=lambda mine: mine, **more)


def own_shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def expect_equal(weights: FakeWeights, tensors: dict[str, torch.Tensor]) -> None:
    other = FakeWeights()
    for name, tensor in tensors.items():
        other.write(name, tensor)
    other.recompute_derived()
    assert weights.snapshot() == other.snapshot()


def refresh(
    updater: WeightUpdater, server: ParameterServerStandIn, named: list[tuple[str, torch.Tensor]]
) -> tuple[Exception | None, BaseException | None]:
    """Hold one conversation into an open transaction, and return what the engine raised and what the sender raised."""
    raised: Exception | None = None
    with Sending(lambda: server.update(named)) as sending:
        try:
            updater.receive(IpcSource(server.handles, updater.receiver))
        except Exception as error:
            raised = error
    return raised, sending.error


# --- right conversations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_fused", [False, True])
def test_a_checkpoint_comes_through_a_buffer_smaller_than_it(
    updater: WeightUpdater, weights: FakeWeights, server: ParameterServerStandIn, as_fused: bool
) -> None:
    sent = version(1)
    updater.begin("v1")
    raised, failed = refresh(updater, server, list((fused(sent) if as_fused else sent).items()))
    assert (raised, failed) == (None, None)
    num_buckets = len(server.answers) - 3
    assert num_buckets >= 2 and set(server.answers) == {""}
    updater.verify()
    assert updater.commit().weight_version == "v1"
    expect_equal(weights, sent)


def test_a_partial_update_keeps_the_rest(
    updater: WeightUpdater, weights: FakeWeights, server: ParameterServerStandIn
) -> None:
    updater.begin(coverage="partial")
    assert refresh(updater, server, [(NORM, version(1)[NORM])]) == (None, None)
    updater.verify()
    updater.commit()
    expect_equal(weights, {**version(0), NORM: version(1)[NORM]})


def test_two_conversations_make_up_one_version(updater: WeightUpdater, weights: FakeWeights) -> None:
    sent = version(2)
    updater.begin()
    for part in (list(sent.items())[:4], list(sent.items())[4:]):
        with ParameterServerStandIn() as server:
            assert refresh(updater, server, part) == (None, None)
    updater.verify()
    updater.commit()
    expect_equal(weights, sent)


@pytest.mark.mutant
def test_an_answer_before_the_copy_would_be_noticed(updater: WeightUpdater, weights: FakeWeights) -> None:
    """The wrong variant: a sender overwrites the buffer after the answer, so content must be out of it by then."""

    class TooEarly(IpcSource):
        def _buckets(self, peer: IpcPeer) -> Iterator[Any]:
            buffer = read_handle(peer.receive(), CPU)
            assert isinstance(buffer, IpcBuffer)
            peer.answer()
            late: list[Any] = []
            while (tensors := read_bucket(peer.receive(), buffer)) is not None:
                assert isinstance(tensors, list)
                late += tensors
                peer.answer()
            self._num_ends = 1
            yield from (part.read([buffer.storage], Areas()) for part in parts_of(late))

    sent = version(1)
    updater.begin()
    with ParameterServerStandIn(form="json") as server, Sending(lambda: server.update(list(sent.items()))):
        updater.receive(TooEarly(server.handles, updater.receiver))
    updater.verify()
    updater.commit()
    with pytest.raises(AssertionError):
        expect_equal(weights, sent)


def test_tensors_of_an_expert_may_come_in_several_buckets(updater: WeightUpdater) -> None:
    """A bucket may end inside an expert, as the transaction puts experts together."""
    updater.begin(coverage="partial")
    sent = version(1)
    named = [(expert_name(1, p), sent[expert_name(1, p)]) for p in ("gate_proj", "up_proj", "down_proj")]
    with ParameterServerStandIn(bucket_bytes=256) as server:
        assert refresh(updater, server, named) == (None, None)
    assert len(server.answers) == 1 + 3 + 2


# --- content and messages that are refused ------------------------------------------------------------------------


def test_the_sender_gives_up_when_told(updater: WeightUpdater) -> None:
    """The sender learns of a refused bucket from the answer to it, before it sends the next."""
    updater.begin()
    with ParameterServerStandIn() as server:
        sent = {"model.norm.bias": version(1)[NORM], **version(1)}
        raised, failed = refresh(updater, server, list(sent.items()))
        assert isinstance(raised, UnknownTensorError)
        assert isinstance(failed, RuntimeError) and str(failed).startswith(REMOTE_ERRORS)
        assert server.answers == ["", str(raised)]


def test_a_call_that_has_no_place_is_refused_at_its_first_message(updater: WeightUpdater) -> None:
    with ParameterServerStandIn() as server:
        raised, failed = refresh(updater, server, list(version(1).items()))
    assert isinstance(raised, TransactionStateError) and isinstance(failed, RuntimeError)
    assert server.answers == [str(raised)]


def test_a_sender_that_does_not_listen_is_told_to_the_end(updater: WeightUpdater) -> None:
    updater.begin()
    with ParameterServerStandIn() as server:
        server.check = lambda answer: None  # type: ignore[method-assign]
        raised, failed = refresh(updater, server, [("x", version(1)[NORM]), *version(1).items()])
    assert isinstance(raised, UnknownTensorError) and failed is None
    assert len(server.answers) >= 6 and set(server.answers[1:]) == {str(raised)}


def test_more_than_a_call_may_bring_is_refused(weights: FakeWeights) -> None:
    updater = new_updater(weights, max_call_bytes=100)
    updater.begin()
    with ParameterServerStandIn() as server:
        raised, failed = refresh(updater, server, list(version(1).items()))
    assert isinstance(raised, WeightRequestError) and "bytes of tensors; the limit is 4" in str(raised)
    assert isinstance(failed, RuntimeError)


def test_going_on_after_the_end_is_refused(updater: WeightUpdater) -> None:
    updater.begin()

    def send(server: ParameterServerStandIn) -> None:
        for message in (server.handle(), server.encode(None), server.encode([entry()]), server.encode(None)):
            server.send(message)
            server.receive()

    with (
        ParameterServerStandIn() as server,
        Sending(lambda: send(server)) as sending,
        pytest.raises(WeightRequestError, match="sent a message after the end"),
    ):
        updater.receive(IpcSource(server.handles, updater.receiver))
    assert sending.error is None and server.answers == ["", "", *["the sender sent a message after the end"] * 2]


# --- handles ------------------------------------------------------------------------------------------------------


HANDLES = [
    (cuda_handle(), "no CUDA device"),
    (pickle.dumps(reduce_tensor(torch.zeros(4))[:1], -1), "not a handle"),
    (pickle.dumps((os.system, ("touch /tmp/lockstep-ipc-was-here",)), -1), "system', which is not allowed"),
    (pickle.dumps((torch.Size, ((1, 2),)), -1), "not the handle of a flat uint8 buffer"),
    (pickle.dumps((torch.Size, (1, 2, 3)), -1), "malformed handle"),
    (pickle.dumps(torch.zeros(8, dtype=torch.uint8), -1), "came inside the message"),
    (pickle.dumps([1], -1), "not the handle"),
    (pickle.dumps(None, -1), "not the handle"),
    (b"", "not a pickle or JSON"),
    (b"[" * 100_000, "not a pickle or JSON"),
    (b"9" * 10_000, "not a pickle or JSON"),
    (b'{"shm_name": "no-such-segment", "nbytes": 8}', "cannot open"),
    (b'{"shm_name": "../etc/passwd", "nbytes": 8}', "not a name of shared memory"),
    (b'{"shm_name": "x", "nbytes": -1}', "a handle must be"),
    (b'{"shm_name": 5, "nbytes": 8}', "a handle must be"),
]


@pytest.mark.parametrize(("handle", "reason"), HANDLES)
def test_a_wrong_handle_is_refused_and_the_sender_told(updater: WeightUpdater, handle: bytes, reason: str) -> None:
    updater.begin()
    with ParameterServerStandIn() as server:
        server.handle = lambda: handle  # type: ignore[method-assign]
        raised, failed = refresh(updater, server, list(version(1).items()))
    assert isinstance(raised, WeightRequestError) and reason in str(raised)
    assert isinstance(failed, RuntimeError) and server.answers == [str(raised)]
    assert not Path("/tmp/lockstep-ipc-was-here").exists()


def test_a_buffer_that_shrinks_is_an_error_and_no_signal(updater: WeightUpdater) -> None:
    updater.begin()
    with ParameterServerStandIn(form="json") as server:
        name = json.loads(server.handle())["shm_name"]

        def shrink(index: int, message: Any) -> Any:
            if index == 1:
                os.truncate(f"/dev/shm/{name}", 16)
            return message

        server.rewrite = shrink
        raised, failed = refresh(updater, server, list(version(1).items()))
        os.truncate(f"/dev/shm/{name}", 2 * server.bucket_bytes)
    assert isinstance(raised, ContentError) and failed is not None


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError, TimeoutError])
def test_exceptions_are_read_as_text(kind: type[Exception]) -> None:
    assert read_end(memoryview(pickle.dumps(kind("Some workers"), -1))) == SenderFailure(
        f"{kind.__name__}: Some workers"
    )


@pytest.mark.parametrize("names", [("cpu", "cpu-0"), ("gpu-1234",)])
def test_the_address_is_that_of_this_device(names: tuple[str, ...]) -> None:
    handles = {names[-1].upper(): "ipc://@mine", "GPU-other": "ipc://@other"}
    assert choose_endpoint(handles, names) == "ipc://@mine"
    with pytest.raises(WeightRequestError, match=r"0 addresses.*GPU-other"):
        choose_endpoint({"GPU-other": "ipc://@other"}, names)
    with pytest.raises(WeightRequestError, match=r"0 addresses.*none"):
        choose_endpoint({}, names)
    with pytest.raises(WeightRequestError, match="2 addresses"):
        choose_endpoint({names[0]: "ipc://@a", names[0].upper(): "ipc://@b"}, names)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc://", "/tmp/x", "ipc:///a b", f"ipc://{'a' * 101}"])
def test_only_unix_sockets_are_dialled(updater: WeightUpdater, endpoint: str) -> None:
    updater.begin()
    with pytest.raises(WeightRequestError, match="not the address of a Unix socket"):
        updater.receive(IpcSource({"cpu": endpoint}, updater.receiver))


# --- senders that fail ----------------------------------------------------------------------------------------------


def test_an_exception_of_the_sender_ends_the_transaction(updater: WeightUpdater) -> None:
    updater.begin()
    with ParameterServerStandIn() as server:
        give_up_at(server, 1)
        with Sending(lambda: server.update(list(version(1).items()))):
            started = time.monotonic()
            with pytest.raises(TransportError, match="RuntimeError: another worker failed"):
                updater.receive(IpcSource(server.handles, updater.receiver))
            assert time.monotonic() - started < 5.0
    assert updater.status()["state"] == "failed"


@pytest.mark.parametrize("num_buckets", [0, 1])
def test_a_sender_that_disconnects_is_noticed_at_once(updater: WeightUpdater, num_buckets: int) -> None:
    updater.begin()
    with ParameterServerStandIn() as server:

        def die(index: int, message: Any) -> Any:
            if index == num_buckets:
                server.socket.close(linger=0)
                raise SystemExit
            return message

        server.rewrite = die
        with Sending(lambda: server.update(list(version(1).items()))) as sending:
            started = time.monotonic()
            with pytest.raises(TransportError, match="has disconnected"):
                updater.receive(IpcSource(server.handles, updater.receiver))
            assert time.monotonic() - started < 5.0
    assert isinstance(sending.error, SystemExit)


def test_a_silent_sender_runs_into_the_deadline(weights: FakeWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.receivers.ipc.GRACE_S", 0.3)
    updater = new_updater(weights, timeout_s=0.5)
    updater.begin()
    with ParameterServerStandIn() as server, Sending(lambda: server.send(server.handle())):
        started = time.monotonic()
        with pytest.raises(TransportError, match="did not send anything before the deadline"):
            updater.receive(IpcSource(server.handles, updater.receiver))
        assert time.monotonic() - started < 3.0


def test_nobody_at_the_address(updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.receivers.ipc.CONNECT_S", 0.3)
    updater.begin()
    with pytest.raises(TransportError, match="no process answers at ipc://@lockstep-nobody"):
        updater.receive(IpcSource({"cpu": "ipc://@lockstep-nobody"}, updater.receiver))


def test_a_message_over_the_cap_is_not_taken(updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.receivers.ipc.MAX_MESSAGE_BYTES", 4096)
    updater.begin()
    with ParameterServerStandIn() as server:
        server.handle = lambda: b" " * 5000  # type: ignore[method-assign]
        server.socket.setsockopt(zmq.RCVTIMEO, 500)
        with (
            Sending(lambda: server.update([])) as sending,
            pytest.raises(TransportError, match="a message that is too long"),
        ):
            updater.receive(IpcSource(server.handles, updater.receiver))
        assert isinstance(sending.error, zmq.Again)


def test_a_message_in_parts_is_refused(updater: WeightUpdater) -> None:
    updater.begin()
    with ParameterServerStandIn() as server:
        server.handle = lambda: server.socket.send(b"[]", zmq.SNDMORE) or b""  # type: ignore[method-assign]
        raised, failed = refresh(updater, server, [(NORM, version(1)[NORM])])
    assert isinstance(raised, WeightRequestError) and "must have one part, got 2" in str(raised)
    assert isinstance(failed, RuntimeError) and server.answers == [str(raised)]
