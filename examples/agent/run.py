"""`make example-agent`: an agent learns to use a calculator, from random weights, in a few minutes on two cores.

each seed:   random model -> supervised steps -> checkpoint -> `lockstep serve` -> policy gradient -> OUT/SEED.json
end:         a table, and a plot of all results in OUT (also of earlier runs)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from examples.agent.plots import plot, results_table
from examples.agent.policy import load_tokenizer, new_model
from examples.agent.train import Plan, Result, Training, supervise
from examples.live.progress import progress
from examples.live.server import interruptible, reason, serving
from rollout.core.errors import LockstepError
from weight_sync.errors import WeightSyncError

INTERRUPTED = 130
LINE_WIDTH = 118  # where there is no terminal
SERVER_FLAGS = (
    *("--tool-call-parser", "hermes", "--session-pin-fraction", "0.5", "--enable-return-routed-experts"),
    *("--max-running-requests", "256", "--max-total-tokens", "32768"),
)


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if every run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    console = Console() if sys.stdout.isatty() else Console(width=LINE_WIDTH)
    plan = replace(plan or Plan(), steps=args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="lockstep-agent-") as name:
            for seed in args.seeds:
                _run_seed(seed, args, plan, Path(name) / str(seed), console)
    except KeyboardInterrupt:
        console.print("interrupted; the server has been stopped")
        return INTERRUPTED
    except (LockstepError, WeightSyncError, ExceptionGroup, httpx.HTTPError) as error:
        console.print(f"example-agent: error: {reason(error)}", style="red", markup=False, highlight=False)
        return 1
    results = load_results(args.out)
    console.print(results_table(results))
    console.print(f"wrote {plot(results, args.out / 'rewards.png')}", highlight=False)
    return 0


def _run_seed(seed: int, args: argparse.Namespace, plan: Plan, folder: Path, console: Console) -> None:
    started = time.monotonic()
    with progress(console) as shown:
        model = new_model(folder, seed)
        tokenizer = load_tokenizer(folder)
        reached = supervise(model, tokenizer, plan, seed, shown)
    model.to(torch.bfloat16).save_pretrained(folder)
    console.print(
        f"seed {seed}: the demonstrated way has probability {reached:.2f} after {time.monotonic() - started:.0f} s",
        highlight=False,
    )
    started = time.monotonic()
    result = Result(seed)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    try:
        with progress(console) as shown, serving(folder, folder / "server.log", args.threads, SERVER_FLAGS) as url:
            asyncio.run(Training(trained, tokenizer, url, plan, result, shown).run())
    finally:
        if result.steps:  # a run that is interrupted keeps what it has
            (args.out / f"{seed}.json").write_bytes(msgspec.json.encode(result))
    rewards = [judgement.reward for judgement in result.judgements]
    console.print(
        f"seed {seed}: held-out reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {len(result.steps)} steps, "
        f"{time.monotonic() - started:.0f} s",
        highlight=False,
    )


def load_results(folder: Path) -> list[Result]:
    """Load all results in the folder, sorted by seed."""
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in folder.glob("*.json")]
    return sorted(results, key=lambda result: result.seed)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make example-agent", description="An agent learns to use a calculator.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="runs, one after the other (default: 0)")
    parser.add_argument("--steps", type=int, default=Plan.steps, help=f"training steps (default: {Plan.steps})")
    parser.add_argument(
        "--threads", type=int, default=1, help="compute threads of the trainer and of the server (default: 1)"
    )
    parser.add_argument("--out", type=Path, default=Path("agent-results"), help="folder of results and plots")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
