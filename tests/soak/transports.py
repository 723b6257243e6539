"""The ways by which tensors reach the server: over HTTP, or next to it over groups, shared memory, sockets and files.

A `Send` takes one bucket and the fields that every bucket carries, and returns the server's answer.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import pickle
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import torch
import zmq
from safetensors.torch import save, save_file

from tests.announcements import bucket_fields
from tests.faults.pulls import Encoding, Publisher
from tests.parameter_server_stand_in import ParameterServerStandIn, file_system_sharing
from tests.soak.calls import RECEIVE_FAILED, Calls
from tests.tensor_sender import make_payload
from weight_sync.bucket import pack
from weight_sync.delta.encoder import FRAME_BYTES, DeltaEncoder
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group

Tensors = Mapping[str, torch.Tensor]
Named = Sequence[tuple[str, torch.Tensor]]
Fields = Mapping[str, Any]  # weight_version, update_id
Send = Callable[[Named, Fields], httpx.Response]

GROUP_TIMEOUT_S = 15.0
MAX_JOINS = 3
_NUMBERS = itertools.count()


class Group:
    """Rank 0 of a gloo group with the engine's ranks, in this process; joined anew after a refused bucket ended it."""

    def __init__(self, calls: Calls, ranks: int) -> None:
        self._calls = calls
        self._ranks = ranks
        self._handle: GroupHandle | None = None
        self._pool = ThreadPoolExecutor(1)

    def send(self, messages: Sequence[torch.Tensor], named: Named, load_format: str | None, fields: Fields) -> Any:
        """Send a bucket, announced as `named` and broadcast as `messages`; return the answer."""
        handle = self._joined()
        body = bucket_fields(named, handle.name, load_format) | dict(fields)
        answer = self._pool.submit(self._calls.post, "/update_weights_from_distributed", body, RECEIVE_FAILED)
        works = [handle.start_broadcast(message, GROUP_TIMEOUT_S) for message in messages]
        try:
            if answer.result().status_code == 200:
                for work in works:
                    handle.finish(work, time.monotonic() + GROUP_TIMEOUT_S)
                return answer.result()
        except TransportError as error:
            self._calls.complain(f"a bucket was taken, and its broadcast failed: {error}")
        self.leave()  # the engine may not have received a refused bucket
        return answer.result()

    def leave(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._calls.post("/destroy_weights_update_group", {"group_name": handle.name})
            handle.destroy()

    def _joined(self) -> GroupHandle:
        for _ in range(MAX_JOINS):
            if self._handle is None:
                self._handle = self._join()
        if self._handle is None:
            raise TransportError(f"the engine did not join in {MAX_JOINS} tries")
        return self._handle

    def _join(self) -> GroupHandle | None:
        """Join a group with the engine; return None if the engine did not join, as after another client's abort."""
        port, name, world_size = free_port(), f"soak-{next(_NUMBERS)}", 1 + self._ranks
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
        body |= {"group_name": name, "backend": "gloo"}
        answer = self._pool.submit(self._calls.post, "/init_weights_update_group", body, RECEIVE_FAILED)
        try:
            handle = init_process_group("127.0.0.1", port, 0, world_size, name, "gloo", GROUP_TIMEOUT_S)
        except TransportError:
            answer.result()
            return None
        if answer.result().status_code == 200:
            return handle
        handle.destroy()
        return None


class Transports:
    """`sends`: the ways of a bucket by name.  `base` returns the tensors in force, for deltas."""

    def __init__(self, calls: Calls, ranks: int, base: Callable[[], Tensors]) -> None:
        self._calls = calls
        self._ranks = ranks
        self._base = base
        self.group = Group(calls, ranks)
        self.sends: dict[str, Send] = {
            "broadcast, tensor by tensor": self._tensor_by_tensor,
            "broadcast, flattened": self._flattened,
            "broadcast, delta": self._delta,
            "pickle": self._pickle,
            "pickle, shared memory": self._shared_pickle,
            "pickle, flattened": self._flattened_pickle,
            "safetensors": self._safetensors,
            "safetensors, shared memory": self._shared_safetensors,
        }
        if ranks == 1:
            self.sends["parameter server"] = self._parameter_server

    def _tensor_by_tensor(self, named: Named, fields: Fields) -> httpx.Response:
        return self.group.send([tensor.clone() for _, tensor in named], named, None, fields)

    def _flattened(self, named: Named, fields: Fields) -> httpx.Response:
        ordered = sorted(named, key=lambda item: -item[1].dtype.itemsize)
        return self.group.send([pack(ordered)], ordered, "flattened_bucket", fields)

    def _delta(self, named: Named, fields: Fields) -> httpx.Response:
        base = self._base()
        (payload,) = DeltaEncoder([(name, base[name]) for name, _ in named]).encode(named).payloads()
        frame = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return self.group.send([frame], [("delta", frame)], "delta", fields)

    def _pickle(self, named: Named, fields: Fields) -> httpx.Response:
        return self._tensors({"serialized_named_tensors": [_base64(pickle.dumps(list(named)))]}, fields)

    def _shared_pickle(self, named: Named, fields: Fields) -> httpx.Response:
        return self._payload("list", named, {}, fields)

    def _flattened_pickle(self, named: Named, fields: Fields) -> httpx.Response:
        return self._payload("flattened", named, {"load_format": "flattened_bucket"}, fields)

    def _payload(self, form: str, named: Named, body: Fields, fields: Fields) -> httpx.Response:
        keep: list[Any] = [[(name, tensor.clone()) for name, tensor in named]]
        with file_system_sharing():
            payloads = [_base64(make_payload(form, keep[0], keep)) for _ in range(self._ranks)]
        return self._tensors({"serialized_named_tensors": payloads, **body}, fields)

    def _safetensors(self, named: Named, fields: Fields) -> httpx.Response:
        content = _base64(save(dict(named)))
        return self._tensors({"serialized_named_tensors": [content], "format": "safetensors"}, fields)

    def _shared_safetensors(self, named: Named, fields: Fields) -> httpx.Response:
        content = save(dict(named))
        memory = SharedMemory(create=True, size=len(content))
        try:
            assert memory.buf is not None
            memory.buf[: len(content)] = content
            body = {"shm_name": memory.name, "shm_bytes": len(content), "format": "safetensors"}
            return self._tensors(body, fields)
        finally:
            memory.close()
            memory.unlink()

    def _parameter_server(self, named: Named, fields: Fields) -> httpx.Response:
        with ParameterServerStandIn(1 << 16, "pickle") as server:
            speaking = Thread(target=_speak, args=(server, named), daemon=True)
            speaking.start()
            body = {"zmq_handles": server.handles, **fields}
            answer = self._calls.post("/update_weights_from_ipc", body, may=RECEIVE_FAILED)
            speaking.join(GROUP_TIMEOUT_S)
        return answer

    def _tensors(self, body: Fields, fields: Fields) -> httpx.Response:
        return self._calls.post("/update_weights_from_tensor", {**body, **fields})


class Folders:
    """Checkpoint folders and published versions on this machine, from which a server can refresh itself."""

    def __init__(self, calls: Calls, model: Path, scratch: Path, tensors: Tensors) -> None:
        self._calls = calls
        self._model = model
        self._scratch = scratch
        self._publisher = Publisher(scratch, tensors, FRAME_BYTES)

    @property
    def published(self) -> Tensors:
        return self._publisher.tensors

    def load(self, tensors: Tensors, label: str, *, damaged: bool = False) -> httpx.Response:
        """Call update_weights_from_disk for a new folder.  `damaged`: its file was not written to its end."""
        folder = self._scratch / f"checkpoint-{next(_NUMBERS)}"
        folder.mkdir()
        try:
            for file in self._model.glob("*.json"):
                if "index" not in file.name:
                    shutil.copy(file, folder)
            file = folder / "model.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            if damaged:
                file.write_bytes(file.read_bytes()[:-100])
            body = {"model_path": str(folder), "weight_version": label}
            return self._calls.post("/update_weights_from_disk", body)
        finally:
            shutil.rmtree(folder)

    def pull(self, tensors: Tensors, label: str, encoding: Encoding, *, damaged: bool = False) -> httpx.Response:
        """Publish one more version and call pull_weights.  `damaged`: its file is cut; it is withdrawn afterwards."""
        folder = self._publisher.publish(tensors, encoding)
        if damaged:
            self._publisher.damage(folder, "truncated", part=0.5)
        answer = self._calls.post("/pull_weights", self._publisher.fields | {"weight_version": label})
        if damaged:
            self._publisher.retract()
        return answer


def _speak(server: ParameterServerStandIn, named: Named) -> None:
    with contextlib.suppress(RuntimeError, zmq.ZMQError):  # refused, or hung up: only the answer over HTTP counts
        server.update(named)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
