"""The cost of a refresh by transports whose tensors lie in storages: the call's body, shared memory, a buffer.

    body         one safetensors file in base64            segment      the same file in shared memory
    flattened    SGLang's bucket, its bytes in the pickle   shared       the same, its bytes in torch's shared memory
    list         a pickled list, each tensor with its bytes  buffer     checkpoint-engine's conversation

A real server gets the calls of a trainer, which has made its payloads before.  CPU time is of the process that computes
("engine") and of the HTTP process ("front"), from the first call that brings tensors to the last one's answer.  The
first refresh by a transport makes the plans.  With `--against TREE` a server of another checkout takes turns.
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save

from benchmarks.memory import wait_ready, worker_pid
from benchmarks.shapes import cached_checkpoint
from examples.make_checkpoint.run import CheckpointSpec
from rollout.server.child_process import ChildProcess
from tests.parameter_server_stand_in import ParameterServerStandIn, Sending
from tests.sglang_payloads import BUCKET_MODULES, classes_in, flattened, forking_pickle
from weight_sync.process_group import free_port

SMALL = CheckpointSpec(
    hidden_size=64, layers=20, dense_first=0, heads=2, kv_heads=1, head_dim=32, experts=128, top_k=4,
    moe_intermediate_size=64, vocab_size=1024, context_length=512,
)  # fmt: skip
LARGE = CheckpointSpec(
    hidden_size=1024, layers=2, dense_first=0, heads=8, kv_heads=2, head_dim=128, experts=16, top_k=4,
    moe_intermediate_size=1024, vocab_size=4096, context_length=512,
)  # fmt: skip
SHAPES = {"8 kB": ("tiny-20-layers", SMALL), "2 MB": ("wide-2-layers", LARGE)}
BUCKET_BYTES = 32 << 20
HERE = Path(__file__).resolve().parents[1]

Named = list[tuple[str, torch.Tensor]]
Calls = list[Callable[[], Any]]


def run(rounds: int, console: Console, *, against: Path | None = None) -> list[dict]:
    """Measure each transport with small and with large tensors, print one table, and return its rows."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    trees = {"this": HERE} if against is None else {"before": against.resolve(), "this": HERE}
    rows = []
    for size, (name, spec) in SHAPES.items():
        folder = cached_checkpoint(name, spec)
        named = [item for file in sorted(folder.glob("*.safetensors")) for item in load_file(file).items()]
        facts = {"part": "stored costs", "size": size, "tensors": len(named), "bytes": sum(t.nbytes for _, t in named)}
        with ExitStack() as stack:
            servers = {tree: stack.enter_context(_serving(path, folder)) for tree, path in trees.items()}
            for server in servers.values():
                server.refresh("list", named)  # touches the second copy of the weights for the first time
            for transport in TRANSPORTS:
                found: dict[str, list[dict[str, float]]] = {tree: [] for tree in servers}
                for turn in range(rounds + 1):
                    for tree in list(servers)[:: 1 if turn % 2 else -1]:
                        found[tree].append(servers[tree].refresh(transport, named))
                for tree, (first, *following) in found.items():
                    medians = {key: statistics.median(one[key] for one in following) for key in first}
                    rows.append(
                        facts | {"transport": transport, "checkout": tree, "first": first, "following": medians}
                    )
        rows.append(facts | {"transport": "plain copy", "seconds": _copy_seconds(named)})
    _print(rows, console)
    return rows


def _copy_seconds(named: Named) -> float:
    content = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named])
    target, seconds = torch.zeros_like(content), []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(content)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@contextmanager
def _serving(tree: Path, folder: Path) -> Iterator[_Server]:
    with tempfile.TemporaryDirectory(prefix="lockstep-stored-") as scratch:
        port = free_port()
        words = ["--model-path", str(folder), "--port", str(port), "--max-payload-bytes", str(2 * BUCKET_BYTES)]
        words += ["--max-total-tokens", "4096", "--log-level", "warning", "--keep-staging-memory"]
        # The folder where this runs is not the checkout to measure, so no process of the server may import from it.
        places = ["env", f"PYTHONPATH={tree}", "PYTHONSAFEPATH=1"]
        command = [*places, sys.executable, "-m", "rollout.cli.main", "serve", *words]
        with (
            ChildProcess("server", command, Path(scratch) / "server.log") as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0, trust_env=False) as http,
        ):
            wait_ready(server, http)
            yield _Server(http, server.pid)


