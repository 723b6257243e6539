"""The stalls of steps while experts are moved between two ranks, and while a refresh takes a placement over.

    rebalance   every expert to the other rank and back, all layers at once or one layer between two steps
    refresh     from disk, the placement kept (before a token was counted) or a new one adopted with the weights

One server over HTTP, requests running; the server states the stalls in its replies.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.memory import wait_ready
from benchmarks.shapes import SHAPES, checkpoint
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

REQUESTS = 8
PROMPT_TOKENS = 32
NEW_TOKENS = 1024
REDUNDANT_EXPERTS = 4
COUNTING_S = 3.0
REQUEST_S = 300.0
# It must not evaluate by itself.
FLAGS = f"--tp-size 2 --ep-size 2 --enable-eplb --ep-num-redundant-experts {REDUNDANT_EXPERTS}"
FLAGS += f" --eplb-rebalance-num-iterations 1000000000 --max-total-tokens {REQUESTS * 2048} --log-level warning"


def run(shape: str, rounds: int, console: Console, folder: Path | None = None) -> list[dict]:
    """Measure the stalls, print one table, and return its rows.  `folder`: a checkpoint other than the shape's own."""
    folder = checkpoint(shape) if folder is None else folder
    with tempfile.TemporaryDirectory(prefix="lockstep-stalls-") as scratch:
        port = free_port()
        words = ["serve", "--model-path", str(folder), "--port", str(port), *FLAGS.split()]
        command = [sys.executable, "-m", "rollout.cli.main", *words]
        with (
            ChildProcess("server", command, Path(scratch) / "server.log") as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_S, trust_env=False) as http,
        ):
            console.print(f"stalls, shape {shape}: starting a server")
            wait_ready(server, http)
            rows = [refresh_row("refresh, placement kept", http, folder, rounds, adopts=False)]
            with busy(http):
                rows += rebalance_rows(http, rounds)
                rows.append(refresh_row("refresh that adopts one", http, folder, rounds, adopts=True))
    console.print(_table(shape, rows, rounds))
    return [{"shape": shape, "table": "stalls"} | row for row in rows]


def refresh_row(name: str, http: httpx.Client, folder: Path, rounds: int, *, adopts: bool) -> dict:
    seconds, stalls, num_bytes = [], [], 0
    for _ in range(rounds + 1):
        if adopts:
            time.sleep(COUNTING_S)  # a placement is planned for the loads of the weights in force
        start = time.perf_counter()
        reply = post(http, "/update_weights_from_disk", {"model_path": str(folder)})
        seconds.append(time.perf_counter() - start)
        stalls.append(reply["stall_seconds"])
        num_bytes = reply["num_bytes"]
        if reply["placement_adopted"] != adopts:
            raise RuntimeError(f"{name}: {reply['placement_note']}")
    return {"what": name, "stall_s": median(stalls[1:]), "seconds": median(seconds[1:]), "num_bytes": num_bytes}


def rebalance_rows(http: httpx.Client, rounds: int) -> list[dict]:
    """Exchange the ranks' experts and move them back, again and again; return rows of the stalls.

    One row is for a move in one chunk, the other for as many chunks as there are layers.
    """
    location = http.get("/expert_location").raise_for_status().json()
    home = location["physical_to_logical_map"]
    half = len(home[0]) // 2
    maps = [[row[half:] + row[:half] for row in home], home]
    rows = []
    for name, layers in (("rebalance, all layers at once", len(home)), ("rebalance, a layer at a time", 1)):
        outcomes, num_bytes = [], 0
        for turn in range(2 * (rounds + 1)):
            body = {"physical_to_logical_map": maps[turn % 2], "layers_per_chunk": layers, "max_stall_s": REQUEST_S}
            reply = post(http, "/eplb_rebalance", body)
            if not reply["rebalanced"]:
                raise RuntimeError(f"{name}: {reply['message']}")
            outcomes.append(reply["outcome"])
            num_bytes = reply["decision"]["num_bytes"]
        stalls = [outcome["longest_chunk_s"] for outcome in outcomes[2:]]
        seconds = [outcome["seconds"] for outcome in outcomes[2:]]
        rows.append({"what": name, "stall_s": median(stalls), "seconds": median(seconds), "num_bytes": num_bytes})
    return rows


@contextmanager
def busy(http: httpx.Client) -> Iterator[None]:
    """Keep `REQUESTS` requests under way."""
    over = threading.Event()
    vocab_size = http.get("/model_info").raise_for_status().json()["vocab_size"]

    def keep_one(seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
            params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            post(http, "/generate", {"input_ids": prompt, "sampling_params": params})

    with ThreadPoolExecutor(REQUESTS) as pool:
        running = [pool.submit(keep_one, seed) for seed in range(REQUESTS)]
        try:
            yield
        finally:
            over.set()
            post(http, "/abort_request", {"abort_all": True})
            for one in running:
                one.result()


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{path}: {answer.text}")
    return answer.json() if answer.content else None


def _table(shape: str, rows: list[dict], rounds: int) -> Table:
    title = f"Shape {shape}, tp 2, ep 2, {SHAPES[shape].experts} + {REDUNDANT_EXPERTS} experts a layer, "
    table = Table(title=title + f"{REQUESTS} requests running, medians of {rounds}")
    for column in ("", "longest stall, ms", "in all, ms", "MB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        values = (1e3 * row["stall_s"], 1e3 * row["seconds"], row["num_bytes"] / 1e6)
        table.add_row(row["what"], *(f"{value:.1f}" for value in values))
    return table
