"""The transports by which a bucket reaches the engine, and damage to its bytes on the way.

A transport turns a call's tensors into a weight verb and plays the sender's end in this process.  Trainers that are
processes of their own are in `killed`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
import zmq
from safetensors.torch import save, save_file

from rollout.core.messages.message import ControlReqInput
from rollout.core.messages.sender_memory import SenderMemory
from rollout.core.messages.weights import (
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests import sglang_payloads
from tests.announcements import bucket_fields
from tests.faults.harness import RefreshHarness
from tests.parameter_server_stand_in import ParameterServerStandIn
from weight_sync.bucket import pack
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.delta import DELTA
from weight_sync.receivers.distributed import FLATTENED_BUCKET, PIECES
from weight_sync.receivers.memory import notice_of
from weight_sync.sealed_memory import SealedMemory

Named = list[tuple[str, torch.Tensor]]
Verb = tuple[type[ControlReqInput], dict[str, Any]]
Damage = Literal[
    "flipped",  # one bit
    "truncated",  # half of it comes
    "killed",  # the sender dies in the middle
    "failed",  # the sender reports a failure of its own; ipc
    "vanished",  # files are removed before they are read
    "reordered",  # files, or tensors in them, take each other's places; published versions
]
_IPC_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Call:
    """Tensors that one verb is to bring.

    `number` counts calls; variants of a transport take turns by it.  `base`: the engine's tensors, for deltas.
    `seam` is called in the middle of the transfer, where the transport has a middle.
    """

    number: int
    named: Named
    base: Mapping[str, torch.Tensor] = field(default_factory=dict)
    damage: Damage | None = None
    seam: Callable[[], None] = lambda: None


Send = Callable[[RefreshHarness, Call], Verb | None]
"""Returns the verb that brings a call's tensors, without `weight_version`; None: the sender died before its call."""


# --- update_weights_from_distributed -----------------------------------------------------------------------------


class PlayedGroup(GroupHandle):
    """A joined group in which the sender's broadcasts are already under way."""

    def __init__(self, name: str, messages: list[torch.Tensor], call: Call) -> None:
        super().__init__(name, rank=1, world_size=2, backend="gloo", timeout_s=1.0, process_group=None)
        self.messages = messages
        self._call = call
        self._count = 0

    def start_broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        message = self.messages[self._count]
        if self._count == len(self.messages) // 2:
            self._call.seam()
            if self._call.damage == "killed":
                self.broken = True
                raise TransportError(f"broadcast in group {self.name!r} failed: the peer is gone")
            message = _damaged(message, self._call.damage)
        self._count += 1
        tensor[: message.numel()].copy_(message)  # gloo does not report how long a message was
        return None

    def finish(self, work: Any, deadline: float) -> None:
        """Return at once: the message is there."""


def distributed(engine: RefreshHarness, call: Call) -> Verb:
    """Send one broadcast per tensor."""
    return _broadcast(engine, call, call.named, [pack([item]) for item in call.named], None)


def flattened(engine: RefreshHarness, call: Call) -> Verb:
    return _broadcast(engine, call, call.named, [pack(call.named)], FLATTENED_BUCKET)


def memory(engine: RefreshHarness, call: Call) -> Verb:
    """Have the tensors in memory of this process, and broadcast a notice; a sender that is killed sends none."""
    content = pack(call.named)
    lent = SealedMemory(max(content.numel(), 1))
    sent = _damaged(content, call.damage)
    lent.content[: sent.numel()] = sent
    engine.at_clean_up(lambda: lent.content.zero_())  # which holds it until then
    # The file cannot be cut off; a call may state another size.
    size = max(sent.numel(), 1) if call.damage == "truncated" else lent.address.num_bytes
    where = SenderMemory(**lent.address._replace(num_bytes=size)._asdict())
    notices = [notice_of(lent.address, 0, content.numel())] if call.named else []
    noticed = replace(call, damage="killed" if call.damage == "killed" else None)
    verb, fields = _broadcast(engine, noticed, call.named, notices, PIECES)
    return verb, fields | {"memory": where}


def delta(engine: RefreshHarness, call: Call) -> Verb:
    """Send a frame of deltas over `base`.  A tensor that it lacks or has in another form is a delta over zeros."""
    base = [
        (name, call.base[name] if _is_alike(call.base.get(name), tensor) else torch.zeros_like(tensor))
        for name, tensor in call.named
    ]
    (payload,) = DeltaEncoder(base).encode(call.named).payloads()
    frame = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return _broadcast(engine, call, [("delta", frame)], [frame], DELTA)


def _broadcast(
    engine: RefreshHarness, call: Call, named: Named, messages: list[torch.Tensor], load_format: str | None
) -> Verb:
    group_name = f"group{call.number}"
    engine.updater.groups._groups[group_name] = PlayedGroup(group_name, messages, call)
    return UpdateWeightsFromDistributedReqInput, bucket_fields(named, group_name, load_format)


