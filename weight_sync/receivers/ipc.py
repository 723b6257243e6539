"""Receives tensors as a worker of checkpoint-engine does: one conversation about a shared buffer that is filled anew.

The sender learns of a failure while it sends: its next message is answered with the reason, and so is every further
one until it gives up, sends the end, or disconnects.  Otherwise it would wait for ever, as its socket has no deadline.

The transaction keeps its own copy of the buffer's content: the sender may fill the buffer again once it is answered.

Verified with buffers in CPU shared memory.  Handles of CUDA memory are opened by `cuda_ipc`.

`ipc_messages` has the messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from weight_sync.cuda_ipc import CudaStorage
from weight_sync.errors import TransportError, WeightRequestError, WeightSyncError
from weight_sync.held_memory import Areas
from weight_sync.ipc_messages import MAX_MESSAGE_BYTES, IpcBuffer, SenderFailure, read_bucket, read_end, read_handle
from weight_sync.receivers.base import BucketSource, KnownCall, Receiver, stored_call
from weight_sync.shared_segment import release_torch_shared_file
from weight_sync.stored_tensors import check_total
from weight_sync.tensor_meta import PackedBucket, TensorMeta
from weight_sync.waiting import POLL_S, Patience

CONNECT_S = 10.0

_ENDPOINT = re.compile(r"ipc://[\x21-\x7e]{1,100}")
_LINGER_MS = 1000
_HANDSHAKE = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST = zmq.EVENT_DISCONNECTED
AFTER_ERROR_S = 60.0
"""Seconds that a sender which got an error may take for its next message."""
GRACE_S = 10.0
"""Time past the call's deadline in which a sender can still get the error."""

_CPU_NAMES = ("cpu", "cpu-0")  # ours: the package names no CPU

_END = KnownCall((), ())
"""The end, in place of a bucket."""

Message = TypeVar("Message")


