"""`make example-real-model`: GRPO on word problems, from SmolLM2-135M-Instruct, against a live server.

each seed:  `lockstep serve` of the checkpoint -> GRPO -> OUT/seed-SEED.json
end:        a table, and a plot of all results in OUT (also of earlier runs)
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
from transformers import AutoModelForCausalLM

from examples.live.checkpoint import save_beside
from examples.live.command import add_seeds, parsed, prepare, run_parser
from examples.live.ending import leave, status_of
from examples.live.progress import progress
from examples.live.server import serving
from examples.real_model.plots import plot_rewards, results_table
from examples.real_model.train import Plan, Result, Training

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "real-model" / "checkpoint"


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if every run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    console = prepare(args.threads)
    plan = plan or Plan()
    plan = replace(plan, steps=args.steps or plan.steps)
    args.out.mkdir(parents=True, exist_ok=True)

    def run(folder: Path) -> None:
        for seed in args.seeds:
            _run_seed(seed, args, plan, folder, console)

    status = status_of(run, "example-real-model", console)
    if status != 0:
        return status
    results = load_results(args.out)
    console.print(results_table(results))
    console.print(f"wrote {plot_rewards(results, args.out / 'rewards.png')}", highlight=False)
    return 0


def _run_seed(seed: int, args: argparse.Namespace, plan: Plan, folder: Path, console: Console) -> None:
    result = Result(seed)
    torch.manual_seed(seed)
    flags = [
        *("--dtype", "bfloat16", "--random-seed", str(seed)),
        *("--context-length", "256", "--max-total-tokens", "32768", "--max-running-requests", "256"),
    ]
    with progress(console) as shown:
        shown.doing("loading the model and starting the server")
        with serving(args.checkpoint, folder / f"server-{seed}.log", args.threads, flags) as url:
            model = AutoModelForCausalLM.from_pretrained(
                args.checkpoint, dtype=torch.bfloat16, trust_remote_code=False
            ).eval()
            asyncio.run(Training(model, url, plan, result, shown).run())
        if args.save:
            save_beside(model, args.checkpoint, args.save / str(seed))
    (args.out / f"seed-{seed}.json").write_bytes(msgspec.json.encode(result))


def load_results(folder: Path) -> list[Result]:
    """Load all results in the folder, sorted by seed."""
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in folder.glob("seed-*.json")]
    return sorted(results, key=lambda result: result.seed)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = run_parser("example-real-model", "GRPO of a real model.", steps=str(Plan.steps), out="real-model-results")
    add_seeds(parser)
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder of the model (default: %(default)s)"
    )
    parser.add_argument("--save", type=Path, help="folder that gets the trained model of each seed")
    args = parsed(parser, argv)
    if not (args.checkpoint / "config.json").is_file():
        parser.error(f"{args.checkpoint} has no config.json; make real-model makes the checkpoint")
    return args


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