class _Server:
    """A server, whose HTTP process has the id `pid`."""

    def __init__(self, http: httpx.Client, pid: int) -> None:
        self._http, self._pids = http, (worker_pid(pid), pid)

    def refresh(self, transport: str, named: Named) -> dict[str, float]:
        """Return seconds of one refresh: of CPU by process, and of wall clock."""
        with TRANSPORTS[transport](self, named) as calls:
            self.post("begin_weight_update")
            before, start = [_cpu_seconds(pid) for pid in self._pids], time.perf_counter()
            for call in calls:
                call()
            wall = time.perf_counter() - start
            engine, front = (_cpu_seconds(pid) - was for pid, was in zip(self._pids, before, strict=True))
            self.post("end_weight_update")
        return {"engine": engine, "front": front, "wall": wall}

    def post(self, path: str, **body: Any) -> None:
        self.post_json(path, json.dumps(body).encode())

    def post_json(self, path: str, body: bytes) -> None:
        answer = self._http.post(f"/{path}", content=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads, by the scheduler's clock: ticks are too long for a call."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


# --- what a trainer has made before it calls --------------------------------------------------------------------------


def _buckets(named: Named) -> list[Named]:
    buckets: list[Named] = [[]]
    room = BUCKET_BYTES
    for name, tensor in named:
        if tensor.nbytes > room and buckets[-1]:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append((name, tensor))
        room -= tensor.nbytes
    return buckets


def _payload_call(server: _Server, payload: bytes, **fields: Any) -> Callable[[], None]:
    texts = {"serialized_named_tensors": [base64.b64encode(payload).decode()]}
    body = json.dumps(texts | fields).encode()
    return lambda: server.post_json("update_weights_from_tensor", body)


@contextmanager
def _body(server: _Server, named: Named) -> Iterator[Calls]:
    yield [_payload_call(server, save(dict(bucket)), format="safetensors") for bucket in _buckets(named)]


@contextmanager
def _segment(server: _Server, named: Named) -> Iterator[Calls]:
    content = save(dict(named))
    memory = SharedMemory(create=True, size=len(content))
    memory.buf[: len(content)] = content
    place = {"shm_name": memory.name, "shm_bytes": len(content)}
    yield [lambda: server.post("update_weights_from_tensor", format="safetensors", **place)]
    memory.close()
    memory.unlink()


@contextmanager
def _flattened(server: _Server, named: Named, dump: Callable[[Any], bytes] = pickle.dumps) -> Iterator[Calls]:
    kept = [flattened(bucket) for bucket in _buckets(named)]
    with classes_in(BUCKET_MODULES[0]):
        payloads = [dump(content) for content in kept]
    yield [_payload_call(server, payload, load_format="flattened_bucket") for payload in payloads]


@contextmanager
def _list(server: _Server, named: Named) -> Iterator[Calls]:
    yield [_payload_call(server, pickle.dumps(bucket)) for bucket in _buckets(named)]


@contextmanager
def _shared(server: _Server, named: Named) -> Iterator[Calls]:
    with _flattened(server, named, forking_pickle) as calls:
        yield calls


@contextmanager
def _buffer(server: _Server, named: Named) -> Iterator[Calls]:
    with ParameterServerStandIn(BUCKET_BYTES, "pickle") as trainer:
        with Sending(lambda: trainer.update(named, scribble=False)) as sending:
            yield [lambda: server.post("update_weights_from_ipc", zmq_handles=trainer.handles)]
        if sending.error is not None:
            raise sending.error


TRANSPORTS = {
    "body": _body,
    "segment": _segment,
    "flattened": _flattened,
    "shared": _shared,
    "list": _list,
    "buffer": _buffer,
}


def _print(rows: list[dict], console: Console) -> None:
    table = Table(title="Tensors in storages: microseconds of CPU time a tensor, and bytes a second of wall clock")
    for column in ("size", "transport", "checkout", "engine, first", "following", "front", "GB/s"):
        table.add_column(column, justify="right")
    for row in rows:
        if row["transport"] == "plain copy":
            table.add_row(row["size"], "plain copy", "", "", "", "", f"{row['bytes'] / row['seconds'] / 1e9:.2f}")
            continue
        first, following, scale = row["first"], row["following"], 1e6 / row["tensors"]
        costs = (first["engine"], following["engine"], following["front"])
        speed = f"{row['bytes'] / following['wall'] / 1e9:.2f}"
        table.add_row(row["size"], row["transport"], row["checkout"], *(f"{scale * cost:.1f}" for cost in costs), speed)
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, default=None)
    given = parser.parse_args()
    print(json.dumps(run(given.rounds, Console(width=120), against=given.against)))
