"""A stand-in for checkpoint-engine's `ParameterServer` (which needs GPUs): sends the same messages to one worker.

Two halves of one buffer take turns; tensors begin at multiples of 256; a bucket is announced when the answer to the
message before it has come; an answer that is not empty ends it with an exception; two ends.  In this order the package
talks to its own worker, which `test_ipc_package.py` runs against this stand-in.

`form` "pickle": the pickle of `send_pyobj` and torch's reductions, with the buffer in shared memory by file name.
`form` "json": the engine's form without pickle.
`buffer_device` "cuda", with "pickle": the buffer in the memory of this process's CUDA device, by its handle.

As a program, `CHECKPOINT FORM STOP_AT [BUFFER_DEVICE]`: prints its `handles` as a line of JSON, sends the checkpoint,
and stops for ever before bucket STOP_AT (-1: never).
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing
import zmq
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor

ALIGNMENT = 256
WAIT_MS = 20_000

Form = Literal["pickle", "json"]
Named = Sequence[tuple[str, torch.Tensor]]


def plan(named: Named, bucket_bytes: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Divide tensors in order into buckets, each with as many as fit with their starts aligned."""
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    room = 0
    for name, tensor in named:
        size = aligned(tensor.nbytes)
        assert size <= bucket_bytes
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append((name, tensor))
        room -= size
    return buckets


def bucket_bytes_for(named: Named) -> int:
    """Return the program's bucket size: small, for several buckets a checkpoint, but as large as the largest tensor."""
    return max(1 << 17, *(aligned(tensor.nbytes) for _, tensor in named))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class ParameterServerStandIn:
    """`update` sends a whole checkpoint.  `handles` is what the request to the engine carries.

    `rewrite(index, message)` may change the message of bucket `index` (0 is the first bucket) before it is sent, or
    raise; `scribble` overwrites an acknowledged bucket, as the next bucket would.
    """

    def __init__(
        self, bucket_bytes: int = 1024, form: Form = "pickle", device: str = "CPU-0", buffer_device: str = "cpu"
    ) -> None:
        self.form = form
        if buffer_device == "cuda":
            device = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self.answers: list[str] = []
        self.rewrite: Callable[[int, Any], Any] = lambda _, message: message
        self.bucket_bytes = bucket_bytes
        self.endpoint = f"ipc://@checkpoint-engine-stand-in-{uuid.uuid4()}.sock"
        self.handles = {device: self.endpoint}
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.socket.bind(self.endpoint)
        self._shared: SharedMemory | None = None
        if form == "json":
            self._shared = SharedMemory(create=True, size=2 * bucket_bytes)
            self.buffer = torch.frombuffer(self._shared.buf, dtype=torch.uint8)[: 2 * bucket_bytes]
        else:
            self.buffer = torch.zeros(2 * bucket_bytes, dtype=torch.uint8, device=buffer_device)
            with file_system_sharing():
                self.buffer.share_memory_()

    def __enter__(self) -> ParameterServerStandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()
        del self.buffer
        if self._shared is not None:
            self._shared.close()
            self._shared.unlink()
            self._shared = None

    def handle(self) -> bytes:
        if self._shared is not None:
            return json.dumps({"shm_name": self._shared.name, "nbytes": 2 * self.bucket_bytes}).encode()
        with file_system_sharing():
            content = io.BytesIO()
            ForkingPickler(content, 5).dump(reduce_tensor(self.buffer))
            return content.getvalue()

    def update(self, named: Named, *, scribble: bool = True) -> None:
        """Send all tensors in buckets.  Raises `RuntimeError` when the engine refuses, as the package does."""
        self.send(self.handle())
        for index, bucket in enumerate(plan(named, self.bucket_bytes)):
            start = index % 2 * self.bucket_bytes
            message = self.fill(bucket, start)
            self.check(self.receive())
            self.send(self.encode(self.rewrite(index, message)))
            if scribble and index:
                self.buffer[self.bucket_bytes - start :][: self.bucket_bytes].fill_(0x7F)
        self.receive()
        for _ in range(2):
            self.send(self.encode(None))
            self.receive()

    def fill(self, bucket: Named, start: int) -> list[dict[str, Any]]:
        """Write a bucket into the buffer from byte `start` on; returns its message."""
        message = []
        for name, tensor in bucket:
            self.buffer[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
            message.append({"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": start})
            start += aligned(tensor.nbytes)
        if self.buffer.is_cuda:
            torch.cuda.synchronize()
        return message

    def check(self, answer: str) -> None:
        if answer:
            self.send(self.encode(RuntimeError("Some workers failed to update weights")))
            raise RuntimeError(f"failed to update weights due to remote errors: {answer}")

    def encode(self, message: Any) -> bytes:
        if isinstance(message, bytes):
            return message
        if self.form == "pickle":
            return pickle.dumps(message, -1)
        if isinstance(message, Exception):
            return json.dumps({"error": str(message)}).encode()
        return json.dumps(message, default=_jsonable).encode()

    def send(self, data: bytes) -> None:
        self.socket.send(data)

    def receive(self) -> str:
        """Receive the engine's answer, which is empty when all is well."""
        self.answers.append(self.socket.recv().decode())
        return self.answers[-1]


def _jsonable(value: Any) -> str:
    return str(value).removeprefix("torch.")


@contextlib.contextmanager
def file_system_sharing() -> Iterator[None]:
    """Let torch share CPU tensors by file name within the block, so that an unrelated process can open them."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def main() -> None:
    folder, form, stop_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }

    def stop(index: int, message: Any) -> Any:
        if index == stop_at:
            print("stopped", flush=True)
            time.sleep(3600)
        return message

    where = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    size = bucket_bytes_for(list(tensors.items()))
    with ParameterServerStandIn(size, "json" if form == "json" else "pickle", buffer_device=where) as server:
        server.rewrite = stop
        print(json.dumps(server.handles), flush=True)
        server.update(list(tensors.items()))
        print("done", flush=True)


if __name__ == "__main__":
    main()


class Sending:
    """`send(server)` on a thread of its own; `error` is what it raised."""

    def __init__(self, send: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._send = send
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sending:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30.0)
        assert not self._thread.is_alive(), "the sender hangs"

    def _run(self) -> None:
        try:
            self._send()
        except BaseException as error:
            self.error = error


def give_up_at(server: ParameterServerStandIn, bucket: int) -> None:
    """Let the sender send an exception in place of a bucket, and then nothing more; its socket stays open."""

    def rewrite(index: int, message: Any) -> Any:
        if index == bucket:
            server.send(server.encode(RuntimeError("another worker failed")))
            raise SystemExit
        return message

    server.rewrite = rewrite
