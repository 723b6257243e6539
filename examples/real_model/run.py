"""`make example-real-model`: GRPO on word problems, from SmolLM2-135M-Instruct, against a live server.

each seed:  `lockstep serve` of the checkpoint -> GRPO -> OUT/SEED.json
end:        a table, and a plot of all results in OUT (also of earlier runs)
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
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from examples.live.checkpoint import save_beside
from examples.live.progress import progress
from examples.live.server import interruptible, reason, serving
from examples.real_model.plots import plot_rewards, results_table
from examples.real_model.train import Plan, Result, Training
from lockstep_rl import LockstepError, WeightSyncError

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "real-model" / "checkpoint"
INTERRUPTED = 130


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if every run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    console = Console() if sys.stdout.isatty() else Console(width=118)
    plan = plan or Plan()
    plan = replace(plan, steps=args.steps or plan.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="lockstep-real-model-") as name:
            for seed in args.seeds:
                _run_seed(seed, args, plan, Path(name), console)
    except KeyboardInterrupt:
        console.print("interrupted; the server has been stopped")
        return INTERRUPTED
    except (LockstepError, WeightSyncError, ExceptionGroup, TimeoutError) as error:
        console.print(f"example-real-model: error: {reason(error)}", style="red", markup=False, highlight=False)
        return 1
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
    parser = argparse.ArgumentParser(prog="make example-real-model", description="GRPO of a real model.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="runs, one after the other (default: 0)")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {Plan.steps})")
    parser.add_argument(
        "--threads", type=int, default=1, help="compute threads of the trainer and of the server (default: 1)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder of the model (default: %(default)s)"
    )
    parser.add_argument("--save", type=Path, help="folder that gets the trained model of each seed")
    parser.add_argument("--out", type=Path, default=Path("real-model-results"), help="folder of results and plots")
    args = parser.parse_args(argv)
    if (args.steps is not None and args.steps < 1) or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if not (args.checkpoint / "config.json").is_file():
        parser.error(f"{args.checkpoint} has no config.json; make real-model makes the checkpoint")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
