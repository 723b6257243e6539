"""The cost of log-probabilities of given sequences in each process, by how many likely tokens and in which form.

The CPU time of the engine, of the HTTP process and of this one, as a client, for each scored token.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.sessions import REQUEST_S, server
from benchmarks.shapes import SHAPES
from rollout.client import RolloutClient

SEQUENCES, TOKENS, TOP_K = 64, 512, 256
IN_A_CALL = 16  # so that the nested form is under --max-logprob-entries
MICRO = 1e6 / (SEQUENCES * (TOKENS - 1))
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
FORMS = {"none": 0, "nested": TOP_K, "compact": TOP_K}
WHERE = ("engine", "HTTP process", "client", "in all")


def run(shape: str, rounds: int, console: Console) -> list[dict]:
    """Measure all forms in turns, print one table, and return its rows, one for each form."""
    measured: dict[str, list[dict[str, float]]] = defaultdict(list)
    sizes: dict[str, int] = {}
    rng = random.Random(0)
    with Progress(console=console) as progress, server(shape, ["--disable-radix-cache"]) as (url, pid):
        task = progress.add_task(f"scoring, shape {shape}", total=(rounds + 1) * len(FORMS))
        for turn in range(rounds + 1):
            for form in rng.sample(list(FORMS), len(FORMS)):
                sequences = [[rng.randrange(SHAPES[shape].vocab_size) for _ in range(TOKENS)] for _ in range(SEQUENCES)]
                seconds = _measure(url, pid, form, sequences)
                if turn:
                    measured[form].append(seconds)
                else:
                    sizes[form] = _size(url, form, sequences[0])
                progress.advance(task)
    rows = []
    for form, top_k in FORMS.items():
        row: dict[str, Any] = {"shape": shape, "form": form, "likely tokens": top_k, "bytes a token": sizes[form]}
        row |= {where: statistics.median([each[where] for each in measured[form]]) * MICRO for where in WHERE}
        rows.append(row | {"rounds": rounds})
    _print(rows, console)
    return rows


def _measure(url: str, pid: int, form: str, sequences: list[list[int]]) -> dict[str, float]:
    """Score the sequences; return the CPU seconds of each process, and the seconds by the clock."""
    engine = _scheduler(pid)
    with RolloutClient(url) as client:
        before = (_cpu_s(engine), _cpu_s(pid), time.process_time(), time.perf_counter())
        for first in range(0, SEQUENCES, IN_A_CALL):
            part = sequences[first : first + IN_A_CALL]
            if form == "compact":
                client.score(part, top_k=FORMS[form], timeout=REQUEST_S)
            else:
                client.generate(**_body(part, form), timeout=REQUEST_S)
        after = (_cpu_s(engine), _cpu_s(pid), time.process_time(), time.perf_counter())
    return {where: end - begin for where, begin, end in zip(WHERE, before, after, strict=True)}


def _size(url: str, form: str, sequence: list[int]) -> int:
    """Return the bytes of an answer for each scored token."""
    body = _body([sequence], form) | ({"logprobs_format": "compact"} if form == "compact" else {})
    answer = httpx.post(f"{url}/generate", json=body, timeout=REQUEST_S, trust_env=False)
    answer.raise_for_status()
    return len(answer.content) // (TOKENS - 1)


def _body(sequences: list[list[int]], form: str) -> dict[str, Any]:
    params = {"max_new_tokens": 0}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": FORMS[form]}
    return {"input_ids": sequences, "sampling_params": params, **asked}


def _scheduler(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = [child for child in children if b"rollout.engine.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return int(found)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def _print(rows: list[dict], console: Console) -> None:
    first = rows[0]
    table = Table(
        title=f"scoring, shape {first['shape']}: {SEQUENCES} sequences of {TOKENS} tokens, bf16, µs of CPU a token, "
        f"medians of {first['rounds']}"
    )
    for column in ("form", "likely tokens", *WHERE[:3], "µs of the clock", "bytes a token"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [f"{row[where]:.1f}" for where in WHERE]
        table.add_row(row["form"], str(row["likely tokens"]), *times, str(row["bytes a token"]))
    console.print(table)
