"""The ways by which a bucket reaches the engine, and what can happen to its bytes on the way.

A transport turns a call's tensors into a weight verb, and makes the engine's side of it find them.  The sender's end is
played in this process; trainers that are processes of their own are `killed`'s.

Knows bytes.  Does not know which faults there are, or what they should come to.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
from safetensors.torch import save, save_file

from rollout.core.message import ControlReqInput
from rollout.core.weight_io_struct import (
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.faults.contents import Tensors
from tests.faults.engines import Engine
from tests.parameter_server_stand_in import ParameterServerStandIn
from weight_sync.bucket import pack
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.delta import DELTA
from weight_sync.receivers.distributed import FLATTENED_BUCKET
from weight_sync.tensor_meta import dtype_name

Named = list[tuple[str, torch.Tensor]]
Verb = tuple[type[ControlReqInput], dict[str, Any]]
Damage = Literal["flipped", "truncated", "killed", "vanished", "reordered"]  # the last two of files only
_IPC_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Call:
    """Tensors that one verb is to bring.  `base`: what the engine holds, for deltas."""

    named: Named
    base: Tensors
    damage: Damage | None = None


Send = Callable[[Engine, Call], Verb | None]
"""The verb that brings a call's tensors, without its `weight_version`; None: the sender died before it could call."""


# --- update_weights_from_distributed -----------------------------------------------------------------------------


class PlayedGroup(GroupHandle):
    """A joined group in which the sender's broadcasts are already under way."""

    def __init__(self, name: str, messages: list[torch.Tensor], damage: Damage | None) -> None:
        super().__init__(name, rank=1, world_size=2, backend="gloo", timeout_s=1.0, process_group=None)
        self.messages = messages
        self._hit = len(messages) // 2 if damage is not None else -1
        self._damage = damage
        self._count = 0

    def start_broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        message = self.messages[self._count]
        if self._count == self._hit:
            if self._damage == "killed":
                self.broken = True
                raise TransportError(f"broadcast in group {self.name!r} failed: the peer is gone")
            message = _damaged(message, self._damage)
        self._count += 1
        tensor[: message.numel()].copy_(message)  # gloo does not tell how long a message was
        return None

    def finish(self, work: Any, deadline: float) -> None:
        """The message was there at once."""


def distributed(engine: Engine, call: Call) -> Verb:
    """A broadcast per tensor."""
    return _broadcast(engine, call.named, [pack([item]) for item in call.named], None, call.damage)


def flattened(engine: Engine, call: Call) -> Verb:
    return _broadcast(engine, call.named, [pack(call.named)], FLATTENED_BUCKET, call.damage)


def delta(engine: Engine, call: Call) -> Verb:
    """A frame over what is in force.  What the engine does not have is a delta over zeros."""
    base = [(name, call.base.get(name, torch.zeros_like(tensor))) for name, tensor in call.named]
    (payload,) = DeltaEncoder(base).encode(call.named).payloads()
    frame = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return _broadcast(engine, [("delta", frame)], [frame], DELTA, call.damage)


