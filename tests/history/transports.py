"""The ways by which weights reach the engine: one entry each.

A transport turns a call's tensors into a weight verb, and makes the engine's side of it find them.  It also knows two
ways to go wrong, `died` and `cut`; what is wrong with the tensors themselves is decided before.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from threading import Thread
from typing import Any, Literal

import torch
import zmq
from safetensors.torch import save, save_file

from rollout.core.message import ControlReqInput
from rollout.core.weight_io_struct import (
    PullWeightsReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.history.driver import Driver
from tests.parameter_server_stand_in import ParameterServerStandIn
from tests.sglang_payloads import BUCKET_MODULES, classes_in, flattened
from weight_sync.bucket import pack
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_bytes, publish_encoded
from weight_sync.delta.version_dir import version_path
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.delta import DELTA
from weight_sync.receivers.distributed import FLATTENED_BUCKET
from weight_sync.tensor_meta import dtype_name

Named = list[tuple[str, torch.Tensor]]
Verb = tuple[type[ControlReqInput], dict[str, Any]]
_IPC_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Call:
    """Tensors that one verb is to bring.  `seam` is called in the middle of it where the transport has a middle."""

    number: int
    named: Named
    fault: Literal["died", "cut"] | None
    seam: Callable[[], None]

    @property
    def is_plain(self) -> bool:
        """Whether it is what a file or a delta can hold: some tensors, each name once."""
        return 0 < len(self.named) == len(dict(self.named))


@dataclass(frozen=True)
class Transport:
    """`make` returns the verb that brings a call's tensors, without `weight_version`."""

    make: Callable[[Driver, Call], Verb]
    is_refresh: bool = False  # a call outside begin and end is a full refresh of its own, paused or not
    is_pull: bool = False  # brings a whole published version, never into an open refresh
    is_delta: bool = False  # needs the base in the model
    casts: bool = False  # takes other floating-point types


# --- update_weights_from_distributed -----------------------------------------------------------------------------


