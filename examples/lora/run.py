"""`make example-lora`: GRPO of two adapters at once against one server, on two cores.

moe:    random MoE model -> supervised steps on both tasks -> `lockstep serve` -> adapters `sums` and `running`
real:   SmolLM2-135M -> `lockstep serve` -> adapters `add` and `subtract`, each of word problems of its kind
end:    a table and a plot of all results in OUT/SETTING (also of earlier runs)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from examples.grpo.policy import Masters, expected_reward, new_model, supervised_step
from examples.grpo.settings import BF16_SPEC
from examples.grpo.task import Task
from examples.grpo.train import encode, load_tokenizer
from examples.live.command import add_seeds, parsed, prepare, run_parser
from examples.live.ending import leave, status_of
from examples.live.progress import Shown, progress
from examples.live.server import serving
from examples.lora.courses import Course, Digits, Words
from examples.lora.plots import plot_rewards, results_table
from examples.lora.train import Plan, Result, Training
from examples.real_model.run import CHECKPOINT

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = ["gate_proj", "up_proj", "down_proj"]
SUPERVISED_RATE, SUPERVISED_BATCH, SUPERVISED_UNTIL = 1e-3, 64, 0.15
TASKS = {"sums": Task("sums", 2), "running": Task("running", 4)}


@dataclass(frozen=True)
class Setting:
    """`make(folder, seed, plan, shown)` returns the served checkpoint, the model and the courses by adapter."""

    plan: Plan
    modules: list[str]
    flags: tuple[str, ...]
    make: Callable[[Path, int, Plan, Shown], tuple[Path, Any, dict[str, Course]]]


def _moe(folder: Path, seed: int, plan: Plan, shown: Shown) -> tuple[Path, Any, dict[str, Course]]:
    model = new_model(folder, BF16_SPEC, seed)
    tokenizer = load_tokenizer(folder)
    _supervise(model, tokenizer, plan, seed, shown)
    model.to(torch.bfloat16).save_pretrained(folder)
    courses: dict[str, Course] = {name: Digits(task, tokenizer, seed) for name, task in TASKS.items()}
    return folder, _loaded(folder, torch.float32), courses


def _supervise(model: Any, tokenizer: Tokenizer, plan: Plan, seed: int, shown: Shown) -> None:
    """Take supervised steps of the tasks whose right answers are not likely enough yet, by turns."""
    end_id, optimizer, reached = model.config.eos_token_id, Masters(model, SUPERVISED_RATE), [0.0] * len(TASKS)
    streams = [task.problems(seed, held_out=False) for task in TASKS.values()]
    for step in range(1, plan.supervised_steps + 1):
        for stream, likely_enough in zip(streams, [each >= SUPERVISED_UNTIL for each in reached]):
            if likely_enough:
                continue
            chosen = list(islice(stream, SUPERVISED_BATCH))
            examples = [[*encode(tokenizer, each.question + each.answer), end_id] for each in chosen]
            supervised_step(model, optimizer, examples, len(encode(tokenizer, chosen[0].question)))
        if step % 10 == 0:
            judged = (task.problems(-1, held_out=False) for task in TASKS.values())
            reached = [expected_reward(model, partial(encode, tokenizer), end_id, problems) for problems in judged]
        likely = ", ".join(f"{name} {each:.2f}" for name, each in zip(TASKS, reached))
        shown.report("supervised steps", step, plan.supervised_steps, f"right answers: {likely}")
        if min(reached) >= SUPERVISED_UNTIL:
            return


def _real(folder: Path, seed: int, plan: Plan, shown: Shown) -> tuple[Path, Any, dict[str, Course]]:
    shown.doing("loading the model")
    courses: dict[str, Course] = {kind: Words(kind, seed) for kind in ("add", "subtract")}
    return CHECKPOINT, _loaded(CHECKPOINT, torch.float32), courses


SETTINGS = {
    "moe": Setting(Plan(), ATTENTION, ("--enable-return-routed-experts",), _moe),
    "real": Setting(
        Plan(steps=30, groups=6, rate=5e-4, judged=60),
        ATTENTION + DENSE,
        ("--dtype", "bfloat16", "--context-length", "256"),
        _real,
    ),
}


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()


def main(argv: Sequence[str], plan: Plan | None = None) -> int:
    """Run the example and return 0 if every run ended, 1 if something broke, 130 if interrupted."""
    args = _parse(argv)
    console, setting = prepare(args.threads), SETTINGS[args.setting]
    plan = plan or setting.plan
    setting = replace(setting, plan=replace(plan, steps=args.steps or plan.steps))
    out = args.out / args.setting
    out.mkdir(parents=True, exist_ok=True)

    def run(folder: Path) -> None:
        for seed in args.seeds:
            result = Result(args.setting, seed)
            _run(result, setting, args.threads, folder / str(seed), console)
            (out / f"seed-{seed}.json").write_bytes(msgspec.json.encode(result))

    status = status_of(run, "example-lora", console)
    if status != 0:
        return status
    results = load_results(out)
    console.print(results_table(results))
    console.print(f"wrote {plot_rewards(results, out / 'rewards.png')}", highlight=False)
    return 0


def _run(result: Result, setting: Setting, threads: int, folder: Path, console: Console) -> None:
    torch.manual_seed(result.seed)
    folder.mkdir(parents=True, exist_ok=True)
    flags = (
        *("--enable-lora", "--max-lora-rank", str(setting.plan.rank), "--random-seed", str(result.seed)),
        *("--max-running-requests", "256", "--max-total-tokens", "32768", *setting.flags),
    )
    with progress(console) as shown:
        checkpoint, model, courses = setting.make(folder, result.seed, setting.plan, shown)
        shown.doing("starting the server")
        with serving(checkpoint, folder / "server.log", threads, flags) as url:
            training = Training(model, url, courses, setting.modules, setting.plan, shown)
            asyncio.run(training.run(result))


def load_results(folder: Path) -> list[Result]:
    """Load all results in the folder, sorted by seed."""
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in folder.glob("seed-*.json")]
    return sorted(results, key=lambda result: result.seed)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = run_parser("example-lora", "GRPO of two adapters at once.", steps="of the setting", out="lora-results")
    add_seeds(parser)
    parser.add_argument("--setting", default="moe", choices=SETTINGS, help="model and tasks (default: moe)")
    args = parsed(parser, argv)
    if args.setting == "real" and not (CHECKPOINT / "config.json").is_file():
        parser.error(f"{CHECKPOINT} has no config.json; make real-model makes the checkpoint")
    return args


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
