"""The CPU time of a refresh by process, a tensor: models of many small tensors, where bytes cost little.

    trainer    a process with the `WeightSender` that trainers use, stating a manifest of fingerprints; for a delta
               this process
    front      the HTTP process
    engine     the process that computes, all of its threads, from the begin to the answer of the end
    bare       what the transport takes of "engine": a process that receives as many bytes by gloo, copies them, or
               reads the files, and does nothing else

The transports are a broadcast, shared memory, the checkpoint's folder, and a delta by broadcast, in this order.  The
first refresh of each makes its plans, and the first of all touches the second copy of the weights for the first time.
The following ones replay the plans.  With `--against TREE` a server and a trainer of another checkout take turns, by
broadcast and by folder.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import httpx
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.bare_broadcast import BareBroadcast, cpu_seconds
from benchmarks.delta_refresh import DeltaTrainer
from benchmarks.memory import wait_ready, worker_pid
from benchmarks.shapes import cached_checkpoint
from examples.make_checkpoint.run import CheckpointSpec
from rollout.client import RolloutClient
from rollout.server.child_process import ChildProcess
from weight_sync.bucket import pack, plan_buckets
from weight_sync.process_group import free_port
from weight_sync.stored_tensors import PART_BYTES
from weight_sync.tensor_meta import TensorMeta

EXPERTS = 128
PER_LAYER = 3 * EXPERTS + 9
LAYERS = {"31,000 tensors": 79, "46,000 tensors": 117, "69,000 tensors": 176}
"""Names as of a model of 235 billion parameters, of DeepSeek-V3 and of Kimi-K2."""
BUCKET_BYTES = 256 << 20
TIMEOUT_S = 300.0
HERE = Path(__file__).resolve().parents[1]
COLUMNS = (
    "tensors", "by", "checkout", "refresh", "trainer", "front", "engine", "bare", "engine - bare", "wall, s"
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one refresh, and its wall seconds."""

    trainer: float
    front: float
    engine: float
    wall: float


def run(sizes: list[str], rounds: int, console: Console, *, against: Path | None = None) -> list[dict]:
    """Measure each size, print one table, and return its rows."""
    trees = {"this": HERE} if against is None else {"before": against.resolve(), "this": HERE}
    rows = [row for size in sizes for row in _measure(size, rounds, console, trees)]
    table = Table(title="CPU time of a refresh, microseconds a tensor")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        for which in ("first", "following"):
            each = row[which]
            cells = [f"{1e6 * each[name] / row['tensors']:.2f}" for name in ("trainer", "front", "engine")]
            bare = 1e6 * row["bare_s"] / row["tensors"]
            rest = 1e6 * each["engine"] / row["tensors"] - bare
            names = [f"{row['tensors']:,}", row["by"], row["checkout"], which]
            table.add_row(*names, *cells, f"{bare:.2f}", f"{rest:.2f}", f"{each['wall']:.2f}")
    console.print(table)
    return rows


def _measure(size: str, rounds: int, console: Console, trees: dict[str, Path]) -> list[dict]:
    spec = CheckpointSpec(
        hidden_size=64, layers=LAYERS[size], dense_first=0, heads=2, kv_heads=1, head_dim=32, experts=EXPERTS, top_k=4,
        moe_intermediate_size=64, vocab_size=1024, context_length=512,
    )  # fmt: skip
    folder = cached_checkpoint(f"tiny-{LAYERS[size]}-layers", spec)
    tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    bare_s = _bare_seconds(folder, tensors, rounds)
    found: dict[tuple[str, str], list[Cost]] = {}
    with ExitStack() as stack:
        console.print(f"refresh costs: {len(tensors):,} tensors, starting {len(trees)} server(s)")
        checkouts = {name: stack.enter_context(_serving(tree, folder)) for name, tree in trees.items()}
        for by in ("broadcast", "shared memory", "folder"):
            names = ["this"] if by == "shared memory" else list(checkouts)
            for turn in range(rounds + 1):
                for name in names[:: 1 if turn % 2 else -1]:
                    found.setdefault((by, name), []).append(checkouts[name].refresh(by, str(turn)))
        found["delta", "this"] = checkouts["this"].refresh_by_deltas(tensors, rounds)
    return [
        {
            "tensors": len(tensors),
            "by": by,
            "checkout": name,
            "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "bare_s": bare_s.get(by, 0.0),
            "first": vars(first),
            "following": {key: statistics.median(vars(cost)[key] for cost in following) for key in vars(first)},
        }
        for (by, name), (first, *following) in found.items()
    ]


