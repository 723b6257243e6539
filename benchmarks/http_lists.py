"""CPU time that the HTTP process takes for the tensors of a refresh: lists of buckets, and the manifest of begin.

A real server gets the calls of a trainer over a socket.  Its engine refuses them once it has read them, so that
nothing has to be sent: the HTTP process has then done all that it does for a call.  Names differ from round to round,
so that the first refresh of a round brings lists that are new to the server.  With `--against TREE` a server of another
checkout takes turns with this one.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.memory import wait_ready
from benchmarks.shapes import checkpoint
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

COUNTS = (31_094, 46_000, 69_000)
"""Tensors of Qwen3-30B-A3B after a split of its experts and more, of DeepSeek-V3 and of Kimi-K2."""
PER_CALL = 32_768
"""Tensors of 8 kB that a bucket of the usual size has."""
SMALL_CALLS = 20
REPEATS = 3
"""Refreshes after the first one of a round."""
HERE = Path(__file__).resolve().parents[1]
BOUND_US = 0.5

Lists = dict[str, list[Any]]


def run(rounds: int, console: Console, *, counts: tuple[int, ...] = COUNTS, against: Path | None = None) -> list[dict]:
    """Measure each number of tensors, print one table, and return its rows."""
    trees = {"this": HERE} if against is None else {"before": against.resolve(), "this": HERE}
    rows = []
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_serving(tree)) for name, tree in trees.items()}
        for count in counts:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for turn in range(rounds):
                lists = _lists(count, turn)
                for name in list(servers)[:: 1 if turn % 2 else -1]:
                    found[name].append(servers[name].round(lists))
            for name, measured in found.items():
                medians = {key: statistics.median(one[key] for one in measured) for key in measured[0]}
                rows.append({"part": "http lists", "checkout": name, "tensors": count, "rounds": rounds} | medians)
    _print(rows, console)
    return rows


def _lists(count: int, turn: int) -> Lists:
    """Return names as of a MoE model, dtypes and shapes."""
    names = [
        f"model.layers.{number % 61}.mlp.experts.{number // 183}.{kind}_proj.weight.{turn}"
        for number, kind in zip(range(count), ("gate", "up", "down") * count)
    ]
    return {"names": names, "dtypes": ["bfloat16"] * count, "shapes": [[4, 128]] * count}


@contextmanager
def _serving(tree: Path) -> Iterator[_Server]:
    with tempfile.TemporaryDirectory(prefix="lockstep-lists-") as scratch:
        port = free_port()
        words = ["--model-path", str(checkpoint("S")), "--port", str(port), "--disable-native-kernels"]
        words += ["--max-total-tokens", "4096", "--log-level", "warning"]
        # -P: the folder of a script, which is not the checkout to measure, is no place to import from
        command = ["env", f"PYTHONPATH={tree}", sys.executable, "-P", "-m", "rollout.cli.main", "serve", *words]
        with (
            ChildProcess("server", command, Path(scratch) / "server.log") as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0, trust_env=False) as http,
        ):
            wait_ready(server, http)
            yield _Server(http, server.pid)


class _Server:
    """A server, whose main process has the id `pid`."""

    def __init__(self, http: httpx.Client, pid: int) -> None:
        self._http, self._pid = http, pid
        self._takes_lists = True
        self.round(_lists(1024, -1))  # first use of everything

    def round(self, lists: Lists) -> dict[str, float]:
        """Return microseconds a tensor of the first refresh with these lists and of the following ones."""
        count = len(lists["names"])
        calls = [
            _json(_slice(lists, start) | {"update_id": "none", "load_format": "flattened_bucket"})
            for start in range(0, count, PER_CALL)
        ]
        found = {"bucket_first": self._send("update_weights_from_distributed", calls) / count}
        again = [self._send("update_weights_from_distributed", calls) for _ in range(REPEATS)]
        found["bucket_next"] = statistics.median(again) / count
        small = [_json(_slice(lists, 0, 1) | {"update_id": "none"})] * SMALL_CALLS
        found["call"] = self._send("update_weights_from_distributed", small) / SMALL_CALLS
        found["entries"] = self._send("begin_weight_update", [_begin(_entries(lists))]) / count
        found["lists_first"] = found["lists_next"] = float("nan")
        if self._takes_lists:
            begins = [_begin(lists | {"fingerprints": _digits(count)}) for _ in range(REPEATS + 1)]
            cost = [self._send("begin_weight_update", [begin]) / count for begin in begins]
            found |= {"lists_first": cost[0], "lists_next": statistics.median(cost[1:])}
        return found

    def _send(self, path: str, bodies: list[bytes]) -> float:
        """Return the microseconds of CPU time that the main process took for these calls."""
        before = self._cpu_us()
        for body in bodies:
            answer = self._http.post(f"/{path}", content=body)
            if answer.status_code == 400 and path == "begin_weight_update":
                self._takes_lists = False  # a server of before does not know the form
            elif answer.status_code not in (404, 409):  # no such group, or another base
                raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
        time.sleep(0.02)  # until the last thread has gone to sleep
        return self._cpu_us() - before

    def _cpu_us(self) -> float:
        tasks = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3


def _slice(lists: Lists, start: int, count: int = PER_CALL) -> Lists:
    return {name: values[start : start + count] for name, values in lists.items()}


def _entries(lists: Lists) -> list[dict[str, Any]]:
    rows = zip(lists["names"], lists["dtypes"], lists["shapes"], strict=True)
    return [{"name": n, "dtype": d, "shape": s, "fingerprint": _digits(1)} for n, d, s in rows]


def _begin(manifest: Any) -> bytes:
    return _json({"manifest": manifest, "base_version": "another", "update_id": "none"})


def _digits(count: int) -> str:
    return random.randbytes(8 * count).hex()


def _json(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _print(rows: list[dict], console: Console) -> None:
    table = Table(
        title=f"HTTP process: microseconds of CPU time a tensor, {PER_CALL} tensors a call, medians of "
        f"{rows[0]['rounds']} rounds"
    )
    for column in ("checkout", "tensors", "buckets", "again", "a call", "begin, entries", "begin, lists", "again"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["checkout"],
            f"{row['tensors']:,}",
            f"{row['bucket_first']:.2f}",
            _judged(row["bucket_next"]),
            f"{row['call']:.0f}",
            f"{row['entries']:.2f}",
            f"{row['lists_first']:.2f}",
            _judged(row["lists_next"]),
        )
    console.print(table)
    console.print(f"again: lists that came before, at most {BOUND_US} us; a call: with one tensor.")


def _judged(value: float) -> str:
    return f"[red]{value:.2f}[/red]" if value > BOUND_US else f"{value:.2f}"
