"""Trainers that are processes of their own, over real groups and sockets, and are killed in the middle of a bucket.

This process has the engine and makes the control calls; the tensors come from another process, which is killed.  A new
process makes the good refresh afterwards.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.sender_memory import SenderMemory
from rollout.core.messages.weights import (
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
)
from tests.announcements import bucket_fields
from tests.faults.cells import Cell, Fault
from tests.faults.contents import Version
from tests.faults.engines import Engine, Wrong
from tests.faults.trainers import BUCKETS, Sabotage, Trainer
from tests.faults.transports import SENDS, Call, Damage, Named, PlayedGroup, Verb
from tests.parameter_server_stand_in import ParameterServerStandIn
from weight_sync.bucket import pack
from weight_sync.process_group import free_port, init_process_group
from weight_sync.receivers.distributed import PIECES
from weight_sync.receivers.memory import notice_of
from weight_sync.sealed_memory import SealedMemory
from weight_sync.staging import StagingMode

TRANSPORTS = ("distributed", "flattened", "memory", "delta", "ipc")
PRELOAD = ["torch", "tests.faults.killed", "tests.faults.ranks", "tests.faults.stopped"]
_TIMEOUT_S = 20.0
_BUCKET_BYTES = 1 << 16

_faults = (
    Fault("sender's process killed", BUCKETS, "KEPT", Sabotage("first", damage="killed")),
    Fault("sender's process killed", ("between",), "KEPT", Sabotage("between", dies=True)),
)


def cells(staging: StagingMode, transport: str) -> Iterator[Cell]:
    for fault in _faults:
        for point in fault.points:
            yield Cell(fault, point, transport, staging)


def forkserver() -> ForkServerContext:
    """Return a context whose processes start with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class ProcessTrainer(Trainer):
    """A trainer whose tensors come from a process, which is started when there is none."""

    def __init__(self, engine: Engine, transport: str) -> None:
        super().__init__(engine, transport)
        self._sender: Sender | None = None

    def refresh(self, target: Version) -> None:
        super().refresh(target)
        self._kill()  # another trainer makes the next refresh

    def fail(self, target: Version, sabotage: Sabotage) -> list[ControlReqOutput]:
        answers = super().fail(target, sabotage)
        self._kill()
        return answers

    def send(
        self, named: Named, label: str, damage: Damage | None = None, update_id: str | None = None
    ) -> list[ControlReqOutput]:
        engine = self.engine
        if self._sender is None:
            self._sender = self._new_sender()
        call = Call(engine.number(), named, self._base)
        verb, fields = self._sender.start(engine, self.transport, call, stops=damage == "killed")
        request_id = engine.post(verb, weight_version=label, update_id=update_id, **fields)
        engine.tick()
        if damage == "killed":
            self._sender.wait_until_it_stops()
            self._kill()
        return [engine.answer_to(request_id, verb.__name__)]

    def _new_sender(self) -> Sender:
        if self.transport == "ipc":
            return IpcSender()
        return MemorySender(self.engine, _lend) if self.transport == "memory" else GroupSender(self.engine, _broadcast)

    def _kill(self) -> None:
        if self._sender is not None:
            self._sender.kill()
            self._sender = None


class Sender:
    """A process that has tensors to send; `start` makes it send some and returns the verb that brings them.

    `stops`: the process stands still in the middle of them.
    """

    def __init__(self, target: Any, *arguments: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = forkserver().Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, engine: Engine, transport: str, call: Call, stops: bool) -> Verb:
        raise NotImplementedError

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_TIMEOUT_S)
        self._pipe.close()

    def wait_until_it_stops(self) -> None:
        self.receive()

    def receive(self) -> Any:
        """Return the next message of the process.  Raises `Wrong` when none comes."""
        if not self._pipe.poll(_TIMEOUT_S):
            raise Wrong("the sender's process is silent")
        return self._pipe.recv()


