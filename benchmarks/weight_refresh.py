"""The cost of a weight refresh to a server, mode by mode, next to what the machine allows.

    tokens       a second, during a refresh and undisturbed, with the same requests running
    stall        of the step that commits, next to a memory copy of as many bytes
    refresh      from the sender's call to the last engine's answer, next to a gloo broadcast of the same bytes between
                 two bare processes; through shared memory and by broadcast; with no request running, and with as many
                 as in the first line
    delta        the same server refreshed by what changed alone, from encoding to the answer
    peak memory  of the process that computes, next to the formula of docs/reference/weights/staging.md

The trainer is this process, with the `WeightSender` that trainers use.  It holds the weights as transformers does: the
experts of a layer in one tensor.  A refresh sends the weights that are served, so that requests run on as they were.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.bare_broadcast import BareBroadcast
from benchmarks.delta_refresh import ONE_IN, DeltaRefresh, DeltaTrainer
from benchmarks.memory import read_memory, wait_ready, worker_pid
from benchmarks.shapes import checkpoint
from rollout.client import RolloutClient
from rollout.server.child_process import ChildProcess
from weight_sync.bucket import pack, plan_buckets
from weight_sync.process_group import free_port
from weight_sync.sealed_memory import MAX_MAPPED
from weight_sync.sender import WeightSender, split_fused_experts
from weight_sync.sender.carriers import Transport
from weight_sync.tensor_meta import TensorMeta

MODES = ("host", "device", "journal", "in_place")
SHARE_WHILE_STAGING = 0.85
STALL_FACTOR = 1.3
REFRESH_FACTOR = 1.25
SMALL_REFRESH_FACTOR = 2.0
"""The bound for shape S, whose bytes take as long as the HTTP calls."""
BUSY_FACTOR = 1.5
"""The bound of a refresh while requests run, by its idle time.  It needs cores that steps leave free."""
MEMORY_TOLERANCE = 0.1
TIMEOUT_S = 300.0
PROMPT_TOKENS = 32
BUCKET_BYTES = 256 << 20  # as the sender has it by default
WINDOW_S = 1.0
BUSY_S = 8.0
SETTLE_S = 0.5
"""Memory of a refresh goes back after its answer."""

RATES = {
    "copy": "a copy",
    "broadcast": "a bare broadcast",
    "refresh": "a refresh through shared memory",
    "by_broadcast": "by broadcast",
}
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Plan:
    """The tensors sent: buckets of named tensors, and their bytes; `source`: the same as a trainer has it.

    `mapped_bytes`: the trainer's memory that the server has mapped, too.
    """

    source: Named
    buckets: list[Named]
    num_bytes: int
    mapped_bytes: int

    @classmethod
    def of(cls, folder: Path, bucket_bytes: int) -> Plan:
        tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
        source = _as_trained(tensors)
        tensors = dict(split_fused_experts(source))
        metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        buckets = [[(meta.name, tensors[meta.name]) for meta in bucket] for bucket in plan_buckets(metas, bucket_bytes)]
        sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
        mapped = sum(max(sizes[turn::MAX_MAPPED], default=0) for turn in range(MAX_MAPPED))
        return cls(source, buckets, sum(sizes), mapped)


def _as_trained(tensors: dict[str, torch.Tensor]) -> Named:
    """Return tensors as a trainer holds them: all experts of a layer in one tensor, gate and up after one another.

    All other tensors are copies, in memory of their own.
    """
    by_layer: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    source: Named = []
    for name, tensor in tensors.items():
        layer, experts, rest = name.partition(".experts.")
        if not experts:
            source.append((name, tensor.clone()))
            continue
        expert, projection, _ = rest.split(".")
        by_layer.setdefault(layer, {}).setdefault(int(expert), {})[projection] = tensor
    for layer, found in by_layer.items():
        numbered = [found[expert] for expert in range(len(found))]
        gate_up = [torch.cat([one["gate_proj"], one["up_proj"]]) for one in numbered]
        source.append((f"{layer}.experts.gate_up_proj", torch.stack(gate_up)))
        source.append((f"{layer}.experts.down_proj", torch.stack([one["down_proj"] for one in numbered])))
    return source


def run(
    shape: str,
    rounds: int,
    console: Console,
    *,
    modes: tuple[str, ...] = MODES,
    requests: int = 8,
    folder: Path | None = None,
    busy_s: float = BUSY_S,
) -> list[dict]:
    """Measure all modes, print one table, and return its rows.  `folder`: a checkpoint other than the shape's own.

    Buckets come for at least `busy_s` in sum while requests run: in many refreshes where a checkpoint is tiny.
    """
    folder = checkpoint(shape) if folder is None else folder
    plan = Plan.of(folder, BUCKET_BYTES)
    copy_s = copy_seconds(plan.num_bytes, rounds)
    rows = []
    for mode in modes:
        console.print(f"refresh, shape {shape}: --weight-staging {mode}")
        measured = _measure(folder, mode, plan, rounds, requests, busy_s)
        rows.append({"shape": shape, "mode": mode, "num_bytes": plan.num_bytes, "copy_s": copy_s} | measured)
    _print(shape, rows, console)
    return rows


def copy_seconds(num_bytes: int, rounds: int) -> float:
    """Return the median time of copying `num_bytes` in memory, on all threads."""
    source, target = (torch.zeros(num_bytes // 8 + 1, dtype=torch.int64) for _ in range(2))
    target.copy_(source)
    return statistics.median(_timed(lambda: target.copy_(source)) for _ in range(rounds))


# --- one server -------------------------------------------------------------------------------------------------------


def _measure(folder: Path, mode: str, plan: Plan, rounds: int, requests: int, busy_s: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="lockstep-refresh-") as scratch:
        port = free_port()
        words = ["serve", "--model-path", str(folder), "--port", str(port), "--weight-staging", mode]
        words += ["--max-total-tokens", str(requests * 4096), "--log-level", "warning"]
        command = [sys.executable, "-m", "rollout.cli.main", *words]
        with (
            ChildProcess("server", command, Path(scratch) / "server.log") as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False) as http,
        ):
            wait_ready(server, http)
            trainer, far = _Trainer(http, plan, "shared_memory"), _Trainer(http, plan, "broadcast")
            worker = worker_pid(server.pid)
            trainer.send_one()  # first use of everything; its memory is not worth mentioning
            time.sleep(SETTLE_S)
            memory = _peak_memory(worker, lambda: trainer.refresh(stated=False))  # kept for the refreshes that follow
            quiet, stated, sent, bare_s = _idle(trainer, far, plan, rounds)
            with _requests(http, requests):
                time.sleep(0.5)
                undisturbed = [trainer.tokens_per_second(WINDOW_S)]  # before, between and after: requests grow
                busy: list[Refreshed] = []
                while len(busy) < rounds or sum(one.seconds for one in busy) < busy_s:
                    busy.append(trainer.refresh(stated=False, count_tokens=True))
                    undisturbed.append(trainer.tokens_per_second(WINDOW_S))
            trainer.leave()
            far.leave()
            deltas = _by_delta(http, plan, rounds) if mode == "host" else []
    held = mode in ("journal", "in_place")
    beside = 0 if held else plan.num_bytes
    return {
        "broadcast_s": statistics.median(bare_s),
        "stall_s": statistics.median(one.stall_s for one in quiet),
        "refresh_s": statistics.median(one.seconds for one in quiet),
        "by_broadcast_s": statistics.median(one.seconds for one in sent),
        "stated_s": statistics.median(one.seconds for one in stated),
        "busy_s": statistics.median(one.seconds for one in busy),
        "tokens_s": statistics.median(undisturbed),
        "share_while_staging": statistics.median(
            one.tokens_s / statistics.mean(around) for one, around in zip(busy, pairwise(undisturbed), strict=True)
        ),
        "delta_s": statistics.median(one.encode_s + one.send_s for one in deltas) if deltas else None,
        "delta_send_s": statistics.median(one.send_s for one in deltas) if deltas else None,
        "delta_bytes": statistics.median(one.num_bytes for one in deltas) if deltas else None,
        "memory": memory,
        "memory_formula": plan.mapped_bytes + beside,
        "steps_held": held,
    }


def _idle(
    near: _Trainer, far: _Trainer, plan: Plan, rounds: int
) -> tuple[list[Refreshed], list[Refreshed], list[Refreshed], list[float]]:
    """Measure refreshes without and with a manifest, refreshes by broadcast, and bare broadcasts.

    They take turns, so that the machine's moods meet all of them.
    """
    quiet, stated, sent, bare_s = [], [], [], []
    far.refresh(stated=False)  # first use
    with BareBroadcast([pack(bucket) for bucket in plan.buckets]) as bare:
        for _ in range(rounds):
            bare_s.append(bare.seconds())
            quiet.append(near.refresh(stated=False))
            sent.append(far.refresh(stated=False))
            stated.append(near.refresh(stated=True))
    return quiet, stated, sent, bare_s


def _by_delta(http: httpx.Client, plan: Plan, rounds: int) -> list[DeltaRefresh]:
    client = RolloutClient(str(http.base_url))
    trainer = DeltaTrainer(client, dict(named for bucket in plan.buckets for named in bucket), TIMEOUT_S)
    try:
        trainer.refresh()  # first use
        return [trainer.refresh() for _ in range(rounds)]
    finally:
        trainer.leave()
        client.close()


@dataclass(frozen=True)
class Refreshed:
    """A refresh.  `tokens_s`: tokens a second from the call to its end; 0 if not counted."""

    seconds: float
    stall_s: float
    tokens_s: float


class _Trainer:
    """Rank 0 of a group with the server."""

    def __init__(self, http: httpx.Client, plan: Plan, transport: Transport) -> None:
        self._http = http
        self._plan = plan
        self._client = RolloutClient(str(http.base_url))
        self._sender = WeightSender(self._client, timeout_s=TIMEOUT_S, transport=transport)
        self._sender.connect(group_name=transport)

    def leave(self) -> None:
        self._sender.close()
        self._client.close()

    def refresh(self, *, stated: bool, count_tokens: bool = False) -> Refreshed:
        """Refresh the server.  `stated`: with a manifest of fingerprints, computed here and checked there."""
        tokens, since = self._num_generated() if count_tokens else 0, time.perf_counter()
        report = self._sender.refresh(self._plan.source, bucket_bytes=BUCKET_BYTES, with_manifest=stated)
        rate = (self._num_generated() - tokens) / (time.perf_counter() - since) if count_tokens else 0.0
        (engine,) = report.engines.values()
        assert engine.stall_seconds is not None, "the engine has committed"
        return Refreshed(report.seconds, engine.stall_seconds, rate)

    def send_one(self) -> None:
        """Send the smallest tensor alone, as a partial update."""
        with self._sender.update(coverage="partial") as update:
            update.send([min(self._plan.source, key=lambda named: named[1].nbytes)])

    def tokens_per_second(self, seconds: float) -> float:
        tokens, since = self._num_generated(), time.perf_counter()
        time.sleep(seconds)
        return (self._num_generated() - tokens) / (time.perf_counter() - since)

    def _num_generated(self) -> int:
        return self._http.get("/server_info").raise_for_status().json()["internal_states"][0]["num_generated_tokens"]


@contextmanager
def _requests(http: httpx.Client, count: int) -> Iterator[None]:
    """Keep `count` requests under way."""
    over = threading.Event()
    info = http.get("/model_info").raise_for_status().json()

    def keep_one() -> None:
        rng = random.Random(0)
        while not over.is_set():
            body = {
                "input_ids": [rng.randrange(info["vocab_size"]) for _ in range(PROMPT_TOKENS)],
                "sampling_params": {"max_new_tokens": 1024, "ignore_eos": True},
            }
            http.post("/generate", json=body).raise_for_status()

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(keep_one) for _ in range(count)]
        try:
            yield
        finally:
            over.set()
            http.post("/abort_request", json={"abort_all": True})
            for one in running:
                one.result()


def _peak_memory(pid: int, work: Callable[[], object]) -> int:
    """Run `work`; return how far the resident bytes of a process rise above their number before."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts anew
    before = read_memory(pid).resident
    work()
    return read_memory(pid).peak - before


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _print(shape: str, rows: list[dict], console: Console) -> None:
    first, factor = rows[0], SMALL_REFRESH_FACTOR if shape == "S" else REFRESH_FACTOR
    title = f"Weight refresh, shape {shape}, {first['num_bytes'] / 1e6:.0f} MB; copy {1e3 * first['copy_s']:.1f} ms"
    table = Table(title=title)
    columns = (
        "staging",
        "tok/s",
        "staged",
        "stall, ms",
        "bare broadcast, ms",
        "idle, ms",
        "by broadcast",
        "stated",
        "busy",
        "peak, MB",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "staging" else "right")
    for row in rows:
        share = row["share_while_staging"]
        table.add_row(
            row["mode"],
            f"{row['tokens_s']:.0f}",
            "wait" if row["steps_held"] else _judged(f"{100 * share:.0f} %", share >= SHARE_WHILE_STAGING),
            _factor(1e3 * row["stall_s"], 1e3 * row["copy_s"], STALL_FACTOR, ".1f"),
            f"{1e3 * row['broadcast_s']:.1f}",
            _factor(1e3 * row["refresh_s"], 1e3 * row["broadcast_s"], factor, ".0f"),
            f"{1e3 * row['by_broadcast_s']:.0f} ({row['by_broadcast_s'] / row['broadcast_s']:.2f}x)",
            f"{1e3 * row['stated_s']:.0f}",
            _factor(1e3 * row["busy_s"], 1e3 * row["refresh_s"], BUSY_FACTOR, ".0f"),
            _factor(row["memory"] / 1e6, row["memory_formula"] / 1e6, 1 + MEMORY_TOLERANCE, ".0f"),
        )
    console.print(table)
    for row in (row for row in rows if row["delta_s"] is not None):
        console.print(
            f"By delta, one element in {ONE_IN} changed: {row['num_bytes'] / row['delta_bytes']:.0f} times smaller, "
            f"{1e3 * row['delta_send_s']:.0f} ms to send and commit, {1e3 * row['delta_s']:.0f} with encoding; a full "
            f"refresh {1e3 * row['refresh_s']:.0f} ms."
        )
    row = rows[0]
    rates = {name: row["num_bytes"] / row[f"{name}_s"] / 1e9 for name in RATES}
    console.print("GB/s: " + ", ".join(f"{RATES[name]} {rate:.2f}" for name, rate in rates.items()))
    console.print(
        "staged: share of the tokens a second during a refresh; bare: a broadcast; refreshes of an idle server "
        "through shared memory, by broadcast, stated (with fingerprints), and of a busy one. "
        f"Bounds: {100 * SHARE_WHILE_STAGING:.0f} % of the tokens, {STALL_FACTOR}x a copy, {factor}x a bare "
        f"broadcast, {BUSY_FACTOR}x idle, the memory formula within {100 * MEMORY_TOLERANCE:.0f} %.",
    )


def _factor(value: float, base: float, bound: float, form: str) -> str:
    return _judged(f"{value:{form}} ({value / base:.2f}x)", value <= bound * base)


def _judged(text: str, holds: bool) -> str:
    return text if holds else f"[red]{text}[/red]"