class IpcSource(BucketSource):
    """One call's conversation, within the deadline of a bucket.  `zmq_handles`: the sender's socket by device."""

    def __init__(self, zmq_handles: Mapping[str, str], receiver: Receiver) -> None:
        self._zmq_handles = zmq_handles
        self._device = receiver.device
        self._timeout_s = receiver.timeout_s
        self._waits = receiver.patience
        self._known_calls = receiver.known_calls
        self._memory = Areas() if receiver.memory is None else receiver.memory
        self._deadline = 0.0
        self._endpoint: str | None = None
        self._peer: IpcPeer | None = None
        self._max_bytes = 0
        self._num_ends = 0
        self._over = False

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return nothing: names come with the buckets.  Raises `WeightRequestError`: no address for this device."""
        endpoint = choose_endpoint(self._zmq_handles, device_names(self._device))
        check_endpoint(endpoint)
        self._endpoint, self._max_bytes = endpoint, max_bytes
        self._deadline = time.monotonic() + self._timeout_s
        return ()

    def receive(self) -> Iterator[PackedBucket]:
        """Yield a few tensors at a time; a bucket is answered when its last tensor has been taken.

        Raises `WeightRequestError` and its kinds (a message that cannot be right), `TransportError` (the sender has
        disconnected, is silent, or gives up).  `refuse` must follow, also where the caller gives up.
        """
        assert self._endpoint is not None
        self._over = True  # in case there is no listener
        self._peer = IpcPeer(self._endpoint, self._deadline, MAX_MESSAGE_BYTES, self._waits)
        self._over = False
        yield from self._buckets(self._peer)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
        self._peer.answer()
        if not self._unless_given_up(read_end(self._peer.receive())):
            raise WeightRequestError("the sender sent a message after the end")
        self._peer.answer()
        self._close()

    def refuse(self, reason: str) -> None:
        """Answer every message of the sender with the reason; returns when it has stopped or cannot be reached."""
        try:
            if self._endpoint is not None and not self._over:
                with contextlib.suppress(WeightSyncError):
                    self._send_error(reason or "the engine refused the weight update")
        finally:
            self._close()

    def _buckets(self, peer: IpcPeer) -> Iterator[PackedBucket]:
        """Yield the buckets up to the first end, which is not answered here; the buffer is held no longer than that."""
        buffer = self._unless_given_up(read_handle(peer.receive(), self._device))
        left = self._max_bytes
        try:
            peer.answer()
            while (call := self._bucket(peer.receive(), buffer)) is not _END:
                left -= check_total(call.messages, left)
                for part in call.messages:
                    yield part.read([buffer.storage], self._memory)
                peer.answer()
            self._num_ends = 1
        finally:
            for segment in buffer.segments:
                release_torch_shared_file(segment)
            if isinstance(buffer.storage, CudaStorage):
                buffer.storage.release()

    def _bucket(self, message: memoryview, buffer: IpcBuffer) -> KnownCall:
        """Return the bucket of a message, which is read unless an equal one is known; `_END` for the end."""

        def read() -> KnownCall:
            tensors = self._unless_given_up(read_bucket(message, buffer))
            return _END if tensors is None else stored_call(tensors, self._known_calls)

        place = (type(buffer.storage), buffer.start, buffer.nbytes)
        return self._known_calls.get(("ipc", place, hashlib.sha256(message).digest()), read)

    def _unless_given_up(self, message: Message | SenderFailure) -> Message:
        """Return the message.  Raises `TransportError` where the sender gives up with it; the conversation is over
        then.
        """
        if isinstance(message, SenderFailure):
            self._over = True
            raise TransportError(f"the sender stopped: {message.text}")
        return message

    def _send_error(self, reason: str) -> None:
        if self._peer is None:
            self._peer = IpcPeer(self._endpoint or "", self._deadline, MAX_MESSAGE_BYTES, self._waits)
        peer = self._peer
        while True:
            if peer.owes_answer:
                peer.answer(reason)
            if self._num_ends == 2:
                return
            peer.deadline = self._retry_deadline()
            try:
                message = read_end(peer.receive())
            except WeightRequestError:
                continue
            if isinstance(message, SenderFailure):
                return
            self._num_ends += message

    def _retry_deadline(self) -> float:
        return min(time.monotonic() + AFTER_ERROR_S, self._deadline + GRACE_S)

    def _close(self) -> None:
        self._over = True
        if self._peer is not None:
            self._peer.close()
            self._peer = None


class IpcPeer:
    """The answering end of a conversation over a Unix socket, with a deadline on every wait.

    A REP socket by itself waits for ever, also for a peer that has died.  A monitor reports when the connection is made
    and when it is lost, so a dead peer is noticed at once and a silent one at the deadline.

    The peer at `endpoint` has `CONNECT_S` to accept the connection.  Not thread-safe.

    `patience` cancels its waits.  Raises `WeightRequestError` (no such kind of address), `TransportError` (there is no
    listener).
    """

    def __init__(
        self, endpoint: str, deadline: float, max_message_bytes: int, patience: Patience | None = None
    ) -> None:
        check_endpoint(endpoint)
        self.deadline = deadline
        self.owes_answer = False
        self._patience = patience or Patience()
        self._endpoint = endpoint
        self._connected = self._lost = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE | _LOST)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._connect()
        except Exception:
            self.close()
            raise

    def receive(self) -> memoryview:
        """Return the next message.  Raises `TransportError`: nothing came in time, the peer disconnected or sent too
        much.
        """
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                raise TransportError(f"the sender at {self._endpoint} did not send anything before the deadline")
            self._wait(0.0 if self._lost else left_s)
            if self._socket.poll(0):
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self.owes_answer = True
                if len(frames) != 1:
                    raise WeightRequestError(f"a message must have one part, got {len(frames)}")
                return memoryview(frames[0].bytes)
            if self._lost:
                raise TransportError(
                    f"the sender at {self._endpoint} has disconnected or sent a message that is too long"
                )

    def answer(self, text: str = "") -> None:
        """Answer the last message; empty text means success.  A peer that has disconnected gets nothing."""
        assert self.owes_answer
        self.owes_answer = False
        self._socket.send(text.encode(), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is left, for a second at most, and close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _connect(self) -> None:
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            raise WeightRequestError(f"cannot connect to {self._endpoint}: {error}") from None
        until = min(self.deadline, time.monotonic() + CONNECT_S)
        while not self._connected:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TransportError(f"no process answers at {self._endpoint}")
            self._wait(left_s)

    def _wait(self, seconds: float) -> None:
        """Wait for a message or a change of the connection, at most `POLL_S`.  Raises as `Patience.check`."""
        self._patience.check()
        ready = dict(self._poller.poll(max(1, int(min(seconds, POLL_S) * 1000))))
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)["event"]
            if event == _HANDSHAKE:
                self._connected = True
            elif self._connected:
                self._lost = True


def check_endpoint(endpoint: str) -> None:
    """Raise `WeightRequestError` for anything but a Unix socket: a call must not make the engine dial out."""
    if not _ENDPOINT.fullmatch(endpoint):
        raise WeightRequestError(f"{endpoint[:200]!r} is not the address of a Unix socket; use ipc://PATH")


def device_names(device: torch.device) -> tuple[str, ...]:
    """Return the names by which a sender may mean this device, in lower case; the first is the package's own."""
    if device.type != "cuda":
        return _CPU_NAMES
    return (f"GPU-{torch.cuda.get_device_properties(device).uuid}".lower(),)


def choose_endpoint(zmq_handles: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the one address for a device.  Raises `WeightRequestError` for none or several."""
    endpoints = {endpoint for name, endpoint in zmq_handles.items() if name.lower() in names}
    if len(endpoints) != 1:
        given = ", ".join(sorted(zmq_handles)[:8])[:400] or "none"
        raise WeightRequestError(
            f"zmq_handles has {len(endpoints)} addresses for this engine's device, {' or '.join(names)}; given: {given}"
        )
    return endpoints.pop()