def _broadcast(
    engine: Engine, named: Named, messages: list[torch.Tensor], load_format: str | None, damage: Damage | None
) -> Verb:
    group_name = f"group{engine.number()}"
    engine.updater.groups._groups[group_name] = PlayedGroup(group_name, messages, damage)
    return UpdateWeightsFromDistributedReqInput, {
        "names": [name for name, _ in named],
        "dtypes": [dtype_name(tensor.dtype) for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        "group_name": group_name,
        "load_format": load_format,
    }


# --- update_weights_from_tensor ----------------------------------------------------------------------------------


def tensor_pickle(engine: Engine, call: Call) -> Verb | None:
    if call.damage == "killed":
        return None
    content = torch.frombuffer(bytearray(pickle.dumps(call.named)), dtype=torch.uint8)
    payload = bytearray(_damaged(content, call.damage).numpy().tobytes())
    return UpdateWeightsFromTensorReqInput, {"payload": payload}


def tensor_safetensors(engine: Engine, call: Call) -> Verb:
    """In shared memory, which a sender that is killed takes with it."""
    content = torch.frombuffer(bytearray(save(dict(call.named))), dtype=torch.uint8)
    content = _damaged(content, call.damage)
    segment = SharedMemory(create=True, size=content.numel())
    assert segment.buf is not None
    segment.buf[: content.numel()] = content.numpy().tobytes()
    fields = {"format": "safetensors", "shm_name": segment.name, "shm_bytes": content.numel()}

    def remove() -> None:
        segment.close()
        segment.unlink()

    if call.damage == "killed":
        remove()
    else:
        engine.at_clean_up(remove)
    return UpdateWeightsFromTensorReqInput, fields


# --- update_weights_from_ipc -------------------------------------------------------------------------------------


def ipc(engine: Engine, call: Call) -> Verb:
    """A parameter server that speaks in a thread of its own, by turns with and without pickles."""
    number = engine.number()
    server = ParameterServerStandIn(_IPC_BUCKET_BYTES, "json" if number % 2 else "pickle")
    server.socket.rcvtimeo = server.socket.sndtimeo = 5000
    if call.damage is not None:
        server.rewrite = lambda _, message: _damaged_message(server, message, call.damage)
    thread = Thread(target=_speak, args=(server, call.named), daemon=True)
    thread.start()
    engine.at_clean_up(thread.join)
    return UpdateWeightsFromIPCReqInput, {"zmq_handles": server.handles}


class _Killed(Exception):
    """The sender says no more."""


def _damaged_message(server: ParameterServerStandIn, message: Any, damage: Damage | None) -> Any:
    if damage == "killed":
        raise _Killed
    if damage == "truncated":
        encoded = server.encode(message)
        return encoded[: len(encoded) // 2]
    middle = message[len(message) // 2]
    server.buffer[middle["offset"]] ^= 1
    return message


def _speak(server: ParameterServerStandIn, named: Named) -> None:
    try:
        server.update(named)
    except (_Killed, RuntimeError, OSError):
        return  # refused, or the engine has hung up: the engine's answer is what is checked
    finally:
        server.close()


# --- update_weights_from_disk ------------------------------------------------------------------------------------


def disk(engine: Engine, call: Call) -> Verb | None:
    """A folder of two files.  A sender that is killed leaves one of them, half-written, and does not call."""
    folder = engine.scratch / f"call{engine.number()}"
    folder.mkdir()
    middle = len(call.named) // 2
    for number, part in enumerate((call.named[:middle], call.named[middle:])):
        save_file(dict(part), folder / f"model-{number}.safetensors")
    last = folder / "model-1.safetensors"
    if call.damage in ("flipped", "truncated", "killed"):
        content = torch.frombuffer(bytearray(last.read_bytes()), dtype=torch.uint8)
        last.write_bytes(_damaged(content, "flipped" if call.damage == "flipped" else "truncated").numpy().tobytes())
    if call.damage == "vanished":
        remove_files(folder)
    return None if call.damage == "killed" else (UpdateWeightsFromDiskReqInput, {"model_path": str(folder)})


def remove_files(folder: Path) -> None:
    """Every file of a folder, as when it is cleaned up too early."""
    for path in folder.iterdir():
        path.unlink()


# --- bytes -------------------------------------------------------------------------------------------------------


def _damaged(content: torch.Tensor, damage: Damage | None) -> torch.Tensor:
    """uint8 [bytes] with the lowest bit of a 16-bit word flipped in the last quarter, or its last half cut off."""
    if damage == "truncated":
        return content[: content.numel() // 2]
    if damage == "flipped":
        changed = content.clone()
        changed[content.numel() * 3 // 4 // 2 * 2] ^= 1
        return changed
    return content


SENDS: dict[str, Send] = {
    "distributed": distributed,
    "flattened": flattened,
    "delta": delta,
    "tensor pickle": tensor_pickle,
    "tensor safetensors": tensor_safetensors,
    "disk": disk,
    "ipc": ipc,
}
