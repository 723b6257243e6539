"""`make example-grpo`: GRPO on sums of digits, from random weights, in a few minutes on two cores.

each seed:      random model -> supervised steps -> checkpoint
each variant:   `lockstep serve` of that checkpoint -> GRPO -> OUT/SETTING/SEED-VARIANT.json
end:            a table, and plots of all results in OUT/SETTING (also of earlier runs)
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

from examples.grpo.fp8 import fp8_checkpoint
from examples.grpo.plots import plot_all, results_tables
from examples.grpo.policy import VARIANTS, new_model
from examples.grpo.settings import SETTINGS, Setting
from examples.grpo.train import Grpo, Plan, Result, load_tokenizer, numerics_of, supervise
from examples.live.command import add_seeds, parsed, prepare, run_parser
from examples.live.ending import leave, status_of
from examples.live.progress import progress
from examples.live.server import serving

SERVER_FLAGS = (
    *("--return-sampling-mask", "--enable-return-routed-experts"),
    *("--max-running-requests", "512", "--max-total-tokens", "32768"),
)


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if every run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    console = prepare(args.threads)
    setting = SETTINGS[args.setting]
    setting = replace(setting, plan=plan or setting.plan)
    if args.steps is not None:
        setting = replace(setting, plan=replace(setting.plan, steps=args.steps))
    out = args.out / args.setting
    out.mkdir(parents=True, exist_ok=True)

    def run(folder: Path) -> None:
        for seed in args.seeds:
            _run_seed(seed, setting, args, folder / str(seed), console)

    status = status_of(run, "example-grpo", console)
    if status != 0:
        return status
    results = load_results(out)
    for table in results_tables(results):
        console.print(table)
    for path in plot_all(results, out):
        console.print(f"wrote {path}", highlight=False)
    return 0


def _run_seed(seed: int, setting: Setting, args: argparse.Namespace, folder: Path, console: Console) -> None:
    started = time.monotonic()
    model = new_model(folder, setting.spec, seed)
    tokenizer = load_tokenizer(folder)
    with progress(console) as shown:
        reached = supervise(model, tokenizer, setting.task, setting.plan, seed, shown)
    model.to(torch.bfloat16).save_pretrained(folder)
    served = fp8_checkpoint(folder, folder / "served") if setting.is_fp8 else folder
    flags = [*SERVER_FLAGS, "--quantize-weight-updates"] if setting.is_fp8 else SERVER_FLAGS
    seconds = time.monotonic() - started
    console.print(f"seed {seed}: right answers have probability {reached:.2f} after {seconds:.0f} s", highlight=False)
    for variant in args.variants:
        started = time.monotonic()
        result = Result(seed, variant)
        trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        with (
            serving(served, served / "server.log", args.threads, flags) as url,
            progress(console) as shown,
            numerics_of(trained, variant),
        ):
            asyncio.run(Grpo(trained, tokenizer, url, setting.task, setting.plan, result, shown).run())
        (args.out / args.setting / f"{seed}-{variant}.json").write_bytes(msgspec.json.encode(result))
        rewards = [judgement.reward for judgement in result.judgements]
        console.print(
            f"seed {seed}, {variant}: held-out reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {len(result.steps)} "
            f"steps, {time.monotonic() - started:.0f} s",
            highlight=False,
        )


def load_results(folder: Path) -> list[Result]:
    """Load all results in the folder, sorted by variant, then seed."""
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in folder.glob("*-*.json")]
    return sorted(results, key=lambda result: (VARIANTS.index(result.variant), result.seed))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = run_parser("example-grpo", "GRPO on sums of digits.", steps="of the setting", out="grpo-results")
    add_seeds(parser)
    parser.add_argument("--setting", default="fp8", choices=SETTINGS, help="model and task (default: fp8)")
    parser.add_argument(
        "--variants", nargs="+", default=["replay"], choices=VARIANTS, help="variants to run (default: replay)"
    )
    return parsed(parser, argv)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
