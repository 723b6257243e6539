"""Measures bytes and seconds of a refresh: of an adapter, and of the whole model, by a broadcast.

Both go to one server, by the sender that trainers use, with a manifest of fingerprints.  The first refresh of each
makes its plans.  `stall` is the time in which no step runs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.memory import wait_ready
from benchmarks.shapes import cached_checkpoint
from examples.make_checkpoint.run import CheckpointSpec
from rollout.client import RolloutClient
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port
from weight_sync.sender import WeightSender

RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
TIMEOUT_S = 300.0
_SPEC = CheckpointSpec(
    hidden_size=512, layers=12, dense_first=0, heads=8, kv_heads=4, head_dim=64, experts=16, top_k=4,
    moe_intermediate_size=256, vocab_size=4096, context_length=512,
)  # fmt: skip


def run(rounds: int, console: Console) -> list[dict]:
    """Measure refreshes of a model and of an adapter of rank 16, print a table, and return its rows."""
    folder = cached_checkpoint("adapter-refresh", _SPEC)
    tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    adapter = random_adapter({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS)}
    target = {"target": {"adapter": "trained", "config": config}}
    with tempfile.TemporaryDirectory(prefix="lockstep-adapters-") as scratch:
        port = free_port()
        words = ["serve", str(folder), "--port", str(port), "--max-total-tokens", "4096", "--enable-lora"]
        command = [sys.executable, "-m", "rollout.cli.main", *words, "--max-lora-rank", str(RANK)]
        with (
            ChildProcess("server", [*command, "--log-level", "warning"], Path(scratch) / "server.log") as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False) as http,
        ):
            wait_ready(server, http)
            with RolloutClient(str(http.base_url)) as client:
                sender = WeightSender(client, timeout_s=TIMEOUT_S)
                sender.connect()
                rows = [
                    _measured("model", sender, tensors, rounds, {}),
                    _measured("adapter", sender, adapter, rounds, {"begin_options": target}),
                ]
                sender.close()
    table = Table(title=f"a refresh of a model, and of an adapter of rank {RANK}")
    for column in ("of", "tensors", "MB", "first, s", "following, s", "stall, ms"):
        table.add_column(column, justify="right")
    for row in rows:
        times = f"{row['first_s']:.3f}", f"{row['following_s']:.3f}", f"{1e3 * row['stall_s']:.1f}"
        table.add_row(row["of"], str(row["tensors"]), f"{row['num_bytes'] / 1e6:.2f}", *times)
    console.print(table)
    return rows


def random_adapter(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return random A and B of the projections of attention, by PEFT's names, in float32 as PEFT trains them.

    `shapes`: of the model's tensors.
    """
    found = {}
    for name, shape_of in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            out, into = shape_of
            for side, shape in (("A", (RANK, into)), ("B", (out, RANK))):
                found[f"base_model.model.{module}.lora_{side}.weight"] = 0.01 * torch.randn(shape)
    return found


def _measured(
    of: str, sender: WeightSender, tensors: dict[str, torch.Tensor], rounds: int, options: dict[str, Any]
) -> dict:
    seconds, stalls = [], []
    for number in range(rounds + 1):
        start = time.perf_counter()
        report = sender.refresh(tensors, f"{of}-{number}", **options)
        seconds.append(time.perf_counter() - start)
        stalls += [engine.stall_seconds or 0.0 for engine in report.engines.values()]
    return {
        "of": of,
        "tensors": len(tensors),
        "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "first_s": seconds[0],
        "following_s": statistics.median(seconds[1:]),
        "stall_s": statistics.median(stalls[1:]),
    }
