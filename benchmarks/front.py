"""Measures the front: HTTP, tokenizing, records, text and answers, by the CPU time of its process.

A real server runs in front of an engine without a model (`front_engine`), or of a whole engine with a tiny one.  A
client that costs little (`front_client`) keeps requests in flight.  The three processes share this machine's cores.  So
the table has the rate on the clock, and the rate of one front process with a core of its own: one over its CPU time for
a request.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.front_client import COUNTING, Counted, Load
from benchmarks.memory import wait_ready
from benchmarks.shapes import cached_checkpoint, checkpoint
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

IN_FLIGHT = (1, 16, 256, 1024, 4096)
SECONDS = 6.0
HEALTH_EVERY_S = 0.02
WORKERS = ("benchmarks.front_engine", "rollout.engine.worker")
TINY = CheckpointSpec(
    hidden_size=48, layers=2, dense_first=0, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=3,
    moe_intermediate_size=32, vocab_size=320, context_length=1024,
)  # fmt: skip
MODEL_IN_FLIGHT = (256, 1024)
HERE = Path(__file__).resolve().parents[1]
RECORDS = {"return_logprob": True, "return_routed_experts": True}


class Sizes(NamedTuple):
    """The tokens of a request: of its prompt, unless that is a text, and new ones, at most 127."""

    prompt: int = 64
    new: int = 40

    @classmethod
    def parse(cls, word: str) -> Sizes:
        """Read `PROMPT+NEW`."""
        prompt, new = word.split("+")
        return cls(int(prompt), int(new))


SIZES = Sizes()


@dataclasses.dataclass(frozen=True)
class Mode:
    """A kind of request: the fields of its body, headers, and what ends a stream."""

    name: str
    fields: dict[str, Any]
    headers: str = ""
    end: str | None = None
    is_text: bool = False

    def mark(self, new_tokens: int) -> str:
        """Return what each whole answer holds.  In msgpack a small number is a byte."""
        return f"completion_tokens{chr(new_tokens)}" if self.headers else f'"completion_tokens":{new_tokens},'


MODES = (
    Mode("ids", {}),
    Mode("text", {}, is_text=True),
    Mode("records", RECORDS),
    Mode("records, compact", RECORDS | {"logprobs_format": "compact", "routed_experts_format": "compact"}),
    Mode("records, msgpack", RECORDS, "accept: application/x-msgpack\r\n"),
    Mode("stream", {"stream": True}, end="[DONE]\n\n\r\n0\r\n\r\n"),
)


def run(
    seconds: float,
    console: Console,
    *,
    in_flight: tuple[int, ...] = IN_FLIGHT,
    modes: tuple[Mode, ...] = MODES,
    has_model: bool = False,
    sizes: Sizes = SIZES,
) -> list[dict]:
    """Measure each mode with each number of requests in flight, print one table, and return its rows."""
    rows = []
    with _serving(has_model) as server:
        for mode in modes:
            for count in in_flight:
                rows.append(server.measure(mode, count, seconds, sizes) | {"has_model": has_model})
    _print(rows, sizes, console)
    return rows


def run_with_model(seconds: float, console: Console) -> list[dict]:
    """Measure plain answers, and answers with records, of an engine with a tiny model."""
    modes = tuple(mode for mode in MODES if mode.name in ("ids", "records"))
    return run(seconds, console, in_flight=MODEL_IN_FLIGHT, modes=modes, has_model=True)


class _Server:
    """A server at `port`: process `pid` is the front, `engine_pid` the engine."""

    def __init__(self, port: int, pid: int) -> None:
        self._port, self._pid = port, pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = {int(each): Path(f"/proc/{each}/cmdline").read_text() for each in children}
        (self._engine_pid,) = [each for each, line in lines.items() if any(name in line for name in WORKERS)]

    def measure(self, mode: Mode, in_flight: int, seconds: float, sizes: Sizes) -> dict[str, Any]:
        """Return one row: rates, CPU time and latencies."""
        load = Load(
            port=self._port,
            in_flight=in_flight,
            seconds=seconds,
            request=_request(mode, sizes),
            mark=mode.mark(sizes.new),
            end=mode.end,
            pids=[self._pid, self._engine_pid],
        )
        command = [sys.executable, "-m", "benchmarks.front_client", msgspec.json.encode(load).decode()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE) as client:
            assert client.stdout is not None
            if client.stdout.readline().strip() != COUNTING:
                raise RuntimeError(f"{mode.name}, {in_flight} in flight: the client failed")
            with _health_probe(self._port) as health:
                last = client.stdout.readline()
        found = Counted(**json.loads(last))
        if not found.answers:
            raise RuntimeError(f"{mode.name}, {in_flight} in flight: no answer came in {seconds:.0f} s")
        us = found.cpu_s[0] * 1e6 / found.answers
        return {
            "part": "front",
            "mode": mode.name,
            "in_flight": in_flight,
            "requests_s": found.answers / found.seconds,
            "tokens_s": found.answers * sizes.new / found.seconds,
            "front_us_request": us,
            "front_us_token": us / sizes.new,
            "engine_us_request": found.cpu_s[1] * 1e6 / found.answers,
            "client_us_request": found.own_cpu_s * 1e6 / found.answers,
            "capacity_requests_s": 1e6 / us,
            "capacity_tokens_s": sizes.new * 1e6 / us,
            "bytes": found.num_bytes / found.answers,
            "latency_ms": found.latency_p50 * 1e3,
            "latency_p99_ms": found.latency_p99 * 1e3,
            "health_ms": _percentile(health, 0.5) * 1e3,
            "health_p99_ms": _percentile(health, 0.99) * 1e3,
        }


@contextmanager
def _serving(has_model: bool) -> Iterator[_Server]:
    folder = cached_checkpoint("front", TINY) if has_model else checkpoint("S")
    program = ("-m", "rollout.cli.main") if has_model else ("-m", WORKERS[0])
    with tempfile.TemporaryDirectory(prefix="lockstep-front-") as scratch:
        port = free_port()
        words = ["--model-path", str(folder), "--port", str(port), "--log-level", "warning"]
        words += ["--enable-return-routed-experts"]
        command = ["env", f"PYTHONPATH={HERE}", sys.executable, *program, "serve", *words]
        with (
            ChildProcess("server", command, Path(scratch) / "server.log") as process,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as http,
        ):
            wait_ready(process, http)
            yield _Server(port, process.pid)


@contextmanager
def _health_probe(port: int) -> Iterator[list[float]]:
    """Yield a list of the seconds that calls of /health take, one after the other."""
    taken: list[float] = []
    is_over = threading.Event()

    def probe() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while not is_over.wait(HEALTH_EVERY_S):
                began = time.perf_counter()
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                answer = connection.recv(65536)
                if not answer.startswith(b"HTTP/1.1 200 "):
                    raise RuntimeError(f"/health: {answer[:300]!r}")
                taken.append(time.perf_counter() - began)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield taken
    finally:
        is_over.set()
        thread.join()


def _request(mode: Mode, sizes: Sizes) -> str:
    rng = random.Random(1)
    ids = [rng.randrange(256, TINY.vocab_size) for _ in range(sizes.prompt)]
    prompt = {"text": "The model counts from one to four here. " * 4} if mode.is_text else {"input_ids": ids}
    sampling = {"max_new_tokens": sizes.new, "temperature": 1.0, "ignore_eos": True}
    body = json.dumps(prompt | {"sampling_params": sampling} | mode.fields)
    return (
        f"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{mode.headers}"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else float("nan")


def _print(rows: list[dict], sizes: Sizes, console: Console) -> None:
    behind = "a tiny model" if rows[0]["has_model"] else "an engine without a model, a step each ms"
    table = Table(
        title=f"The front before {behind}: {sizes.prompt} prompt tokens, {sizes.new} new ones, {os.cpu_count()} "
        "cores for front, engine and client"
    )
    columns = ("mode", "in flight", "requests/s", "tokens/s", "front us/request", "us/token", "one core: requests/s")
    for column in (
        *columns,
        "tokens/s",
        "engine us",
        "client us",
        "bytes",
        "p50 ms",
        "p99 ms",
        "/health p50 ms",
        "p99 ms",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["mode"],
            f"{row['in_flight']:,}",
            f"{row['requests_s']:,.0f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['front_us_request']:.0f}",
            f"{row['front_us_token']:.1f}",
            f"{row['capacity_requests_s']:,.0f}",
            f"{row['capacity_tokens_s']:,.0f}",
            f"{row['engine_us_request']:.0f}",
            f"{row['client_us_request']:.0f}",
            f"{row['bytes']:,.0f}",
            *(f"{row[key]:.1f}" for key in ("latency_ms", "latency_p99_ms", "health_ms", "health_p99_ms")),
        )
    console.print(table)
    capacity = statistics.median(row["capacity_requests_s"] for row in rows)
    console.print(f"one core: one over the CPU time of the front process; the median is {capacity:,.0f} requests/s.")


def main() -> None:
    """Measure one mode by itself."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front", description=main.__doc__)
    parser.add_argument("mode", choices=[mode.name for mode in MODES])
    parser.add_argument("in_flight", type=int, help="requests in flight")
    parser.add_argument("seconds", type=float)
    parser.add_argument("engine", nargs="?", choices=("null", "model"), default="null", help="default: no model")
    parser.add_argument("sizes", nargs="?", type=Sizes.parse, default=SIZES, help="tokens, PROMPT+NEW")
    args = parser.parse_args()
    run(
        args.seconds,
        Console(width=220),
        in_flight=(args.in_flight,),
        modes=tuple(mode for mode in MODES if mode.name == args.mode),
        has_model=args.engine == "model",
        sizes=args.sizes,
    )


if __name__ == "__main__":
    main()
