"""Experts in 8 bits next to bfloat16: tokens a second, memory, a refresh, and how far the model is from what was sent.

Engines of both formats take turns; medians over rounds.  Products in 8 bits have the bits of bfloat16 with the values
that are held, so the mismatch comes from these values alone.  It is measured by transformers in float32, with the
demo's model and samples of the plain engine: once with the weights as sent, and once with the weights as held.

Shapes: N samples, S positions, V vocabulary.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.floor import measure_machine
from benchmarks.shapes import SHAPES, cached_checkpoint, checkpoint
from benchmarks.throughput import PROMPT_TOKENS, by_engine
from capture.replay import record_routes
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.server.engine import Engine
from weight_sync.int8_blocks import held_values

FORMATS = ("plain", "w8")
PREFILL_TOKENS = 1024
MISMATCH_SAMPLES, MISMATCH_TOKENS = 32, 64


def run(shape: str, batches: list[int], rounds: int, new_tokens: int, console: Console) -> list[dict]:
    """Measure both formats in turns, print one table, and return its rows."""
    spec, folder = SHAPES[shape], checkpoint(shape)
    read_rate = measure_machine().read_bytes_per_s
    engines = {
        name: Engine(
            model_path=str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_total_tokens=32768,
            cpu_weight_format=name,
        )
        for name in FORMATS
    }
    cases = [(batch, PROMPT_TOKENS, new) for batch in batches for new in (1, new_tokens)] + [(1, PREFILL_TOKENS, 1)]
    times: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(f"weight formats, {shape}", total=(rounds + 1) * len(cases) * len(engines))
        for turn in range(rounds + 1):  # turn 0 warms up
            for batch, tokens, new in cases:
                for name, engine in engines.items():
                    prompts = [[rng.randrange(spec.vocab_size) for _ in range(tokens)] for _ in range(batch)]
                    start = time.perf_counter()
                    by_engine(engine)(prompts, new)
                    if turn:
                        times[name, batch, tokens, new].append(time.perf_counter() - start)
                    progress.advance(task)
    rows = []
    for name, engine in engines.items():
        row: dict = {"part": "formats", "shape": shape, "format": name, "model_bytes": engine.ready.model_bytes}
        for batch in batches:
            whole, first = (statistics.median(times[name, batch, PROMPT_TOKENS, new]) for new in (new_tokens, 1))
            row[f"batch {batch}"] = batch * (new_tokens - 1) / (whole - first) if whole > first else None
        row["prefill"] = PREFILL_TOKENS / statistics.median(times[name, 1, PREFILL_TOKENS, 1])
        row["read GB/s"] = read_rate / 1e9
        rows.append(row)
        engine.close()
    _print(rows, batches, console)
    return rows


def mismatch(console: Console) -> list[dict]:
    """Compare the demo's model with its weights as sent and as held; print and return the mismatch."""
    folder = cached_checkpoint("demo", CheckpointSpec(shards=4))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    generator = random.Random(0)
    prompts = [[generator.randrange(model.config.vocab_size) for _ in range(32)] for _ in range(MISMATCH_SAMPLES)]
    engine = Engine(model_path=str(folder), dtype="bfloat16", skip_tokenizer_init=True)
    params = {"temperature": 1.0, "max_new_tokens": MISMATCH_TOKENS, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    engine.close()
    outputs = [answer["output_ids"] for answer in answers]
    ids_NS = torch.tensor([[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)])
    found = []
    for is_held in (False, True):
        if is_held:
            _hold(model)
        with record_routes(model) as recorded, torch.no_grad():
            logits_NSV = model(input_ids=ids_NS, use_cache=False).logits[:, 31:-1]
        found.append((logits_NSV.log_softmax(-1), recorded.ids().sort(-1).values))
    (plain_NSV, plain_routes), (held_NSV, held_routes) = found
    targets = ids_NS[:, 32:, None]
    row = {
        "part": "formats",
        "tokens": targets.numel(),
        "kl": (plain_NSV.exp() * (plain_NSV - held_NSV)).sum(-1).mean().item(),
        "top1": (plain_NSV.argmax(-1) == held_NSV.argmax(-1)).float().mean().item(),
        "logprob": (plain_NSV.gather(-1, targets) - held_NSV.gather(-1, targets)).abs().mean().item(),
        "flips": (plain_routes != held_routes).any(-1).float().mean().item(),
    }
    console.print(
        f"demo model, {row['tokens']} tokens, experts in 8 bits against as sent: KL {row['kl']:.2g}, top-1 agreement "
        f"{row['top1']:.2%}, mean change of a token's log-probability {row['logprob']:.2g}, rows of routes that change "
        f"{row['flips']:.2%}",
        highlight=False,
    )
    return [row]


@torch.no_grad()
def _hold(model: torch.nn.Module) -> None:
    """Replace the matrices of experts by the values that an engine in 8 bits holds of them."""
    for name, tensor in model.named_parameters():
        if ".experts." in name and tensor.ndim >= 2:
            tensor.copy_(held_values(tensor.bfloat16()))


def _print(rows: list[dict], batches: list[int], console: Console) -> None:
    table = Table(title=f"shape {rows[0]['shape']}, bf16: tokens a second; reads at {rows[0]['read GB/s']:.0f} GB/s")
    for name in ("experts", "model MB", *(f"batch {batch}" for batch in batches), f"prefill {PREFILL_TOKENS}"):
        table.add_column(name, justify="left" if name == "experts" else "right")
    for row in rows:
        rates = [row[f"batch {batch}"] for batch in batches] + [row["prefill"]]
        cells = ["noise" if rate is None else f"{rate:.0f}" for rate in rates]
        table.add_row(row["format"], f"{row['model_bytes'] / 1e6:.0f}", *cells)
    console.print(table)
