"""A process that holds a `WeightUpdater` over the small test model, driven by JSON lines on stdin and stdout.

    {"verb": "begin", "arguments": {...}}  ->  {"result": ...}
                                            |  {"error": "ContentError", "status": 400, "message": ...}

`Engine` is the other end: it starts the process and offers the control calls of `weight_sync.sender.EngineControl`.
"""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tests.logical_weights_fake import FakeWeights, NamedWeights
from tests.loopback_updater import broadcast_source
from weight_sync.checker import live_fingerprints
from weight_sync.errors import WeightRequestError, WeightSyncError
from weight_sync.fingerprint import fingerprint_hex
from weight_sync.manifest import parse_manifest
from weight_sync.sealed_memory import MemoryAddress, read_token
from weight_sync.tensor_meta import TensorMeta, dtype_name
from weight_sync.updater import WeightUpdater


class Refused(Exception):
    """The engine's answer was an error."""

    def __init__(self, kind: str, status: int, message: str) -> None:
        super().__init__(f"{kind} ({status}): {message}")
        self.kind, self.status = kind, status


class Engine:
    """One engine process.  `timeout_s` is its deadline for a rendezvous and for a bucket.

    `metas`: the tensors of its model; None: the small test model's.
    """

    def __init__(self, timeout_s: float = 3.0, rank: int = 0, metas: Sequence[TensorMeta] | None = None) -> None:
        words = [str(timeout_s), str(rank)]
        if metas is not None:
            words.append(json.dumps([[meta.name, dtype_name(meta.dtype), meta.shape] for meta in metas]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.weight_engine_process", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        self._ask({"verb": "status", "arguments": {}})

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        """Stop the process, so that it neither answers nor goes away."""
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(10)
        self._process.stdout.close()  # type: ignore[union-attr]

    def call(self, verb: str, **arguments: Any) -> Any:
        return self._ask({"verb": verb, "arguments": arguments})

    def settle(self) -> None:
        """Drop the open update, of any sender."""
        status = self.call("status")
        if status["open"]:
            self.call("abort", update_id=status["update_id"])

    def get_world_size(self) -> int:
        return 1

    def init_weights_update_group(self, **arguments: Any) -> dict[str, Any]:
        return {"success": self.call("init_group", **arguments)}

    def destroy_weights_update_group(self, **arguments: Any) -> dict[str, Any]:
        return {"success": self.call("destroy_group", **arguments)}

    def begin_weight_update(self, **arguments: Any) -> dict[str, Any]:
        return {"success": self.call("begin", **arguments)}

    def update_weights_from_distributed(self, **arguments: Any) -> dict[str, Any]:
        return {"success": self.call("receive_distributed", **arguments)}

    def end_weight_update(self, phase: str | None = None, update_id: str | None = None) -> dict[str, Any]:
        return self.call("end", phase=phase, update_id=update_id)

    def abort_weight_update(self, update_id: str | None = None) -> dict[str, Any]:
        return {"success": self.call("abort", update_id=update_id)}

    def weight_update(self, update_id: str) -> dict[str, Any]:
        return self.call("outcome", update_id=update_id)

    def _ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        if not line:
            raise ConnectionError("the engine process has ended")
        reply = json.loads(line)
        if "error" in reply:
            raise Refused(reply["error"], reply["status"], reply["message"])
        return reply["result"]


class NearEngine(Engine):
    """An engine that reads memory of senders on its machine."""

    def init_weights_update_group(self, *, memory: dict[str, int] | None = None, **arguments: Any) -> dict[str, Any]:
        return self.call("init_group", memory=memory, **arguments)


class _Server:
    def __init__(self, timeout_s: float, rank: int, entries: list[tuple[str, str, list[int]]] | None) -> None:
        self.weights = FakeWeights(seed=0)
        if entries is not None:
            metas = [TensorMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in entries]
            self.weights = NamedWeights({meta.name: meta for meta in metas})
        self.updater = WeightUpdater(self.weights, device="cpu", timeout_s=timeout_s, vote=lambda mine: mine)
        self.rank = rank

    def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        if verb == "init_group":
            rank, memory = arguments.pop("rank_offset") + self.rank, arguments.pop("memory", None)
            self.updater.groups.init(rank=rank, **arguments)
            return {} if memory is None else _answer_to(MemoryAddress(**memory))
        if verb == "begin":
            manifest = arguments.pop("manifest", None)
            arguments["bound"] = arguments.get("update_id") is not None
            if isinstance(manifest, dict):
                digits = manifest.pop("fingerprints")
                manifest["fingerprint"] = [digits[at : at + 16] for at in range(0, len(digits), 16)]
                lists = (manifest[key] for key in ("names", "dtypes", "shapes", "fingerprint"))
                manifest = parse_manifest(zip(*lists, strict=True))
            elif manifest is not None:
                manifest = parse_manifest((e["name"], e["dtype"], e["shape"], e.get("fingerprint")) for e in manifest)
            return self.updater.begin(manifest=manifest, **arguments)
        if verb == "outcome":
            return {"outcome": self.updater.outcome(arguments["update_id"]).kind}
        if verb == "end":
            if arguments["phase"] != "commit":
                self.updater.verify(arguments["update_id"])
            if arguments["phase"] == "verify":
                return {}
            result = self.updater.commit()
            return {"weight_version": result.weight_version, "stall_seconds": result.seconds}
        if verb == "content":
            return [block.hex() for block in self.weights.snapshot()]
        if verb == "receive_distributed":
            version, update_id = (arguments.pop(name, None) for name in ("weight_version", "update_id"))
            return self.updater.receive(broadcast_source(self.updater, **arguments), version, update_id)
        if verb == "collect":  # what errors hold by their frames goes
            return gc.collect()
        if verb == "checksums":
            return {name: fingerprint_hex(value) for name, value in live_fingerprints(self.weights).items()}
        if verb == "content_digest":
            self.updater.model.content.note_live(live_fingerprints(self.weights))
            return self.updater.model.content.digests.sent
        if verb == "destroy_group":
            return self.updater.groups.destroy(**arguments)
        if verb in ("status", "abort"):
            return getattr(self.updater, verb)(**arguments)
        raise ValueError(verb)


def _answer_to(address: MemoryAddress) -> dict[str, str]:
    try:
        return {"memory_token": read_token(address)}
    except WeightRequestError as error:
        return {"memory_refused": str(error)}


def main() -> None:
    torch.set_num_threads(1)
    timeout_s, rank, *metas = sys.argv[1:]
    server = _Server(float(timeout_s), int(rank), json.loads(metas[0]) if metas else None)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": server.answer(request["verb"], request["arguments"])}
        except WeightSyncError as error:
            reply = {"error": type(error).__name__, "status": error.status_code, "message": str(error)}
        print(json.dumps(reply), flush=True)
    server.updater.close()


if __name__ == "__main__":
    main()
