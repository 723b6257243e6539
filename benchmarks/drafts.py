"""Tokens a second with drafts from the text and without: two engines, a few turns of each at a time.

Both have the same requests, and must give the same answers.  S and M have random weights, so that their answers hardly
repeat: they show what it costs to look for drafts.  SmolLM2-135M-Instruct, where `make real-model` made it, is a
trained model on real texts, whose answers end where it ends them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.bar_chart import Bars, write_svg
from benchmarks.shapes import checkpoint
from benchmarks.weight_formats import REAL_MODEL
from rollout.text.tokenizer_files import read_tokenizer
from tests.scheduler_harness import Harness

TRAINED = "SmolLM2-135M"
MODELS = ("S", "M", TRAINED)
BATCHES = (1, 4, 16, 64)
GROUP = 16
TURNS = 8  # of one engine, then of the other
CONTEXT = 2048
_CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    if shape.kind == "triangle":
        return 0.5 * shape.base * shape.height
    raise ValueError(shape.kind)
"""
_EDIT = f"Add type hints to this function and write all of it again.\n\n{_CODE}"
_SUMS = "1 + 3 = 4\n4 + 3 = 7\n7 + 3 = 10\n10 + 3 = 13\n13 + 3 = 16\n16 + 3 = 19\n19 + 3 ="
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Work(NamedTuple):
    """Requests of one kind.  `text` None: prompts of random tokens.  `group`: samples of one prompt."""

    text: str | None
    temperature: float
    group: bool = False


TEXTS = {
    "code edit": Work(_TURN.format(_EDIT), 0.0),
    "sums": Work(_SUMS, 0.0),
    "chat": Work(_TURN.format("Why did the French revolution begin?"), 0.7),
    "nothing to draft": Work(None, 1.0),
    "group of 16": Work(_TURN.format(_EDIT), 0.5, group=True),
}
OF_RANDOM_WEIGHTS = {
    "greedy": Work(None, 0.0),
    "nothing to draft": Work(None, 1.0),
    "group of 16": Work(None, 0.2, group=True),
}


class Race(NamedTuple):
    """The seconds of each engine and the tokens that it gave in them; of all tokens, how many were drafted ones."""

    seconds: dict[str, float]
    timed_tokens: dict[str, int]
    num_tokens: int
    num_kept: int

    def rate(self, side: str) -> float:
        """Return an engine's tokens a second."""
        return self.timed_tokens[side] / self.seconds[side]


class Pair:
    """An engine without drafts and one with them, of one model."""

    def __init__(self, model: str) -> None:
        folder = REAL_MODEL if model == TRAINED else checkpoint(model)
        common: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 64 * 512, "context_length": CONTEXT}
        common |= {"max_running_requests": 64, "enable_return_routed_experts": False}
        self.sides = {
            "off": Harness(folder, **common),
            "on": Harness(folder, **common, speculative_algorithm="NGRAM"),
        }
        self._tokenizer = read_tokenizer(folder).backend
        self._vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]

    def prompts(self, work: Work, count: int, turn: int) -> list[list[int]]:
        """Return prompts that begin with another token each, so that none is in the prefix cache."""
        rng = random.Random(f"{work} {turn}")
        if work.text is None:
            return [[rng.randrange(self._vocab_size) for _ in range(64)] for _ in range(count)]
        ids = self._tokenizer.encode(work.text, add_special_tokens=False).ids
        return [[rng.randrange(1, 1000), *ids] for _ in range(count)]

    def race(self, work: Work, prompts: list[list[int]], new_tokens: int) -> Race:
        """Let each engine answer the requests, a few turns at a time.  Steps until all have a token are not timed.

        Raises `AssertionError` if their answers differ.
        """
        params = {"temperature": work.temperature, "max_new_tokens": new_tokens, "ignore_eos": work.text is None}
        rids = [
            [side.submit(ids, params=params | {"sampling_seed": 5 + n}) for n, ids in enumerate(prompts)]
            for side in self.sides.values()
        ]
        begun = {}
        for (name, side), own in zip(self.sides.items(), rids, strict=True):
            running = side.scheduler.queues.running.reqs
            while len(running) + len(ended := [rid for rid in own if side.results[rid].finished]) < len(own):
                _turns(side, 1)
                running = side.scheduler.queues.running.reqs
            begun[name] = sum(len(req.output_ids) for req in running)
            begun[name] += sum(len(side.results[rid].token_ids) for rid in ended)
        seconds = dict.fromkeys(self.sides, 0.0)
        names = list(self.sides)
        while any(side.scheduler.has_work or side.channel.inbox for side in self.sides.values()):
            for name in names:
                seconds[name] += _turns(self.sides[name], TURNS)
            names.reverse()
        off, on = ([side.results.pop(rid) for rid in own] for side, own in zip(self.sides.values(), rids, strict=True))
        assert [one.token_ids for one in on] == [one.token_ids for one in off]
        tallies = [one.finished.drafts for one in on if one.finished is not None and one.finished.drafts is not None]
        num_tokens = sum(len(one.token_ids) for one in on)
        timed = {name: num_tokens - begun[name] for name in names}
        return Race(seconds, timed, num_tokens, sum(tally.num_kept for tally in tallies))


