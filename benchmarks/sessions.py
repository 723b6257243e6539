"""The cost of sessions, pins and KV events over HTTP: three servers by turns, the same conversations for each.

off        no session is named, nothing is published
off again  the same once more: two servers differ by where their memory lies
on         every request names its session, whose prefix is pinned; a subscriber reads every event

A round is several conversations at once, of some turns each: a turn sends the conversation so far and some more tokens.
"""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import torch
import zmq
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.shapes import SHAPES, checkpoint

CONVERSATIONS, TURNS = 32, 4
FIRST_TOKENS, MORE_TOKENS, ANSWER_TOKENS = 128, 32, 32
START_S, REQUEST_S, STOP_S = 300.0, 600.0, 30.0


def run(shape: str, rounds: int, console: Console) -> list[dict]:
    """Measure the servers in turns, print one table, and return its rows."""
    rates: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(0)
    with ExitStack() as stack, Progress(console=console) as progress:
        names = ("off", "off again", "on")
        task = progress.add_task(f"sessions, shape {shape}", total=(rounds + 1) * len(names))
        events = _Subscriber()
        stack.callback(events.close)
        flags = ["--session-pin-fraction", "0.5", "--kv-events-config", f'{{"endpoint": "{events.endpoint}"}}']
        servers = {name: stack.enter_context(server(shape, flags if name == "on" else []))[0] for name in names}
        for turn in range(rounds + 1):
            for name in rng.sample(names, len(names)):  # the order of the servers must not matter
                seconds = asyncio.run(_round(servers[name], SHAPES[shape].vocab_size, turn, named=name == "on"))
                if turn:
                    rates[name].append(CONVERSATIONS * TURNS * ANSWER_TOKENS / seconds)
                progress.advance(task)
        assert events.num_batches > 0, "no event was read"
    rows = []
    for name in names:
        ratios = [rate / off for rate, off in zip(rates[name], rates["off"], strict=True)]
        row = {"shape": shape, "sessions and events": name, "tokens a second": statistics.median(rates[name])}
        rows.append(row | {"ratio": statistics.median(ratios), "rounds": rounds})
    _print(rows, console)
    return rows


async def _round(url: str, vocab_size: int, seed: int, named: bool) -> float:
    """Hold all conversations of a round at once; return the seconds that they took."""
    limits = httpx.Limits(max_connections=CONVERSATIONS)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, trust_env=False, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*[_converse(client, vocab_size, seed, number, named) for number in range(CONVERSATIONS)])
        return time.perf_counter() - start


async def _converse(client: httpx.AsyncClient, vocab_size: int, seed: int, number: int, named: bool) -> None:
    rng = random.Random(f"{seed}/{number}")
    headers = {"X-Session-ID": f"{seed}/{number}"} if named else {}
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": ANSWER_TOKENS, "seed": number}
    so_far: list[int] = []
    for turn in range(TURNS):
        so_far += [rng.randrange(vocab_size) for _ in range(MORE_TOKENS if turn else FIRST_TOKENS)]
        body: dict[str, Any] = {"input_ids": so_far, "sampling_params": params, "return_logprob": True}
        answer = await client.post("/generate", json=body, headers=headers)
        answer.raise_for_status()
        so_far += answer.json()["output_ids"]


@contextmanager
def server(shape: str, flags: list[str]) -> Iterator[tuple[str, int]]:
    """Start a server; yield its URL and the id of its process once it is up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rollout.cli.main", "serve", "--model-path", str(checkpoint(shape))]
    command += ["--port", str(port), "--dtype", "bfloat16", "--skip-tokenizer-init", "--log-level", "warning"]
    command += ["--max-total-tokens", "65536", "--num-threads", str(torch.get_num_threads()), *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not _is_up(f"http://127.0.0.1:{port}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(STOP_S)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class _Subscriber:
    """A subscriber that reads the published events, as a router does, and counts their batches."""

    def __init__(self) -> None:
        self.num_batches = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 100)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                self._socket.recv_multipart()
                self.num_batches += 1
            except zmq.Again:
                continue


def _print(rows: list[dict], console: Console) -> None:
    first = rows[0]
    table = Table(
        title=f"Sessions and KV events, shape {first['shape']}: {CONVERSATIONS} conversations of {TURNS} turns over "
        f"HTTP, answers of {ANSWER_TOKENS}, bf16, medians of {first['rounds']}"
    )
    for column in ("sessions and events", "tokens/s", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["sessions and events"], f"{row['tokens a second']:.0f}", f"{row['ratio']:.3f}x")
    console.print(table)
