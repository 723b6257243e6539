"""Plays the recorded calls of a framework's client, and checks in each answer the fields that the client checks.

A recording is a file of JSON lines, one step each, in `tests/recorded`:

    {"step": name}                                              the next lines belong to this step
    {"call": "POST /path", "body": {...}, "status": 200, "reads": {"meta_info.id": check}}
    {"call": ..., "then": [{"call": ...}]}                      those are made while this one is answered
    {"refresh": "broadcast", "body" or "folder", "factor": 2}   the calls that bring weights: the checkpoint's times 2
    {"holds": 2}                                                the server's tensors are these, each of them
    {"adapter": ...}, {"serves": ...}                           see `tests/replayed_adapters.py`

A check is a value, or {"is": "int"}, {"len": path or number}, {"routes": [layers, k]}.  In bodies "$MODEL", "$FOLDER",
"$PORT" and "$GROUP" stand for what differs from run to run.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import save_file

from tests.model_zoo import logical_tensors
from tests.parameter_server_stand_in import file_system_sharing
from tests.replayed_adapters import assert_serves, send_adapter
from tests.server_process import ServerProcess
from tests.sglang_payloads import classes_in, flattened, forking_pickle
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.process_group import free_port, init_process_group

FOLDER = Path(__file__).parent / "recorded"
TYPES = {"int": int, "str": str, "list": list, "dict": dict, "number": (int, float), "bool": bool}
JOIN_S = 30.0
RUNS_S = 20.0


def steps(recording: str) -> dict[str, list[dict[str, Any]]]:
    """Read the lines of `tests/recorded/<recording>.jsonl` by step."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (FOLDER / f"{recording}.jsonl").read_text().splitlines():
        content = json.loads(line)
        if "step" in content:
            lines = found[content["step"]] = []
        else:
            lines.append(content)
    return found


class Replay:
    """One client and its trainer, against one server."""

    def __init__(self, server: ServerProcess, checkpoint: Path, folder: Path) -> None:
        self.server = server
        self.tensors = logical_tensors(checkpoint)
        self.folder = folder
        self.names = {
            "$MODEL": str(checkpoint),
            "$FOLDER": str(folder),
            "$PORT": free_port(),
            "$GROUP": f"group-{folder.name}",
        }
        self.pool = ThreadPoolExecutor(2)
        self.config = (checkpoint / "config.json").read_bytes()

    def play(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "refresh" in line:
                self.refresh(line)
            elif "holds" in line:
                self.holds(line["holds"])
            elif "adapter" in line:
                send_adapter(self, line)
            elif "serves" in line:
                assert_serves(self, line)
            else:
                self.call(line)

    def call(self, line: dict[str, Any], **more: Any) -> Any:
        """Send it; its answer, checked."""
        method, path = line["call"].split(" ")
        answer = self.pool.submit(self._send, method, path, self._filled(line.get("body")), more)
        if "then" in line:
            self._wait_until_it_runs()
        for inner in line.get("then", ()):
            self.call(inner)
        reply = answer.result(60)
        assert reply.status_code == line.get("status", 200), (line["call"], reply.text)
        content = reply.json() if line.get("reads") else None
        for field, check in line.get("reads", {}).items():
            checked(content, field, check, line)
        return content

    def _wait_until_it_runs(self) -> None:
        deadline = time.monotonic() + RUNS_S
        while not self.server.client.loads()["loads"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline, "the request does not run"

    def _send(self, method: str, path: str, body: Any, more: dict[str, Any]) -> httpx.Response:
        if isinstance(body, dict):
            body = body | more
        return httpx.request(method, self.server.url + path, json=body, timeout=60.0, trust_env=False)

    def refresh(self, line: dict[str, Any]) -> None:
        """Send the checkpoint's tensors times `factor`, with at most `names` tensors in a bucket."""
        named = [(name, tensor * line["factor"]) for name, tensor in self.tensors.items()]
        size = line.get("names", len(named))
        buckets = [named[start : start + size] for start in range(0, len(named), size)]
        how = {"broadcast": self._broadcast, "body": self._in_body, "folder": self._in_folder}[line["refresh"]]
        how(line, buckets)

    def _broadcast(self, line: dict[str, Any], buckets: list[list[tuple[str, torch.Tensor]]]) -> None:
        port, group = int(self.names["$PORT"]), str(self.names["$GROUP"])
        told = self.pool.submit(self.call, line["joins"])
        handle = init_process_group("127.0.0.1", port, 0, 2, group, "gloo", JOIN_S)
        told.result(60)
        for before in line.get("before", ()):
            self.call(before)
        for bucket in buckets:
            announced = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            told = self.pool.submit(self.call, line["sends"], **announced)
            for _, tensor in bucket:
                handle.start_broadcast(tensor).wait()
            told.result(60)
        for after in line.get("after", ()):
            self.call(after)
        handle.destroy()

    def _in_body(self, line: dict[str, Any], buckets: list[list[tuple[str, torch.Tensor]]]) -> None:
        for bucket in buckets:
            content = flattened(bucket)
            with file_system_sharing(), classes_in(line["classes"]):
                payload = base64.b64encode(forking_pickle(content)).decode()
            self.call(line["sends"], serialized_named_tensors=[payload])

    def _in_folder(self, line: dict[str, Any], buckets: list[list[tuple[str, torch.Tensor]]]) -> None:
        folder = self.folder / line["path"]
        folder.mkdir()
        (folder / "config.json").write_bytes(self.config)
        save_file(dict(buckets[0]), folder / "model.safetensors", metadata={"format": "pt"})
        self.call(line["sends"])

    def holds(self, factor: float) -> None:
        held = self.server.client.weights_checker("checksum")["checksums"]
        assert held == {name: fingerprint_hex(fingerprint(tensor * factor)) for name, tensor in self.tensors.items()}

    def _filled(self, value: Any) -> Any:
        """Return the value with the stand-ins replaced."""
        if isinstance(value, dict):
            return {key: self._filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item) for item in value]
        if value in ("$PORT", "$GROUP"):
            return self.names[value]
        if isinstance(value, str):
            return value.replace("$MODEL", str(self.names["$MODEL"])).replace("$FOLDER", str(self.names["$FOLDER"]))
        return value

    def close(self) -> None:
        self.pool.shutdown()


def checked(content: Any, field: str, check: Any, line: dict[str, Any]) -> None:
    """Check one field of an answer."""
    value = _at(content, field)
    where = (line["call"], field, value)
    if not isinstance(check, dict):
        assert value == check, where
    elif "is" in check:
        assert isinstance(value, TYPES[check["is"]]), where
    elif "len" in check:
        expected = check["len"] if isinstance(check["len"], int) else len(_at(content, check["len"]))
        assert len(value) == expected, where
    elif "sum" in check:
        assert sum(item[key] for item in value for key in check["sum"]) == check["to"], where
    else:
        _check_routes(content["meta_info"], value, *check["routes"])


def _check_routes(meta: dict[str, Any], text: str, layers: int, top_k: int) -> None:
    """Check that all tokens from the start on but the last have a row, with experts in each layer that has some."""
    rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - meta.get("routed_experts_start_len", 0)
    ids = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    assert ids.size == rows * layers * top_k
    assert ids.reshape(rows, layers, top_k)[:, 1:].any(axis=(0, 2)).all()


def _at(content: Any, field: str) -> Any:
    for key in _keys(field):
        content = content[key]
    return content


def _keys(field: str) -> Iterator[str | int]:
    yield from (int(key) if key.isdigit() else key for key in field.split("."))
