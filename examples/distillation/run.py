"""`make example-distillation`: SmolLM2-135M-Instruct teaches a student that lacks some of its layers.

teacher's checkpoint -> without middle layers -> student's checkpoint
a `lockstep serve` of each -> distillation -> OUT/seed-SEED.json, a table and a plot
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from examples.distillation.plots import plot_curves, results_table
from examples.distillation.student import without_layers
from examples.distillation.train import Distillation, Plan, Result
from examples.live.checkpoint import save_beside
from examples.live.command import parsed, prepare, run_parser
from examples.live.ending import leave, status_of
from examples.live.progress import progress
from examples.live.server import serving
from examples.real_model.run import CHECKPOINT


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if the run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    console = prepare(args.threads)
    plan = plan or Plan()
    plan = replace(plan, steps=args.steps or plan.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    status = status_of(lambda folder: _run(args, plan, folder, console), "example-distillation", console)
    if status != 0:
        return status
    results = load_results(args.out)
    console.print(results_table(results))
    console.print(f"wrote {plot_curves(results, args.out / 'distillation.png')}", highlight=False)
    return 0


def _run(args: argparse.Namespace, plan: Plan, folder: Path, console: Console) -> None:
    torch.manual_seed(args.seed)
    flags = [
        *("--dtype", "bfloat16", "--random-seed", str(args.seed)),
        *("--context-length", "256", "--max-total-tokens", "32768", "--max-running-requests", "256"),
    ]
    with progress(console) as shown:
        shown.doing("loading the models and starting two servers")
        student = without_layers(args.teacher, plan.first_removed, plan.removed)
        save_beside(student, args.teacher, folder / "student")
        with (
            serving(args.teacher, folder / "teacher.log", args.threads, flags) as teacher_url,
            serving(folder / "student", folder / "student.log", args.threads, flags) as student_url,
        ):
            kept = len(student.model.layers)
            result = Result(args.seed, (kept + plan.removed, kept))
            asyncio.run(Distillation(student, student_url, teacher_url, plan, result, shown).run())
    (args.out / f"seed-{args.seed}.json").write_bytes(msgspec.json.encode(result))


def load_results(folder: Path) -> list[Result]:
    """Load all results in the folder, sorted by seed."""
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in folder.glob("seed-*.json")]
    return sorted(results, key=lambda result: result.seed)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = run_parser(
        "example-distillation", "On-policy distillation.", steps=str(Plan.steps), out="distillation-results"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the samples and the order of problems (default: 0)")
    parser.add_argument("--teacher", type=Path, default=CHECKPOINT, help="checkpoint (default: %(default)s)")
    args = parsed(parser, argv)
    if not (args.teacher / "config.json").is_file():
        parser.error(f"{args.teacher} has no config.json; make real-model makes the checkpoint")
    return args


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