class GroupSender(Sender):
    """Rank 0 of a gloo group with the engine."""

    def __init__(self, engine: Engine, target: Any) -> None:
        self._port = free_port()
        self._group_name = f"killed-{self._port}"
        super().__init__(target, self._port, self._group_name)
        joined = engine.call(
            InitWeightsUpdateGroupReqInput,
            master_address="127.0.0.1",
            master_port=self._port,
            rank_offset=1,
            world_size=2,
            group_name=self._group_name,
            backend="gloo",
        )
        if not joined.success:
            raise Wrong(f"no new group can be formed: {joined.message}")

    def start(self, engine: Engine, transport: str, call: Call, stops: bool) -> Verb:
        sent = SENDS[transport](engine, call)
        assert sent is not None
        verb, fields = sent
        played = engine.updater.groups._groups.pop(fields["group_name"])
        assert isinstance(played, PlayedGroup)
        messages = [message.numpy().tobytes() for message in played.messages]
        self._pipe.send((stops, messages[: len(messages) // 2] if stops else messages))
        return verb, fields | {"group_name": self._group_name}


class MemorySender(GroupSender):
    """A sender whose memory the engine maps.  It stops with half of a bucket written."""

    def start(self, engine: Engine, transport: str, call: Call, stops: bool) -> Verb:
        self._pipe.send((stops, pack(call.named).numpy().tobytes()))
        fields = bucket_fields(call.named, self._group_name, PIECES)
        return UpdateWeightsFromDistributedReqInput, fields | {"memory": SenderMemory(**self.receive())}


class IpcSender(Sender):
    """A parameter server; each bucket is a conversation of its own."""

    def __init__(self) -> None:
        super().__init__(_converse)
        self._buffers: list[str] = []

    def start(self, engine: Engine, transport: str, call: Call, stops: bool) -> Verb:
        self._pipe.send((stops, [(name, str(t.dtype), list(t.shape), _bytes_of(t)) for name, t in call.named]))
        handles, buffer = self.receive()
        self._buffers.append(buffer)
        return UpdateWeightsFromIPCReqInput, {"zmq_handles": handles}

    def kill(self) -> None:
        """Kill the sender, then remove its shared memory, which outlives it."""
        super().kill()
        for name in self._buffers:
            with suppress(FileNotFoundError):
                segment = SharedMemory(name)
                segment.close()
                segment.unlink()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _broadcast(pipe: Connection, port: int, group_name: str) -> None:
    """Broadcast each list of messages that comes through the pipe."""
    torch.set_num_threads(1)
    group = init_process_group("127.0.0.1", port, 0, 2, group_name, "gloo", _TIMEOUT_S)
    while True:
        stops, messages = pipe.recv()
        for message in messages:
            group.start_broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8)).wait()
        if stops:
            pipe.send("stopped")


def _lend(pipe: Connection, port: int, group_name: str) -> None:
    """Write each content that comes through the pipe to memory, tell where it is, and broadcast a notice of it."""
    torch.set_num_threads(1)
    group = init_process_group("127.0.0.1", port, 0, 2, group_name, "gloo", _TIMEOUT_S)
    while True:
        stops, content = pipe.recv()
        memory, half = SealedMemory(len(content)), content[: len(content) // 2] if stops else content
        memory.content[: len(half)] = torch.frombuffer(bytearray(half), dtype=torch.uint8)
        pipe.send(memory.address._asdict())
        if stops:
            pipe.send("stopped")
        else:
            group.start_broadcast(notice_of(memory.address, 0, len(content))).wait()


def _converse(pipe: Connection) -> None:
    """Send each list of tensors that comes through the pipe, in a conversation of its own."""
    torch.set_num_threads(1)
    while True:
        stops, described = pipe.recv()
        named = [
            (name, torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype.removeprefix("torch."))).view(shape))
            for name, dtype, shape, content in described
        ]
        with ParameterServerStandIn(_BUCKET_BYTES, "json") as server:
            if stops:
                server.rewrite = lambda _, message: _stand_still(pipe)
            pipe.send((server.handles, json.loads(server.handle())["shm_name"]))
            server.update(named)


def _stand_still(pipe: Connection) -> None:
    pipe.send("stopped")
    pipe.recv()
