"""Embeddings of texts of many lengths, through the server and by transformers, in bfloat16 on the same cores.

transformers gets the sequences sorted by length and in padded batches, as sentence-transformers sends them.  Both
systems take turns.  A row has the medians.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModel

from benchmarks.sessions import REQUEST_S, server
from benchmarks.shapes import SHAPES, checkpoint
from rollout.client import RolloutClient

SEQUENCES, SHORTEST, LONGEST, BATCH = 32, 16, 256, 16
PAD = 0


def run(shape: str, rounds: int, console: Console) -> list[dict]:
    """Measure both systems in turns, print one table, and return its rows."""
    rng = random.Random(0)
    seconds: dict[str, list[float]] = defaultdict(list)
    model = AutoModel.from_pretrained(checkpoint(shape), dtype=torch.bfloat16, trust_remote_code=False).eval()
    with (
        Progress(console=console) as progress,
        server(shape, ["--disable-radix-cache"]) as (url, _),
        RolloutClient(url) as client,
    ):
        systems: dict[str, Callable[[list[list[int]]], object]] = {
            "lockstep": lambda sequences: client.embed(sequences, timeout=REQUEST_S),
            "transformers": lambda sequences: _embed(model, sequences),
        }
        task = progress.add_task(f"embeddings, shape {shape}", total=(rounds + 1) * len(systems))
        for turn in range(rounds + 1):
            lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(SEQUENCES)]
            sequences = [[rng.randrange(1, SHAPES[shape].vocab_size) for _ in range(count)] for count in lengths]
            for system, embed in systems.items():
                began = time.perf_counter()
                embed(sequences)
                if turn:
                    seconds[system].append((time.perf_counter() - began) / sum(lengths))
                progress.advance(task)
    rows = [
        {"part": "embeddings", "shape": shape, "system": system, "tokens/s": 1 / statistics.median(taken)}
        for system, taken in seconds.items()
    ]
    _print(rows, console)
    return rows


@torch.inference_mode()
def _embed(model: torch.nn.Module, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Return the hidden state of the last token of each sequence, scaled to length 1, in the order of their lengths."""
    by_length = sorted(sequences, key=len)
    rows: list[torch.Tensor] = []
    for first in range(0, len(by_length), BATCH):
        part = by_length[first : first + BATCH]
        width = max(map(len, part))
        ids = torch.tensor([sequence + [PAD] * (width - len(sequence)) for sequence in part])
        mask = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in part])
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(part)), torch.tensor([len(sequence) - 1 for sequence in part])]
        rows += torch.nn.functional.normalize(last.float(), dim=-1)
    return rows


def _print(rows: list[dict], console: Console) -> None:
    table = Table(
        title=f"embeddings, shape {rows[0]['shape']}: {SEQUENCES} sequences of {SHORTEST} to {LONGEST} tokens"
    )
    for name in ("system", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["system"], f"{row['tokens/s']:,.0f}")
    console.print(table)
