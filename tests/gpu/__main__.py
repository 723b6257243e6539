"""`make test-gpu`: every step, a table, and exit status 0 if nothing failed.

    python -m tests.gpu [--steps graphs refresh] [--out DIR] [--dry-run] [--list]

Results go to `--out`, by default ./gpu-results: results.jsonl (a line a step), STEP.jsonl (a line a test),
STEP.log and report.txt.  A test that this machine cannot run is listed as NOT RUN with its reason; anything else that
did not pass makes the status 1, and a machine without a CUDA device 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tests.gpu.runner import Outcome, report, run_step
from tests.gpu.steps import STEPS

NO_DEVICE = 2
DRY_RUN_FACTOR = 10.0  # of the time of a step, where the CPU interprets kernels


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    names = [step.name for step in STEPS]
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with what the CPU has; proves no kernel")
    parser.add_argument("--list", action="store_true", help="print steps and their times, and end")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{step.name:<12}{step.budget_s:>4} s  tests/gpu/{step.file}" for step in STEPS))
        return 0
    if not args.dry_run and not torch.cuda.is_available():
        print(f"make test-gpu needs a CUDA device, and torch {torch.__version__} sees none here", file=sys.stderr)
        return NO_DEVICE
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if args.dry_run else "cuda"
    outcomes = []
    with (args.out / "results.jsonl").open("w") as lines:
        for step in (step for step in STEPS if step.name in args.steps):
            factor = DRY_RUN_FACTOR if args.dry_run else 1.0
            outcome = run_step(step, args.out, device=device, budget_factor=factor)
            outcomes.append(outcome)
            print(_progress(outcome), flush=True)
            lines.write(json.dumps(asdict(outcome)) + "\n")
            lines.flush()
    what = "dry run on the CPU: proves that the tests run, no kernel" if args.dry_run else _name_of_device()
    text = report(outcomes, f"make test-gpu, {what}, torch {torch.__version__}")
    (args.out / "report.txt").write_text(text + "\n")
    print(f"\n{text}")
    return 0 if all(outcome.holds for outcome in outcomes) else 1


def _progress(outcome: Outcome) -> str:
    return f"{outcome.step}: {'ok' if outcome.holds else 'FAILED'}, {outcome.seconds:.0f} s"


def _name_of_device() -> str:
    return f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}"


if __name__ == "__main__":
    sys.exit(main())
