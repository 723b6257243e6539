"""Experts and projections in 8 and 4 bits next to bfloat16: tokens a second, memory, and how far the model is from
what was sent.

Engines of all formats take turns; medians over rounds.  Products have the bits of bfloat16 with the values that are
held, so the mismatch comes from these values alone.  It is measured by transformers in float32, with the demo's model,
SmolLM2-135M where `make real-model` made it, and samples of the plain engine: once with the weights as sent, and once
with the weights as held in each format.

    python -m benchmarks.weight_formats speed                           experts and projections alike, few rounds
    python -m benchmarks.weight_formats agreement --held int4-128       the trained model alone

Shapes: N samples, S positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.floor import measure_machine
from benchmarks.shapes import REPOSITORY, SHAPES, cached_checkpoint, checkpoint
from benchmarks.throughput import PROMPT_TOKENS, by_engine
from capture.replay import record_routes
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.kernels.held_places import HELD_FORMS
from rollout.server.engine import Engine
from weight_sync.held_format import HeldFormat

# Of experts, of projections.
FORMATS = (("plain", "plain"), *((form, "plain") for form in HELD_FORMS), *((form, form) for form in HELD_FORMS))
REAL_MODEL = REPOSITORY / "build" / "real-model" / "checkpoint"
PROJECTION = re.compile(r".*\.[a-z_]+_proj\.weight")
PREFILL_TOKENS = 1024
MISMATCH_SAMPLES, MISMATCH_TOKENS = 32, 64
Which = Literal["experts", "projections", "both"]


def run(
    shape: str,
    batches: list[int],
    rounds: int,
    new_tokens: int,
    console: Console,
    formats: Sequence[tuple[str, str]] = FORMATS,
    is_cpu_time: bool = False,
) -> list[dict]:
    """Measure formats (of experts, of projections) in turns, print one table, and return its rows.

    `is_cpu_time`: by the CPU time of one thread, and the least of the rounds, for a machine that others use, too.
    """
    clock, middle = (time.process_time, min) if is_cpu_time else (time.perf_counter, statistics.median)
    spec, folder = SHAPES[shape], checkpoint(shape)
    read_rate = measure_machine().read_bytes_per_s
    engines = {
        (experts, linears): Engine(
            model_path=str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_total_tokens=32768,
            cpu_weight_format=experts,
            cpu_linear_format=linears,
            num_threads=1 if is_cpu_time else None,
        )
        for experts, linears in formats
    }
    cases = [(batch, PROMPT_TOKENS, new) for batch in batches for new in (1, new_tokens)] + [(1, PREFILL_TOKENS, 1)]
    times: dict[tuple[tuple[str, str], int, int, int], list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(f"weight formats, {shape}", total=(rounds + 1) * len(cases) * len(engines))
        for turn in range(rounds + 1):  # turn 0 warms up
            for batch, tokens, new in cases:
                for name, engine in engines.items():
                    prompts = [[rng.randrange(spec.vocab_size) for _ in range(tokens)] for _ in range(batch)]
                    start = clock()
                    by_engine(engine)(prompts, new)
                    if turn:
                        times[name, batch, tokens, new].append(clock() - start)
                    progress.advance(task)
    rows = []
    for name, engine in engines.items():
        row: dict = {"part": "formats", "shape": shape, "experts": name[0], "projections": name[1]}
        row["is_cpu_time"] = is_cpu_time
        row["model_bytes"] = engine.ready.model_bytes
        for batch in batches:
            whole, first = (middle(times[name, batch, PROMPT_TOKENS, new]) for new in (new_tokens, 1))
            row[f"batch {batch}"] = batch * (new_tokens - 1) / (whole - first) if whole > first else None
        row["prefill"] = PREFILL_TOKENS / middle(times[name, 1, PREFILL_TOKENS, 1])
        row["read GB/s"] = read_rate / 1e9
        rows.append(row)
        engine.close()
    _print(rows, batches, console)
    return rows


def mismatch(console: Console) -> list[dict]:
    """Compare models with their weights as sent and as held; print and return a row of each format."""
    demo = cached_checkpoint("demo", CheckpointSpec(shards=4))
    parts: tuple[Which, ...] = ("experts", "both")
    rows = [row for which in parts for row in _mismatch("demo", demo, which, list(HELD_FORMS), console)]
    if REAL_MODEL.is_dir():
        rows += trained_mismatch(REAL_MODEL, list(HELD_FORMS), console)
    return rows


def trained_mismatch(folder: Path, forms: Sequence[str], console: Console) -> list[dict]:
    """Compare a trained model without experts, as `mismatch` does, with its projections in each of `forms`."""
    return _mismatch("SmolLM2-135M", folder, "projections", forms, console)


def _mismatch(name: str, folder: Path, which: Which, forms: Sequence[str], console: Console) -> list[dict]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    ids_NS, num_given = _sampled(folder, model.config, is_random=which != "projections")
    plain = _answers(model, ids_NS, num_given)
    sent = {each: tensor.clone() for each, tensor in model.named_parameters() if _is_held(each, tensor, which)}
    rows = []
    for form_name in forms:
        _hold(model, sent, HELD_FORMS[form_name].held)
        found = _compared(plain, _answers(model, ids_NS, num_given), ids_NS[:, num_given:, None])
        rows.append({"part": "formats", "model": name, "held": which, "format": form_name} | found)
        _say(rows[-1], console)
    return rows


def _sampled(folder: Path, config: PretrainedConfig, is_random: bool) -> tuple[torch.Tensor, int]:
    """Return prompts with samples of the plain engine [N, S], and the length of the prompts.

    Prompts of a random model are random.  The prompt of a trained one is its first token, so that it writes text.
    """
    generator = random.Random(0)
    prompts = [
        [generator.randrange(config.vocab_size) for _ in range(32)] if is_random else [config.bos_token_id]
        for _ in range(MISMATCH_SAMPLES)
    ]
    engine = Engine(model_path=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=32768)
    params = [
        {"temperature": 1.0, "max_new_tokens": MISMATCH_TOKENS, "ignore_eos": True, "sampling_seed": seed}
        for seed in range(MISMATCH_SAMPLES)
    ]
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    engine.close()
    ids = [[*prompt, *answer["output_ids"]] for prompt, answer in zip(prompts, answers, strict=True)]
    return torch.tensor(ids), len(prompts[0])


Answers = tuple[torch.Tensor, torch.Tensor | None]  # log-probabilities [N, S, V]; sorted routes of a model with experts


def _answers(model: torch.nn.Module, ids_NS: torch.Tensor, num_given: int) -> Answers:
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    with record_routes(model) if has_experts else nullcontext() as recorded, torch.no_grad():
        logits_NSV = model(input_ids=ids_NS, use_cache=False).logits[:, num_given - 1 : -1]
    routes = None if recorded is None else recorded.ids().sort(-1).values
    return logits_NSV.log_softmax(-1), routes


def _compared(plain: Answers, held: Answers, targets_NS1: torch.Tensor) -> dict:
    (plain_NSV, plain_routes), (held_NSV, held_routes) = plain, held
    found = {
        "tokens": targets_NS1.numel(),
        "kl": (plain_NSV.exp() * (plain_NSV - held_NSV)).sum(-1).mean().item(),
        "top1": (plain_NSV.argmax(-1) == held_NSV.argmax(-1)).float().mean().item(),
        "logprob": (plain_NSV.gather(-1, targets_NS1) - held_NSV.gather(-1, targets_NS1)).abs().mean().item(),
    }
    if plain_routes is not None and held_routes is not None:
        found["flips"] = (plain_routes != held_routes).any(-1).float().mean().item()
    return found


def _say(row: dict, console: Console) -> None:
    console.print(
        f"{row['model']}, {row['tokens']} tokens, {row['held']} in {row['format']} against as sent: "
        f"KL {row['kl']:.2g}, top-1 agreement {row['top1']:.2%}, mean "
        f"change of a token's log-probability {row['logprob']:.2g}"
        + (f", rows of routes that change {row['flips']:.2%}" if "flips" in row else ""),
        highlight=False,
    )


def _is_held(name: str, tensor: torch.Tensor, which: Which) -> bool:
    if tensor.ndim < 2:
        return False
    is_expert = ".experts." in name
    return (is_expert and which != "projections") or (
        not is_expert and which != "experts" and PROJECTION.fullmatch(name) is not None
    )


@torch.no_grad()
def _hold(model: torch.nn.Module, sent: dict[str, torch.Tensor], held: HeldFormat) -> None:
    """Replace matrices by the values that an engine holds of them in a format."""
    for name, tensor in model.named_parameters():
        if name in sent:
            matrices = sent[name].bfloat16()
            values = [held.values(matrix) for matrix in matrices.reshape(-1, *matrices.shape[-2:])]
            tensor.copy_(torch.stack(values).view_as(tensor))


def _print(rows: list[dict], batches: list[int], console: Console) -> None:
    per = "second of CPU of one thread" if rows[0]["is_cpu_time"] else "second"
    table = Table(title=f"shape {rows[0]['shape']}, bf16: tokens a {per}; reads at {rows[0]['read GB/s']:.0f} GB/s")
    for name in (
        "experts",
        "projections",
        "model MB",
        *(f"batch {batch}" for batch in batches),
        f"prefill {PREFILL_TOKENS}",
    ):
        table.add_column(name, justify="left" if name in ("experts", "projections") else "right")
    for row in rows:
        rates = [row[f"batch {batch}"] for batch in batches] + [row["prefill"]]
        cells = ["noise" if rate is None else f"{rate:.0f}" for rate in rates]
        table.add_row(row["experts"], row["projections"], f"{row['model_bytes'] / 1e6:.0f}", *cells)
    console.print(table)


def main() -> None:
    """Measure one part by itself.  Few rounds of few tokens: both shapes are to fit into minutes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("part", choices=("speed", "agreement"))
    parser.add_argument("--held", choices=tuple(HELD_FORMS), nargs="+", default=["w8", "fp8", "int4"])
    parser.add_argument("--shapes", choices=tuple(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--cpu-time", action="store_true", help="tokens for each second of CPU of one thread")
    parser.add_argument("--checkpoint", type=Path, default=REAL_MODEL, help="SmolLM2-135M, of `make real-model`")
    args = parser.parse_args()
    console = Console()
    if args.part == "agreement":
        if not args.checkpoint.is_dir():
            parser.error(f"the folder {args.checkpoint} is not there; `make real-model` makes it")
        trained_mismatch(args.checkpoint, args.held, console)
        return
    for shape in args.shapes:
        formats = [("plain", "plain"), *((form, form) for form in args.held)]
        run(shape, args.batches, args.rounds, args.new_tokens, console, formats, args.cpu_time)


if __name__ == "__main__":
    main()