def _turns(side: Harness, count: int) -> float:
    """Return the seconds of the next turns of an engine, if it has work."""
    seconds = 0.0
    for _ in range(count):
        if not (side.scheduler.has_work or side.channel.inbox):
            break
        start = time.perf_counter()
        side.scheduler.tick(0)
        seconds += time.perf_counter() - start
        side._collect()
    drafting = side.scheduler._steps._drafting
    if drafting is not None:
        drafting.rest()  # the time of the other engine's turns is none of the last step's
    return seconds


def measure(pair: Pair, model: str, name: str, work: Work, batch: int, rounds: int, new_tokens: int) -> dict[str, Any]:
    """Return a row of results of one kind of requests."""
    races = []
    for turn in range(rounds + 1):  # turn 0 warms up
        prompts = pair.prompts(work, 1, turn) * batch if work.group else pair.prompts(work, batch, turn)
        races.append(pair.race(work, prompts, new_tokens))
    del races[0]
    speed = {side: statistics.median(race.rate(side) for race in races) for side in pair.sides}
    ratio = statistics.median(race.rate("on") / race.rate("off") for race in races)
    kept = sum(race.num_kept for race in races) / sum(race.num_tokens for race in races)
    return {"part": "drafts", "model": model, "text": name, "batch": batch, **speed, "ratio": ratio, "kept": kept}


def run(
    model: str,
    batches: list[int],
    rounds: int,
    new_tokens: int,
    console: Console,
    texts: list[str] | None = None,
    note: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Measure a model, print a table, and return its rows; `note` gets each as soon as it is there."""
    works = TEXTS if model == TRAINED else OF_RANDOM_WEIGHTS
    pair, rows = Pair(model), []
    for name, work in works.items():
        for batch in [GROUP] if work.group else batches:
            if texts is None or name in texts:
                rows.append(measure(pair, model, name, work, batch, rounds, new_tokens))
                note(rows[-1])
    table = Table(title=f"{model}: tokens/s without drafts and with them, {new_tokens} new tokens, {rounds} rounds")
    for column in ("text", "batch", "off", "on", "ratio", "kept"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row['off']:.0f}", f"{row['on']:.0f}", f"{row['ratio']:.2f}x", f"{row['kept']:.0%}")
        table.add_row(row["text"], str(row["batch"]), *numbers)
    console.print(table)
    return rows


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the ratios of each model, by text and batch."""
    charts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        values = {f"{row['text']}, {row['batch']}": [row["ratio"]] for row in own}
        charts.append(Bars(model, ["tokens/s with drafts over without"], values, form=".2f"))
    write_svg(path, charts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--texts", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, default=None, help="a file that rows are added to")
    parser.add_argument("--svg", type=Path, default=None, help="draws the rows of --json, and measures nothing")
    args = parser.parse_args()
    if args.svg is not None:
        picture([json.loads(line) for line in args.json.read_text().splitlines()], args.svg)
        return

    def note(row: dict[str, Any]) -> None:
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for model in args.models:
        run(model, args.batches, args.rounds, args.new_tokens, Console(), args.texts, note)


if __name__ == "__main__":
    main()