def _is_alike(base: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return base is not None and base.dtype == tensor.dtype and base.shape == tensor.shape


# --- update_weights_from_tensor ----------------------------------------------------------------------------------


def tensor_pickle(engine: RefreshHarness, call: Call) -> Verb | None:
    return _payload(call, pickle.dumps(call.named))


def tensor_flattened(engine: RefreshHarness, call: Call) -> Verb | None:
    """Send SGLang's flattened bucket, pickled."""
    with sglang_payloads.classes_in(sglang_payloads.BUCKET_MODULES[0]):
        content = pickle.dumps(sglang_payloads.flattened(call.named))
    return _payload(call, content, load_format=FLATTENED_BUCKET)


def tensor_inline(engine: RefreshHarness, call: Call) -> Verb | None:
    """Send safetensors within the call."""
    return _payload(call, save(dict(call.named)), format="safetensors")


def _payload(call: Call, content: bytes, **fields: Any) -> Verb | None:
    if call.damage == "killed":
        return None
    return UpdateWeightsFromTensorReqInput, {"payload": bytearray(damaged_bytes(content, call.damage)), **fields}


def tensor_safetensors(engine: RefreshHarness, call: Call) -> Verb:
    """Send tensors in shared memory, which a sender that is killed takes with it."""
    content = damaged_bytes(save(dict(call.named)), call.damage)
    segment = SharedMemory(create=True, size=len(content))
    assert segment.buf is not None
    segment.buf[: len(content)] = content
    fields = {"format": "safetensors", "shm_name": segment.name, "shm_bytes": len(content)}

    def remove() -> None:
        segment.close()
        segment.unlink()

    if call.damage == "killed":
        remove()
    else:
        engine.at_clean_up(remove)
    return UpdateWeightsFromTensorReqInput, fields


# --- update_weights_from_ipc -------------------------------------------------------------------------------------


def ipc(engine: RefreshHarness, call: Call) -> Verb:
    """Start a parameter server in a thread of its own; it sends JSON and pickles by turns."""
    server = ParameterServerStandIn(_IPC_BUCKET_BYTES, "json" if call.number % 2 else "pickle")
    server.socket.rcvtimeo = server.socket.sndtimeo = engine.sender_timeout_ms
    if call.damage is not None:
        server.rewrite = lambda _, message: _damaged_message(server, message, call.damage)
    thread = Thread(target=_speak, args=(server, call.named), daemon=True)
    thread.start()
    engine.at_clean_up(thread.join)
    return UpdateWeightsFromIPCReqInput, {"zmq_handles": server.handles}


class _Killed(Exception):
    """The sender sends nothing more."""


def _damaged_message(server: ParameterServerStandIn, message: Any, damage: Damage | None) -> Any:
    if damage == "killed":
        raise _Killed
    if damage == "failed":
        return server.encode(RuntimeError("the sender failed"))
    if damage == "truncated":
        encoded = server.encode(message)
        return encoded[: len(encoded) // 2]
    middle = message[len(message) // 2]
    server.buffer[middle["offset"]] ^= 1
    return message


def _speak(server: ParameterServerStandIn, named: Named) -> None:
    try:
        server.update(named)
    except (_Killed, RuntimeError, OSError, zmq.ZMQError):
        return  # refused, or the engine has hung up: the engine's answer is what is checked
    finally:
        server.close()


# --- update_weights_from_disk ------------------------------------------------------------------------------------


def disk(engine: RefreshHarness, call: Call) -> Verb | None:
    """Write a folder of two files.  A sender that is killed leaves the second one half-written, and does not call."""
    folder = engine.scratch / f"call{call.number}"
    folder.mkdir()
    middle = len(call.named) // 2
    for number, part in enumerate((call.named[:middle], call.named[middle:])):
        save_file(dict(part), folder / f"model-{number}.safetensors")
    last = folder / "model-1.safetensors"
    if call.damage in ("flipped", "truncated", "killed"):
        how: Damage = "flipped" if call.damage == "flipped" else "truncated"
        last.write_bytes(damaged_bytes(last.read_bytes(), how))
    if call.damage == "vanished":
        remove_files(folder)
    return None if call.damage == "killed" else (UpdateWeightsFromDiskReqInput, {"model_path": str(folder)})


def remove_files(folder: Path) -> None:
    """Remove every file of a folder, as when it is cleaned up too early."""
    for path in folder.iterdir():
        path.unlink()


# --- bytes -------------------------------------------------------------------------------------------------------


def _damaged(content: torch.Tensor, damage: Damage | None) -> torch.Tensor:
    """Damage uint8 [bytes]: flip the lowest bit of a 16-bit word in the last quarter, or cut off the last half."""
    if damage == "truncated":
        return content[: content.numel() // 2]
    if damage == "flipped":
        changed = content.clone()
        changed[content.numel() * 3 // 4 // 2 * 2] ^= 1
        return changed
    return content


def damaged_bytes(content: bytes, damage: Damage | None) -> bytes:
    return _damaged(torch.frombuffer(bytearray(content), dtype=torch.uint8), damage).numpy().tobytes()


# The transports in the table of the matrix.
SENDS: dict[str, Send] = {
    "distributed": distributed,
    "flattened": flattened,
    "memory": memory,
    "delta": delta,
    "tensor pickle": tensor_pickle,
    "tensor safetensors": tensor_safetensors,
    "disk": disk,
    "ipc": ipc,
}
