"""The CPU time of a refresh by process, a tensor: models of many small tensors, where bytes cost little.

    trainer    this process, with the `WeightSender` that trainers use, stating a manifest of fingerprints
    front      the HTTP process
    engine     the process that computes, all of its threads, from the begin to the answer of the end
    bare       what the transport takes of "engine": a process that receives as many bytes by gloo, copies them, or
               reads the files, and does nothing else

The transports are a broadcast, shared memory, the checkpoint's folder, and a delta by broadcast, in this order.  The
first refresh of each makes its plans, and the first of all touches the second copy of the weights for the first time.
The following ones replay the plans.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
from weight_sync.sender import WeightSender
from weight_sync.sender.carriers import Transport
from weight_sync.stored_tensors import PART_BYTES
from weight_sync.tensor_meta import TensorMeta

EXPERTS = 128
PER_LAYER = 3 * EXPERTS + 9
LAYERS = {"31,000 tensors": 79, "46,000 tensors": 117, "69,000 tensors": 176}
"""Names as of a model of 235 billion parameters, of DeepSeek-V3 and of Kimi-K2."""
BUCKET_BYTES = 256 << 20
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one refresh, and its wall seconds."""

    trainer: float
    front: float
    engine: float
    wall: float


def run(sizes: list[str], rounds: int, console: Console) -> list[dict]:
    """Measure each size, print one table, and return its rows."""
    rows = [row for size in sizes for row in _measure(size, rounds, console)]
    table = Table(title="CPU time of a refresh, microseconds a tensor")
    for column in ("tensors", "by", "refresh", "trainer", "front", "engine", "bare", "engine - bare", "wall, s"):
        table.add_column(column, justify="right")
    for row in rows:
        for which in ("first", "following"):
            each = row[which]
            cells = [f"{1e6 * each[name] / row['tensors']:.2f}" for name in ("trainer", "front", "engine")]
            bare = 1e6 * row["bare_s"] / row["tensors"]
            rest = 1e6 * each["engine"] / row["tensors"] - bare
            wall = f"{each['wall']:.2f}"
            table.add_row(f"{row['tensors']:,}", row["by"], which, *cells, f"{bare:.2f}", f"{rest:.2f}", wall)
    console.print(table)
    return rows


def _measure(size: str, rounds: int, console: Console) -> list[dict]:
    spec = CheckpointSpec(
        hidden_size=64, layers=LAYERS[size], dense_first=0, heads=2, kv_heads=1, head_dim=32, experts=EXPERTS, top_k=4,
        moe_intermediate_size=64, vocab_size=1024, context_length=512,
    )  # fmt: skip
    folder = cached_checkpoint(f"tiny-{LAYERS[size]}-layers", spec)
    tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    buckets = [
        pack([(meta.name, tensors[meta.name]) for meta in bucket]) for bucket in plan_buckets(metas, BUCKET_BYTES)
    ]
    with BareBroadcast(buckets) as bare:
        before = bare.peer_cpu_seconds()
        for _ in range(rounds):
            bare.seconds()
        bare_s = {
            "broadcast": (bare.peer_cpu_seconds() - before) / rounds,
            "shared memory": _copy_seconds(buckets, rounds),
            "folder": _read_seconds(folder, rounds),
        }
    with tempfile.TemporaryDirectory(prefix="lockstep-costs-") as scratch:
        port = free_port()
        words = ["serve", "--model-path", str(folder), "--port", str(port), "--max-total-tokens", "4096"]
        command = [sys.executable, "-m", "rollout.cli.main", *words, "--log-level", "warning", "--keep-staging-memory"]
        with (
            ChildProcess("server", command, Path(scratch) / "server.log") as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False) as http,
        ):
            console.print(f"refresh costs: {len(tensors):,} tensors, starting a server")
            wait_ready(server, http)
            with RolloutClient(str(http.base_url)) as client:
                costs = _refreshes(client, folder, tensors, server.pid, rounds)
    return [
        {
            "tensors": len(tensors),
            "by": by,
            "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "bare_s": bare_s.get(by, 0.0),
            "first": vars(first),
            "following": {name: statistics.median(vars(cost)[name] for cost in following) for name in vars(first)},
        }
        for by, (first, *following) in costs.items()
    ]


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


def _refreshes(
    client: RolloutClient, folder: Path, tensors: dict[str, torch.Tensor], front: int, rounds: int
) -> dict[str, list[Cost]]:
    """Return the costs of refreshes by transport."""
    found = {
        "broadcast": _sent(client, tensors, front, rounds, "broadcast"),
        "shared memory": _sent(client, tensors, front, rounds, "shared_memory"),
        "folder": _costs(front, rounds, lambda label: client.update_weights_from_disk(str(folder), label)),
    }
    trainer = DeltaTrainer(client, tensors, TIMEOUT_S)
    found["delta"] = _costs(front, rounds, lambda _: trainer.refresh())
    trainer.leave()
    return found


def _sent(
    client: RolloutClient, tensors: dict[str, torch.Tensor], front: int, rounds: int, transport: Transport
) -> list[Cost]:
    sender, named = WeightSender(client, timeout_s=TIMEOUT_S, transport=transport), list(tensors.items())
    sender.connect()
    try:
        return _costs(front, rounds, lambda label: sender.refresh(named, label, bucket_bytes=BUCKET_BYTES))
    finally:
        sender.close()


def _costs(front: int, rounds: int, refresh: Callable[[str], object]) -> list[Cost]:
    """Return the costs of one refresh more than `rounds`."""
    engine, found = worker_pid(front), []
    for number in range(rounds + 1):
        before, start = [cpu_seconds(pid) for pid in (os.getpid(), front, engine)], time.perf_counter()
        refresh(str(number))
        spent = [cpu_seconds(pid) - was for pid, was in zip((os.getpid(), front, engine), before, strict=True)]
        found.append(Cost(*spent, time.perf_counter() - start))
    return found
