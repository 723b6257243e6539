"""A trainer in a process of its own that makes payloads of `update_weights_from_tensor` and keeps their memory.

It reads requests from its standard input, one JSON object a line, and answers each with one line of base64.
"""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file

from tests.sglang_payloads import (
    BUCKET_MODULES,
    LOCAL_MODULES,
    LocalSerializedTensor,
    classes_in,
    flattened,
    forking_pickle,
)


class TensorSender:
    """Holds `tensors` in another process.  Its shared memory is torch's, one file for each tensor that it pickles; on a
    CUDA `device` it is the device's, by its handle."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], folder: Path, strategy: str = "file_system", device: str = "cpu"
    ) -> None:
        file = folder / "sender.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tensor_sender", str(file), strategy, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def payload(self, form: str, names: list[str], scale: float = 1.0, drop: bool = False) -> str:
        """Return base64 of the tensors times `scale`.  `form`: list, plain, flattened, bucket_object or local.

        `drop`: the sender lets go of its memory at once, so that it lives by the reader's count alone.
        """
        return self._ask(form=form, names=names, scale=scale, drop=drop)

    def let_go(self) -> None:
        """Let the sender drop all that it made."""
        self._ask(form="none", names=[], scale=1.0, drop=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def _ask(self, **command: Any) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the sender ended"
        return answer.decode().strip()


def make_payload(form: str, named: list[tuple[str, torch.Tensor]], keep: list[Any]) -> bytes:
    if form == "plain":
        return pickle.dumps(named)
    if form == "local":
        with classes_in(LOCAL_MODULES[0]):
            return forking_pickle([(name, LocalSerializedTensor([forking_pickle(each)])) for name, each in named])
    if form == "flattened":
        content = flattened(named)
        keep.append(content)
        with classes_in(BUCKET_MODULES[0]):
            return forking_pickle(content)
    assert form == "list", form
    return forking_pickle(named)


def main() -> None:
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy(sys.argv[2])
    tensors = load_file(sys.argv[1], device=sys.argv[3])
    keep: list[Any] = []
    for line in sys.stdin:
        command = json.loads(line)
        if command["drop"]:
            keep.clear()
        payload = b""
        if command["form"] != "none":
            kept: list[Any] = []
            named = [(name, tensors[name] * command["scale"]) for name in command["names"]]
            payload = make_payload(command["form"], named, kept)
            if sys.argv[3] != "cpu":
                torch.cuda.synchronize()  # who opens the memory reads it at once
            if not command["drop"]:
                keep.extend([named, kept])
            del named, kept
        print(base64.b64encode(payload).decode(), flush=True)


if __name__ == "__main__":
    main()
