"""`make example-agent`: an agent learns to use a calculator, from random weights, in a few minutes on two cores.

each seed:   random model -> supervised steps -> checkpoint -> `lockstep serve` -> policy gradient -> OUT/SEED.json
end:         a table, and a plot of all results in OUT (also of earlier runs)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from examples.agent.plots import plot, results_table
from examples.agent.policy import load_tokenizer, new_model
from examples.agent.train import Plan, Result, Training, supervise
from examples.live.command import add_seeds, parsed, prepare, run_parser
from examples.live.ending import leave, status_of
from examples.live.progress import progress
from examples.live.server import serving

SERVER_FLAGS = (
    *("--tool-call-parser", "hermes", "--session-pin-fraction", "0.5", "--enable-return-routed-experts"),
    *("--max-running-requests", "256", "--max-total-tokens", "32768"),
)


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if every run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    console = prepare(args.threads)
    plan = plan or Plan()
    plan = replace(plan, steps=args.steps or plan.steps)
    args.out.mkdir(parents=True, exist_ok=True)

    def run(folder: Path) -> None:
        for seed in args.seeds:
            _run_seed(seed, args, plan, folder / str(seed), console)

    status = status_of(run, "example-agent", console)
    if status != 0:
        return status
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
    parser = run_parser(
        "example-agent", "An agent learns to use a calculator.", steps=str(Plan.steps), out="agent-results"
    )
    add_seeds(parser)
    return parsed(parser, argv)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
