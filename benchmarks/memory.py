"""Resident memory of a server, after load and after requests that filled its KV pool, against a bound.

    bound = 1.15 x weights + KV pool + 400 MB

It holds for the process that computes.  What a weight refresh stages is not part of it.  Pages that two processes
share are counted in both by "resident", and once by "proportional".
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import SHAPES, checkpoint
from rollout.core.specs.layer_specs import FullKV
from rollout.memory.kv_pool import kv_bytes_per_token
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

WEIGHTS_FACTOR = 1.15
FIXED_BYTES = 400e6
REQUESTS = 64
PROMPT_TOKENS = 192
NEW_TOKENS = 64
POOL_TOKENS = REQUESTS * (PROMPT_TOKENS + NEW_TOKENS)
START_S = 300.0
REQUEST_S = 600.0
WORKER = "rollout.engine.worker"


@dataclass(frozen=True)
class Memory:
    """The memory of one process, in bytes; `peak` is the largest resident size so far."""

    resident: int
    proportional: int
    private: int  # heap and other anonymous pages: weights, KV, Python
    mapped: int  # files: code, and a checkpoint while it is read
    peak: int


def run(shape: str, console: Console) -> list[dict]:
    """Measure a server, print one table, and return its one row."""
    folder = checkpoint(shape)
    with tempfile.TemporaryDirectory(prefix="lockstep-memory-") as scratch:
        port = free_port()
        words = ["serve", "--model-path", str(folder), "--port", str(port), "--dtype", "bfloat16"]
        words += ["--max-total-tokens", str(POOL_TOKENS), "--log-level", "warning"]
        command = [sys.executable, "-m", "rollout.cli.main", *words]
        with (
            ChildProcess("server", command, Path(scratch) / "server.log") as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_S, trust_env=False) as http,
        ):
            console.print(f"memory, shape {shape}: starting a server")
            wait_ready(server, http)
            worker = worker_pid(server.pid)
            loaded = read_memory(worker)
            console.print(f"memory, shape {shape}: {REQUESTS} requests")
            _serve(http, SHAPES[shape].vocab_size)
            row = _row(shape, loaded, read_memory(worker), read_memory(server.pid))
    _print(row, console)
    return [row]


def read_memory(pid: int) -> Memory:
    """Read the memory of a process from /proc, as the kernel counts it."""
    rollup = _kilobytes(Path(f"/proc/{pid}/smaps_rollup"))
    status = _kilobytes(Path(f"/proc/{pid}/status"))
    return Memory(
        resident=1024 * rollup["Rss"],
        proportional=1024 * rollup["Pss"],
        private=1024 * status["RssAnon"],
        mapped=1024 * (status["RssFile"] + status["RssShmem"]),
        peak=1024 * status["VmHWM"],
    )


def bound_bytes(weights: int, kv_pool: int) -> float:
    return WEIGHTS_FACTOR * weights + kv_pool + FIXED_BYTES


def _kilobytes(path: Path) -> dict[str, int]:
    """Return the numbers of the lines `Name:  123 kB`, by name."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {word[0].rstrip(":"): int(word[1]) for word in words if len(word) == 3 and word[2] == "kB"}


def wait_ready(server: ChildProcess, http: httpx.Client) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.exit_status() is not None:
            raise RuntimeError(f"the server ended: {server.last_words()}")
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {START_S:.0f} s: {server.last_words()}")


def worker_pid(parent: int) -> int:
    """Return the process id of the child that computes."""
    children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    (pid,) = [pid for pid in children if WORKER in Path(f"/proc/{pid}/cmdline").read_text()]
    return pid


def _serve(http: httpx.Client, vocab_size: int) -> None:
    """Send all requests at once, sampled, with log-probabilities: together they fill the pool."""
    rng = random.Random(0)
    bodies = [
        {
            "input_ids": [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            "return_logprob": True,
        }
        for _ in range(REQUESTS)
    ]
    with ThreadPoolExecutor(REQUESTS) as pool:
        for answer in pool.map(lambda body: http.post("/generate", json=body), bodies):
            answer.raise_for_status()


def _row(shape: str, loaded: Memory, served: Memory, main: Memory) -> dict:
    spec = SHAPES[shape]
    weights = sum(file.stat().st_size for file in checkpoint(shape).glob("*.safetensors"))
    kv_pool = POOL_TOKENS * kv_bytes_per_token([FullKV(spec.kv_heads, spec.head_dim)] * spec.layers, torch.bfloat16)
    bound = bound_bytes(weights, kv_pool)
    return {
        "shape": shape,
        "weights": weights,
        "kv_pool": kv_pool,
        "bound": bound,
        "loaded": vars(loaded),
        "served": vars(served),
        "main": vars(main),
        "both_proportional": served.proportional + main.proportional,
        "within_bound": served.resident <= bound,
    }


def _print(row: dict, console: Console) -> None:
    loaded, served, main = row["loaded"], row["served"], row["main"]
    table = Table(title=f"Memory of a server, shape {row['shape']}, MB")
    table.add_column("term", no_wrap=True)
    table.add_column("MB", justify="right")
    groups = (
        {
            f"{WEIGHTS_FACTOR} x weights ({row['weights'] / 1e6:.0f} MB)": WEIGHTS_FACTOR * row["weights"],
            f"KV pool of {POOL_TOKENS} tokens": row["kv_pool"],
            "fixed": FIXED_BYTES,
            "bound": row["bound"],
        },
        {
            "engine process after load, resident": loaded["resident"],
            f"  after {REQUESTS} requests": served["resident"],
            "    heap and other private pages": served["private"],
            "    code and other mapped files": served["mapped"],
            "  peak, while it loaded or since": served["peak"],
        },
        {
            "main process, resident": main["resident"],
            "both processes, shared pages once": row["both_proportional"],
        },
    )
    for group in groups:
        for name, value in group.items():
            table.add_row(name, f"{value / 1e6:.0f}")
        table.add_section()
    console.print(table)
    share = f"{100 * served['resident'] / row['bound']:.0f} % of the bound"
    console.print(f"the engine process takes {share}: {'within' if row['within_bound'] else 'OVER'}")
