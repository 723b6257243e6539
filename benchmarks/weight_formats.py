"""Experts in 8 and 4 bits next to bfloat16: tokens a second, memory, and how far the model is from what was sent.

Engines of all formats take turns; medians over rounds.  Products have the bits of bfloat16 with the values that are
held, so the mismatch comes from these values alone.  It is measured by transformers in float32, with the demo's model
and samples of the plain engine: once with the weights as sent, and once with the weights as held in each format.

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
from rollout.kernels.held_places import HELD_FORMS
from rollout.server.engine import Engine
from weight_sync.held_format import HeldFormat

FORMATS = ("plain", *HELD_FORMS)
PREFILL_TOKENS = 1024
MISMATCH_SAMPLES, MISMATCH_TOKENS = 32, 64


def run(shape: str, batches: list[int], rounds: int, new_tokens: int, console: Console) -> list[dict]:
    """Measure all formats in turns, print one table, and return its rows."""
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
    """Compare the demo's model with its weights as sent and as held; print and return a row of each format."""
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
    plain = _answers(model, ids_NS)
    sent = {name: tensor.clone() for name, tensor in model.named_parameters() if _is_held(name, tensor)}
    rows = []
    for name, form in HELD_FORMS.items():
        _hold(model, sent, form.held)
        rows.append(
            {"part": "formats", "format": name} | _compared(plain, _answers(model, ids_NS), ids_NS[:, 32:, None])
        )
        _say(rows[-1], console)
    return rows


Answers = tuple[torch.Tensor, torch.Tensor]  # log-probabilities [N, S, V], sorted routes


def _answers(model: torch.nn.Module, ids_NS: torch.Tensor) -> Answers:
    with record_routes(model) as recorded, torch.no_grad():
        logits_NSV = model(input_ids=ids_NS, use_cache=False).logits[:, 31:-1]
    return logits_NSV.log_softmax(-1), recorded.ids().sort(-1).values


def _compared(plain: Answers, held: Answers, targets_NS1: torch.Tensor) -> dict:
    (plain_NSV, plain_routes), (held_NSV, held_routes) = plain, held
    return {
        "tokens": targets_NS1.numel(),
        "kl": (plain_NSV.exp() * (plain_NSV - held_NSV)).sum(-1).mean().item(),
        "top1": (plain_NSV.argmax(-1) == held_NSV.argmax(-1)).float().mean().item(),
        "logprob": (plain_NSV.gather(-1, targets_NS1) - held_NSV.gather(-1, targets_NS1)).abs().mean().item(),
        "flips": (plain_routes != held_routes).any(-1).float().mean().item(),
    }


def _say(row: dict, console: Console) -> None:
    console.print(
        f"demo model, {row['tokens']} tokens, experts in {row['format']} against as sent: KL {row['kl']:.2g}, top-1 "
        f"agreement {row['top1']:.2%}, mean change of a token's log-probability {row['logprob']:.2g}, rows of routes "
        f"that change {row['flips']:.2%}",
        highlight=False,
    )


def _is_held(name: str, tensor: torch.Tensor) -> bool:
    return ".experts." in name and tensor.ndim >= 2


@torch.no_grad()
def _hold(model: torch.nn.Module, sent: dict[str, torch.Tensor], held: HeldFormat) -> None:
    """Replace the matrices of experts by the values that an engine holds of them in a format."""
    for name, tensor in model.named_parameters():
        if name in sent:
            matrices = sent[name].bfloat16()
            values = [held.values(matrix) for matrix in matrices.reshape(-1, *matrices.shape[-2:])]
            tensor.copy_(torch.stack(values).view_as(tensor))


def _print(rows: list[dict], batches: list[int], console: Console) -> None:
    table = Table(title=f"shape {rows[0]['shape']}, bf16: tokens a second; reads at {rows[0]['read GB/s']:.0f} GB/s")
    for name in ("experts", "model MB", *(f"batch {batch}" for batch in batches), f"prefill {PREFILL_TOKENS}"):
        table.add_column(name, justify="left" if name == "experts" else "right")
    for row in rows:
        rates = [row[f"batch {batch}"] for batch in batches] + [row["prefill"]]
        cells = ["noise" if rate is None else f"{rate:.0f}" for rate in rates]
        table.add_row(row["format"], f"{row['model_bytes'] / 1e6:.0f}", *cells)
    console.print(table)