def _bare_seconds(folder: Path, tensors: dict[str, torch.Tensor], rounds: int) -> dict[str, float]:
    """Return by transport the CPU seconds of a process that takes as many bytes in and does nothing else."""
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    buckets = [
        pack([(meta.name, tensors[meta.name]) for meta in bucket]) for bucket in plan_buckets(metas, BUCKET_BYTES)
    ]
    with BareBroadcast(buckets) as bare:
        before = bare.peer_cpu_seconds()
        for _ in range(rounds):
            bare.seconds()
        received = (bare.peer_cpu_seconds() - before) / rounds
    return {
        "broadcast": received,
        "shared memory": _copy_seconds(buckets, rounds),
        "folder": _read_seconds(folder, rounds),
    }


def _copy_seconds(buckets: list[torch.Tensor], rounds: int) -> float:
    """Return the CPU seconds of copying the buckets into memory that was touched before."""
    copies = [bucket.clone() for bucket in buckets]
    start = time.process_time()
    for _ in range(rounds):
        for copy, bucket in zip(copies, buckets, strict=True):
            copy.copy_(bucket)
    return (time.process_time() - start) / rounds


def _read_seconds(folder: Path, rounds: int) -> float:
    """Return the CPU seconds of reading the files of a checkpoint into one buffer, as large as a part of a file."""
    buffer = bytearray(PART_BYTES)
    start = time.process_time()
    for _ in range(rounds):
        for path in folder.glob("*.safetensors"):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return (time.process_time() - start) / rounds


@contextmanager
def _serving(tree: Path, folder: Path) -> Iterator[_Checkout]:
    """Run a server of a checkout, and a trainer of it."""
    # The folder where this runs is not the checkout to measure, so no process may import from it.
    places = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    module, _, function = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"][
        "lockstep"
    ].partition(":")
    port = free_port()
    words = ["serve", "--model-path", str(folder), "--port", str(port), "--max-total-tokens", "4096"]
    words += ["--log-level", "warning", "--keep-staging-memory"]
    command = ["env", *(f"{name}={value}" for name, value in places.items()), sys.executable]
    command += ["-c", f"from {module} import {function}; {function}()", *words]
    url = f"http://127.0.0.1:{port}"
    settings = {"url": url, "folder": str(folder), "bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
    trainer = [sys.executable, str(HERE / "benchmarks" / "refresh_worker.py"), json.dumps(settings)]
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-costs-") as scratch,
        ChildProcess("server", command, Path(scratch) / "server.log") as server,
        httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        wait_ready(server, http)
        with subprocess.Popen(trainer, env=os.environ | places, stdin=PIPE, stdout=PIPE, text=True) as process:
            yield _Checkout(url, server.pid, process)
            process.communicate()


class _Checkout:
    """A server of a checkout, whose HTTP process has the id `front`, and its trainer."""

    def __init__(self, url: str, front: int, trainer: subprocess.Popen[str]) -> None:
        self._url, self._front, self._engine, self._trainer = url, front, worker_pid(front), trainer
        self._answer()

    def refresh(self, by: str, label: str) -> Cost:
        """Have the trainer bring all weights, and return the cost."""
        return self._cost(self._trainer.pid, lambda: self._ask(by, label))

    def refresh_by_deltas(self, tensors: dict[str, torch.Tensor], rounds: int) -> list[Cost]:
        """Return the costs of one delta more than `rounds`, each from this process."""
        with RolloutClient(self._url) as client:
            trainer = DeltaTrainer(client, tensors, TIMEOUT_S)
            costs = [self._cost(os.getpid(), trainer.refresh) for _ in range(rounds + 1)]
            trainer.leave()
        return costs

    def _cost(self, trainer: int, refresh: Callable[[], object]) -> Cost:
        pids = (trainer, self._front, self._engine)
        before, start = [cpu_seconds(pid) for pid in pids], time.perf_counter()
        refresh()
        wall = time.perf_counter() - start
        trainer_s, front_s, engine_s = (cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True))
        return Cost(trainer_s, front_s, engine_s, wall)

    def _ask(self, by: str, label: str) -> None:
        assert self._trainer.stdin is not None
        self._trainer.stdin.write(json.dumps({"by": by, "label": label}) + "\n")
        self._trainer.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._trainer.stdout is not None
        if not self._trainer.stdout.readline():
            raise RuntimeError("the trainer ended; its reason is above")
