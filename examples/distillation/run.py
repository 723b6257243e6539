"""`make example-distillation`: SmolLM2-135M-Instruct teaches a student that lacks some of its layers.

teacher's checkpoint -> without middle layers -> student's checkpoint
a `lockstep serve` of each -> distillation -> OUT/seed-SEED.json, a table and a plot
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from examples.distillation.plots import plot_curves, results_table
from examples.distillation.student import without_layers
from examples.distillation.train import Distillation, Plan, Result
from examples.live.checkpoint import save_beside
from examples.live.progress import progress
from examples.live.server import interruptible, reason, serving
from examples.real_model.run import CHECKPOINT
from lockstep_rl import LockstepError, WeightSyncError

INTERRUPTED = 130


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if the run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    console = Console() if sys.stdout.isatty() else Console(width=118)
    plan = plan or Plan()
    plan = replace(plan, steps=args.steps or plan.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="lockstep-distillation-") as name:
            result = _run(args, plan, Path(name), console)
    except KeyboardInterrupt:
        console.print("interrupted; the servers have been stopped")
        return INTERRUPTED
    except (LockstepError, WeightSyncError, ExceptionGroup, TimeoutError, ValueError) as error:
        console.print(f"example-distillation: error: {reason(error)}", style="red", markup=False, highlight=False)
        return 1
    (args.out / f"seed-{args.seed}.json").write_bytes(msgspec.json.encode(result))
    results = load_results(args.out)
    console.print(results_table(results))
    console.print(f"wrote {plot_curves(results, args.out / 'distillation.png')}", highlight=False)
    return 0


def _run(args: argparse.Namespace, plan: Plan, folder: Path, console: Console) -> Result:
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
    return result


def load_results(folder: Path) -> list[Result]:
    """Load all results in the folder, sorted by seed."""
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in folder.glob("seed-*.json")]
    return sorted(results, key=lambda result: result.seed)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make example-distillation", description="On-policy distillation.")
    parser.add_argument("--seed", type=int, default=0, help="of the samples and the order of problems (default: 0)")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {Plan.steps})")
    parser.add_argument(
        "--threads", type=int, default=1, help="compute threads of the trainer and of each server (default: 1)"
    )
    parser.add_argument("--teacher", type=Path, default=CHECKPOINT, help="checkpoint (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("distillation-results"), help="folder of results and plots")
    args = parser.parse_args(argv)
    if (args.steps is not None and args.steps < 1) or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if not (args.teacher / "config.json").is_file():
        parser.error(f"{args.teacher} has no config.json; make real-model makes the checkpoint")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
