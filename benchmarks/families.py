"""Every model family, ours next to `transformers.generate`: same weights, bf16, greedy, one interleaved run.

Each round times, for every batch size and for the prefill of one long prompt, ours and theirs one after the other; the
table shows medians over rounds.  The roofline of a decode step is the time to move its bytes at the bandwidth that was
measured with it.  A step reads all weights but the embedding, the experts that the routes of this very run name, keys
and values; it reads and writes states.  "noise" stands where more tokens took less time: the machine was busy.
"""

from __future__ import annotations

import base64
import dataclasses
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.profile.machine import measure_machine
from benchmarks.shapes import SHAPES, cached_checkpoint
from benchmarks.throughput import PROMPT_TOKENS, Generate, by_engine, by_transformers
from capture.codec import decode_compact
from rollout.core.errors import StartupError
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.families.registry import load_model_config
from rollout.layers.attention_kinds import ATTENTION_LAYERS
from rollout.server.engine import Engine

PREFILL_TOKENS = 1024
DTYPE = torch.bfloat16
COLUMNS = ("family", "batch", "lockstep", "transformers", "ratio", "roofline")
Key = tuple[str, int, int, int]  # system, batch, prompt tokens, new tokens


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a decode step moves: in any case, for an expert of a layer, for a token, and for a sequence."""

    always: int
    expert: int
    tokens: tuple[tuple[int, int | None], ...]  # of each layer: bytes of a token, and the window
    sequence: int

    def of_step(self, batch: int, context: int, num_experts: float) -> float:
        """Return the bytes of a step.  `num_experts`: the experts read, summed over layers."""
        kv = sum(size * min(context, window or context) for size, window in self.tokens)
        return self.always + num_experts * self.expert + batch * (kv + self.sequence)


def run(shape: str, names: list[str], batches: list[int], rounds: int, new_tokens: int, console: Console) -> list[dict]:
    """Measure the families, print one table, and return its rows."""
    transformers_logging.disable_progress_bar()
    rows = []
    for family in names:
        spec = SHAPES[shape]
        spec = dataclasses.replace(spec, family=family, intermediate_size=spec.top_k * spec.moe_intermediate_size)
        folder = cached_checkpoint(f"{family}-{shape}", spec)
        try:
            config = load_model_config(folder)
        except StartupError as error:
            console.print(f"{family} is left out: {error}", markup=False)
            continue
        rows += _family(shape, family, folder, config, batches, rounds, new_tokens, console)
    if rows:
        _print(rows, shape, rounds, new_tokens, console)
    return rows


def _family(
    shape: str,
    family: str,
    folder: Path,
    config: ModelConfig,
    batches: list[int],
    rounds: int,
    new_tokens: int,
    console: Console,
) -> list[dict]:
    machine = measure_machine()
    engine = Engine(
        model_path=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_total_tokens=32768,
        enable_return_routed_experts=config.is_moe,
    )
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, trust_remote_code=False)
    systems = {"lockstep": by_engine(engine), "transformers": by_transformers(hf)}
    cases = [(batch, PROMPT_TOKENS, new) for batch in batches for new in (1, new_tokens)] + [(1, PREFILL_TOKENS, 1)]
    times = _times(family, systems, cases, rounds, config.vocab_size, console)
    step = step_bytes(folder, config)
    rows = []
    for batch in batches:
        row: dict = {"part": "families", "shape": shape, "family": family, "batch": batch}
        for name in systems:
            whole, first = (times[name, batch, PROMPT_TOKENS, new] for new in (new_tokens, 1))
            row[name] = batch * (new_tokens - 1) / (whole - first) if whole > first else None
            row[f"{name} prefill"] = PREFILL_TOKENS / times[name, 1, PREFILL_TOKENS, 1]
        ours, theirs = (row[name] for name in systems)
        row["ratio"] = ours / theirs if ours and theirs else None
        row["prefill ratio"] = row["lockstep prefill"] / row["transformers prefill"]
        experts = experts_read(engine, batch, new_tokens, config.vocab_size) if config.is_moe else 0.0
        read = step.of_step(batch, PROMPT_TOKENS + new_tokens // 2, experts)
        row["bytes a step"] = read
        row["GB/s"] = machine.read_bytes_per_s / 1e9
        row["roofline"] = ours / batch * read / machine.read_bytes_per_s if ours else None
        rows.append(row)
    engine.close()
    return rows


def _times(
    family: str,
    systems: Mapping[str, Generate],
    cases: list[tuple[int, int, int]],
    rounds: int,
    vocab_size: int,
    console: Console,
) -> dict[Key, float]:
    """Return the median seconds of each system and case."""
    times: dict[Key, list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(family, total=(rounds + 1) * len(cases) * len(systems))
        for turn in range(rounds + 1):  # turn 0 warms up
            for batch, prompt_tokens, new in cases:
                for name, generate in systems.items():
                    prompts = _prompts(rng, batch, prompt_tokens, vocab_size)
                    start = time.perf_counter()
                    generate(prompts, new)
                    if turn:
                        times[name, batch, prompt_tokens, new].append(time.perf_counter() - start)
                    progress.advance(task)
    return {key: statistics.median(values) for key, values in times.items()}


def _prompts(rng: random.Random, batch: int, tokens: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(tokens)] for _ in range(batch)]


def experts_read(engine: Engine, batch: int, new_tokens: int, vocab_size: int) -> float:
    """Return how many experts a decode step reads, summed over layers.

    It is the mean over steps of the number of distinct experts in the routes.
    """
    prompts = _prompts(random.Random(1), batch, PROMPT_TOKENS, vocab_size)
    outputs = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_routed_experts=True,
        routed_experts_format="compact",
    )
    texts = [output["meta_info"]["routed_experts"] for output in outputs]  # type: ignore[index]
    routes_BTLK = np.stack([decode_compact(base64.b64decode(text)).signed_ids() for text in texts])
    decoded_BTLK = routes_BTLK[:, PROMPT_TOKENS:]
    counts = [
        len(np.unique(decoded_BTLK[:, step, layer]))
        for step in range(decoded_BTLK.shape[1])
        for layer in range(decoded_BTLK.shape[2])
    ]
    return sum(counts) / decoded_BTLK.shape[1]


def step_bytes(folder: Path, config: ModelConfig) -> StepBytes:
    """Count the bytes of a step by the checkpoint's tensors, and by the KV and states that the layers keep.

    The embedding is read by row: it counts as a whole only where it is the output head, too.
    """
    sizes = _tensor_bytes(folder)
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    embedding = sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight"))
    kept, sequence = [], 0
    for layer in config.layers:
        kind = ATTENTION_LAYERS[type(layer.attention)]
        kv, state = kind.kept(layer.attention, Parallel()), kind.state(layer.attention, Parallel())
        window = getattr(layer.attention, "window", None)
        kept.append((0 if kv is None else kv.elements_per_token * DTYPE.itemsize, window))
        sequence += 0 if state is None else 2 * state.bytes(DTYPE)
    return StepBytes(
        always=sum(sizes.values()) - experts - (0 if config.tie_word_embeddings else embedding),
        expert=experts // (len(config.moe_layer_ids) * config.num_experts) if config.is_moe else 0,
        tokens=tuple(kept),
        sequence=sequence,
    )


def _tensor_bytes(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                sizes[name] = file.get_tensor(name).nbytes
    return sizes


def _cells(row: Mapping) -> list[str]:
    """Return a row of the table, in the order of `COLUMNS`."""
    forms = {"lockstep": "{:.0f}", "transformers": "{:.0f}", "ratio": "{:.1f}x", "roofline": "{:.0%}"}
    values = ["noise" if row[name] is None else form.format(row[name]) for name, form in forms.items()]
    return [row["family"], str(row["batch"]), *values]


def _prefill_cells(row: Mapping) -> list[str]:
    rates = [f"{row['lockstep prefill']:.0f}", f"{row['transformers prefill']:.0f}", f"{row['prefill ratio']:.1f}x"]
    return [row["family"], f"prefill {PREFILL_TOKENS}", *rates, ""]


def table_rows(rows: list[dict]) -> list[list[str]]:
    """Return each family's decode rates of each batch size, and then its prefill."""
    cells = []
    for row, following in zip(rows, [*rows[1:], None]):
        cells.append(_cells(row))
        if following is None or following["family"] != row["family"]:
            cells.append(_prefill_cells(row))
    return cells


def markdown(rows: list[dict]) -> str:
    """Return the table in Markdown, for the documents."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *table_rows(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _print(rows: list[dict], shape: str, rounds: int, new_tokens: int, console: Console) -> None:
    title = f"Families, shape {shape}: tokens/s decoding {new_tokens} after {PROMPT_TOKENS}, medians of {rounds}"
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "family" else "right")
    for cells in table_rows(rows):
        table.add_row(*cells)
    console.print(table)
    rates = [row["GB/s"] for row in rows]
    console.print(f"roofline: {min(rates):.1f} to {max(rates):.1f} GB/s read, {torch.get_num_threads()} threads")
