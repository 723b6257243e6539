"""Tokens a second with a typical JSON schema, and of free text: same engine, prompts and lengths, in turns.

The schema is a list of records that is longer than the answers, so that no row ends early.  Every row samples at
temperature 1.  The first answer with the schema, which compiles it, is in no number.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shapes import SHAPES, checkpoint
from rollout.server.engine import Engine

BATCH = 32
PROMPT_TOKENS = 128
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["book", "tool", "place"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 1000},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "owner": {
            "type": "object",
            "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}, "active": {"type": "boolean"}},
            "required": ["id", "active"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "count", "tags", "owner"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}


def run(shape: str, rounds: int, new_tokens: int, console: Console) -> list[dict[str, Any]]:
    """Measure both in turns, print a table, and return its rows."""
    engine = Engine(model_path=str(checkpoint(shape)), dtype="bfloat16", max_total_tokens=65536)
    kinds: dict[str, dict[str, Any]] = {"free text": {}, "schema": {"json_schema": json.dumps(SCHEMA)}}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    rng = random.Random(0)
    for turn in range(rounds + 1):  # turn 0 warms up
        for name, grammar in kinds.items():
            prompts = [[rng.randrange(SHAPES[shape].vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH)]
            params = {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True, **grammar}
            start = time.perf_counter()
            engine.generate(input_ids=prompts, sampling_params=params)
            if turn:
                times[name].append(time.perf_counter() - start)
    engine.close()
    speed = {name: BATCH * new_tokens / statistics.median(values) for name, values in times.items()}
    row = {"shape": shape, "batch": BATCH, **speed, "ratio": speed["schema"] / speed["free text"]}
    table = Table(title=f"Shape {shape}: tokens/s, {PROMPT_TOKENS} in / {new_tokens} out, medians of {rounds}")
    for column in ("batch", *kinds, "ratio"):
        table.add_column(column, justify="right")
    table.add_row(str(BATCH), *(f"{speed[name]:.0f}" for name in kinds), f"{row['ratio']:.2f}x")
    console.print(table)
    return [row]
