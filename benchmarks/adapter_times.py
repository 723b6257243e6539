"""Measures the start of a server with adapter slots, and loads of adapters of rank 16: seconds and bytes.

start    seconds from the start of the process to the first good `/health`, which is asked for every 0.2 s; memory that
         the process that computes has then (VmRSS)
load     seconds of a call, next version upon next version: of a folder of PEFT, and of the tensors in the body, as
         SGLang's clients send them; bytes of the tensors

All cases run in turns, and the numbers are medians.
"""

from __future__ import annotations

import base64
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.adapter_refresh import RANK, TARGETS, TIMEOUT_S, random_adapter
from benchmarks.memory import wait_ready, worker_pid
from benchmarks.shapes import SHAPES, checkpoint
from examples.make_checkpoint.run import CheckpointSpec
from rollout.client import RolloutClient
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port
from weight_sync.safetensors_file import read_header

Tensors = dict[str, torch.Tensor]
LOADS = 8  # of each adapter and way, in a server
SLOTS = {
    "no slots": (),
    "8 slots": ("--max-loras-per-batch", "8"),
    "32 slots": ("--max-loras-per-batch", "32"),
    "8 slots, experts too": ("--max-loras-per-batch", "8", "--lora-target-modules", "all"),
    "32 slots, experts too": ("--max-loras-per-batch", "32", "--lora-target-modules", "all"),
}
_CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}


def run(shape: str, rounds: int, console: Console) -> list[dict]:
    """Measure starts and loads, print two tables, and return their rows."""
    folder = checkpoint(shape)
    seconds: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[int]] = defaultdict(list)
    loads: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="lockstep-adapters-") as name:
        adapters = _write_adapters(shape, folder, Path(name))
        for _ in range(rounds):
            for case, flags in SLOTS.items():
                start = time.perf_counter()
                with _serving(folder, flags, Path(name)) as (server, http):
                    seconds[case].append(time.perf_counter() - start)
                    memory[case].append(_resident_bytes(worker_pid(server.pid)))
                    if case == "8 slots, experts too":
                        for of, path in adapters.items():
                            for way, times in _timed_loads(http, of, path).items():
                                loads[of, way] += times
        sizes = {of: (path / "adapter_model.safetensors").stat().st_size for of, path in adapters.items()}
    starts = [
        {
            "part": "adapter starts",
            "shape": shape,
            "case": case,
            "seconds": statistics.median(seconds[case]),
            "num_bytes": int(statistics.median(memory[case])),
        }
        for case in SLOTS
    ]
    loaded = [
        {
            "part": "adapter loads",
            "shape": shape,
            "case": f"{of}, {way}",
            "seconds": statistics.median(times),
            "num_bytes": sizes[of],
        }
        for (of, way), times in loads.items()
    ]
    _print(f"{shape}: the start of a server with slots of rank {RANK}", starts, console)
    _print(f"{shape}: the load of an adapter of rank {RANK}", loaded, console)
    return starts + loaded


def markdown(rows: Sequence[dict]) -> str:
    """Return the rows as tables of a page: starts, then loads."""
    lines = []
    for part, first in (("adapter starts", "start with"), ("adapter loads", "load of")):
        lines += [f"| {first} | seconds | MB |", "|---|---|---|"]
        for row in rows:
            if row["part"] == part:
                lines.append(f"| {row['case']} | {row['seconds']:.3f} | {row['num_bytes'] / 1e6:.1f} |")
        lines.append("")
    return "\n".join(lines)


@contextmanager
def _serving(folder: Path, flags: Sequence[str], scratch: Path) -> Iterator[tuple[ChildProcess, httpx.Client]]:
    port = free_port()
    words = ["serve", str(folder), "--port", str(port), "--max-total-tokens", "4096", "--log-level", "warning"]
    if flags:
        words += ["--enable-lora", "--max-lora-rank", str(RANK), *flags]
    with (
        ChildProcess("server", [sys.executable, "-m", "rollout.cli.main", *words], scratch / "server.log") as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        wait_ready(server, http)
        yield server, http


def _timed_loads(http: httpx.Client, of: str, path: Path) -> dict[str, list[float]]:
    """Return the seconds of loads from a folder, and of loads from tensors whose bodies are made before."""
    tensors, config = (
        load_file(path / "adapter_model.safetensors"),
        json.loads((path / "adapter_config.json").read_text()),
    )
    payload = base64.b64encode(pickle.dumps(list(tensors.items()))).decode()
    name = of.replace(" ", "-")
    body = json.dumps({"lora_name": name, "config_dict": config, "serialized_named_tensors": [payload]})

    def from_tensors() -> None:
        http.post("/load_lora_adapter_from_tensors", content=body).raise_for_status()

    with RolloutClient(str(http.base_url)) as client:
        return {
            "folder": [_seconds(lambda: client.load_adapter(name, str(path))) for _ in range(LOADS)],
            "tensors": [_seconds(from_tensors) for _ in range(LOADS)],
        }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write_adapters(shape: str, folder: Path, scratch: Path) -> dict[str, Path]:
    """Write an adapter of attention and one of all routed experts, as PEFT writes them; return their folders."""
    metas = [tensor.meta for file in sorted(folder.glob("*.safetensors")) for tensor in read_header(file).tensors]
    attention = random_adapter({meta.name: meta.shape for meta in metas})
    experts = _random_experts(SHAPES[shape])
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    return {
        "attention": _write(scratch / "attention", attention, {"target_modules": list(TARGETS)}),
        "experts": _write(scratch / "experts", experts, {"target_modules": [], "target_parameters": stacks}),
    }


def _random_experts(spec: CheckpointSpec) -> Tensors:
    """Return random A [E * R, inputs] and B [outputs, R * E] of the experts of every layer, in float32."""
    stacked, found = spec.experts * RANK, {}
    for layer in range(spec.dense_first, spec.layers):
        experts = f"base_model.model.model.layers.{layer}.mlp.experts"
        for part, into, out in (
            (".base_layer", spec.hidden_size, 2 * spec.moe_intermediate_size),
            ("", spec.moe_intermediate_size, spec.hidden_size),
        ):
            found[f"{experts}{part}.lora_A.weight"] = 0.01 * torch.randn(stacked, into)
            found[f"{experts}{part}.lora_B.weight"] = 0.01 * torch.randn(out, stacked)
    return found


def _write(folder: Path, tensors: Tensors, targets: dict[str, list[str]]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(_CONFIG | targets))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(kib) << 10


def _print(title: str, rows: Sequence[dict], console: Console) -> None:
    table = Table(title=title)
    for column in ("case", "seconds", "MB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["case"], f"{row['seconds']:.3f}", f"{row['num_bytes'] / 1e6:.1f}")
    console.print(table)