class ScriptedGroup(GroupHandle):
    """A joined group in which the trainer's broadcasts are already under way."""

    def __init__(self, name: str, messages: list[torch.Tensor], call: Call) -> None:
        super().__init__(name, rank=1, world_size=2, backend="gloo", timeout_s=1.0, process_group=None)
        self._messages = messages
        self._call = call
        self._middle = len(messages) // 2
        self._count = 0

    def start_broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        if self._count == self._middle:
            self._call.seam()
            if self._call.fault == "died":
                self.broken = True
                raise TransportError(f"broadcast in group {self.name!r} failed: the peer is gone")
        message = self._messages[self._count]
        if self._call.fault == "cut" and self._count == self._middle:
            message = message[: message.numel() // 2]
        self._count += 1
        tensor[: message.numel()].copy_(message)
        return None

    def finish(self, work: Any, deadline: float) -> None:
        """The message was there at once."""


def distributed(driver: Driver, call: Call) -> Verb:
    """By turns a flattened bucket and a broadcast per tensor."""
    as_bucket = call.number % 2 == 0
    messages = [pack(call.named)] if as_bucket else [pack([item]) for item in call.named]
    return _broadcast(driver, call, call.named, messages, FLATTENED_BUCKET if as_bucket else None)


def delta(driver: Driver, call: Call) -> Verb:
    """A frame over what is in force.  What has no base there is a delta of zeros, for the engine to refuse."""
    base = driver.expected.versions[driver.expected.current]
    if base is None or not call.is_plain:
        return distributed(driver, call)
    known = {name: base[name] for name, tensor in call.named if name in base and _alike(base[name], tensor)}
    encoder = DeltaEncoder([(name, known.get(name, torch.zeros_like(tensor))) for name, tensor in call.named])
    (payload,) = encoder.encode(call.named).payloads()
    message = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return _broadcast(driver, call, [("delta", message)], [message], DELTA)


def _broadcast(driver: Driver, call: Call, named: Named, messages: list[torch.Tensor], load_format: str | None) -> Verb:
    group_name = f"group{call.number}"
    driver.updater.groups._groups[group_name] = ScriptedGroup(group_name, messages, call)
    return UpdateWeightsFromDistributedReqInput, {
        "names": [name for name, _ in named],
        "dtypes": [dtype_name(tensor.dtype) for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        "group_name": group_name,
        "load_format": load_format,
    }


def _alike(base: torch.Tensor, tensor: torch.Tensor) -> bool:
    return base.dtype == tensor.dtype and base.shape == tensor.shape


# --- update_weights_from_tensor ----------------------------------------------------------------------------------


def tensor(driver: Driver, call: Call) -> Verb:
    """By turns the two pickled forms, safetensors in the call, and safetensors in shared memory."""
    form = call.number % 4 if call.is_plain else 0
    verb = UpdateWeightsFromTensorReqInput
    if call.fault == "died":
        return verb, {"format": "safetensors", "shm_name": f"gone{call.number}", "shm_bytes": 1000}
    if form == 0:
        content = pickle.dumps(call.named)
    elif form == 1:
        with classes_in(BUCKET_MODULES[0]):
            content = pickle.dumps(flattened(call.named))
    else:
        content = save(dict(call.named))
    if call.fault == "cut":
        content = content[: len(content) // 2]
    if form < 2:
        return verb, {"payload": bytearray(content), "load_format": FLATTENED_BUCKET if form == 1 else None}
    if form == 2:
        return verb, {"payload": bytearray(content), "format": "safetensors"}
    segment = SharedMemory(create=True, size=len(content))
    driver.at_exit(segment.unlink)
    driver.at_exit(segment.close)
    assert segment.buf is not None
    segment.buf[: len(content)] = content
    return verb, {"format": "safetensors", "shm_name": segment.name, "shm_bytes": len(content)}


# --- update_weights_from_ipc -------------------------------------------------------------------------------------


def ipc(driver: Driver, call: Call) -> Verb:
    """A parameter server that speaks in a thread of its own, by turns with and without pickles."""
    server = ParameterServerStandIn(_IPC_BUCKET_BYTES, "json" if call.number % 2 else "pickle")
    server.socket.rcvtimeo = server.socket.sndtimeo = 2000
    if call.fault is not None:
        bad = server.encode(RuntimeError("the sender failed")) if call.fault == "died" else b"half a mess"
        server.rewrite = lambda index, message: bad
    thread = Thread(target=_speak, args=(server, call.named), daemon=True)
    thread.start()
    driver.at_exit(server.close)
    driver.at_exit(thread.join)
    return UpdateWeightsFromIPCReqInput, {"zmq_handles": server.handles}


def _speak(server: ParameterServerStandIn, named: Named) -> None:
    try:
        server.update(named)
    except (RuntimeError, zmq.ZMQError):
        return  # refused, or the engine has hung up: the engine's answer is what is checked


# --- update_weights_from_disk, pull_weights ----------------------------------------------------------------------


def disk(driver: Driver, call: Call) -> Verb:
    """A checkpoint folder without config and index; a tensor that comes twice is in two files."""
    folder = driver.scratch / f"call{call.number}"
    folder.mkdir()
    file = folder / "model.safetensors"
    if call.fault != "died":
        save_file(dict(call.named), file)
        if len(dict(call.named)) < len(call.named):
            save_file(dict(call.named[-1:]), folder / "more.safetensors")
    if call.fault == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    return UpdateWeightsFromDiskReqInput, {"model_path": str(folder)}


def pull(driver: Driver, call: Call) -> Verb:
    """One more published version, in each encoding by turns, into the local checkpoint and memory."""
    source, versions = driver.scratch / "source", driver.published
    for damaged, content in driver.damaged.items():
        damaged.write_bytes(content)  # a sender publishes again what did not arrive whole
    driver.damaged.clear()
    number = len(versions)
    old, new = versions[-1], {**versions[-1], **dict(call.named)}
    if call.number % 3:
        publish_bytes(source, number, old, new, encoding=("xor", "overwrite")[call.number % 3 - 1])
    else:
        publish_encoded(source, number, DeltaEncoder(old.items()).encode(new.items()))
    versions.append(new)
    if call.fault == "cut":
        file = max(version_path(source, number).iterdir(), key=lambda path: path.stat().st_size)
        driver.damaged[file] = file.read_bytes()
        file.write_bytes(driver.damaged[file][:-100])
    return PullWeightsReqInput, {
        "local_checkpoint_dir": str(driver.scratch / "local"),
        "source_dir": str(driver.scratch / "nowhere" if call.fault == "died" else source),
        "target_version": number,
        "update_memory": True,
    }


TRANSPORTS: dict[str, Transport] = {
    "distributed": Transport(distributed),
    "delta": Transport(delta, is_delta=True),
    "tensor": Transport(tensor),
    "ipc": Transport(ipc),
    "disk": Transport(disk, is_refresh=True, casts=True),
    "pull": Transport(pull, is_refresh=True, is_pull=True),
}
