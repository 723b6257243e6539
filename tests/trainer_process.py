"""A trainer in a process of its own that only broadcasts: rank 0 of a gloo or NCCL group.

It reads its tasks from its standard input.  The control calls are the test's, so that a test decides at which step of
the engine each of them comes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from weight_sync.bucket import pack
from weight_sync.process_group import free_port, init_process_group
from weight_sync.tensor_meta import dtype_name

TIMEOUT_S = 30.0


class TrainerProcess:
    """Holds `tensors`; `join_fields` and `bucket_fields` are the fields of the matching control calls."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        folder: Path,
        engine_ranks: int = 1,
        backend: str = "gloo",
        device: str = "cpu",
    ) -> None:
        self.tensors = tensors
        self.backend = backend
        self.world_size = 1 + engine_ranks
        self.port = free_port()
        self.group_name = f"group-{uuid.uuid4().hex}"  # a process can hold a name only once, ports come again
        file = folder / f"trainer-{self.port}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        arguments = [str(self.port), self.group_name, str(file), str(engine_ranks), backend, device]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_process", *arguments],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )

    def join_fields(self) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self.world_size,
            "group_name": self.group_name,
            "backend": self.backend,
        }

    def send(
        self, names: list[str], load_format: str | None = "flattened_bucket", cut_bytes: int = 0
    ) -> dict[str, Any]:
        """Start to broadcast a bucket, its last `cut_bytes` left out; returns the fields that announce it."""
        command = {"names": names, "load_format": load_format, "cut_bytes": cut_bytes}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return {
            "names": names,
            "dtypes": [dtype_name(self.tensors[name].dtype) for name in names],
            "shapes": [list(self.tensors[name].shape) for name in names],
            "group_name": self.group_name,
            "load_format": load_format,
        }

    def wait_ready(self) -> None:
        """Wait until it can be joined: a process takes some seconds to start on a busy machine."""
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the trainer does not listen")

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait(10)


def _main(port: str, group_name: str, file: str, engine_ranks: str, backend: str, device: str) -> None:
    tensors = load_file(file, device=device)
    if device != "cpu":
        torch.cuda.set_device(device)
    group = init_process_group("127.0.0.1", int(port), 0, 1 + int(engine_ranks), group_name, backend, TIMEOUT_S)
    for line in sys.stdin:
        command = json.loads(line)
        named = [(name, tensors[name]) for name in command["names"]]
        if command["load_format"] == "flattened_bucket":
            flat = pack(named)
            messages = [flat[: flat.numel() - command["cut_bytes"]].clone()]
        else:
            messages = [tensor.view(-1).view(torch.uint8) for _, tensor in named]  # gloo has no float8
        for message in messages:
            group.start_broadcast(message).wait()


if __name__ == "__main__":
    _main(*sys.argv[1:])
