"""Measures the cost of empty slots for adapters: engines of one process take turns of a few steps.

Two engines have the same requests, whose prompts are computed before, and draw the same tokens.  A number is the median
over pairs of turns, one of each engine, next to each other in time.  So it tells a percent where the speed of the
machine changes by more.  Which engine is the first of a pair changes from pair to pair.

The same engine built twice differs by some percent, by the places of its weights in memory.  So two engines with slots
are compared with two without them, built in the order without, with, with, without.  The two without slots are compared
with each other, too: that is what the measurement cannot tell.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.shapes import SHAPES, checkpoint
from tests.scheduler_harness import Harness

STEPS = 8  # of an engine in a turn
BATCH = 64
PROMPT = 4


class Turn(NamedTuple):
    """The seconds of some steps: of the clock, and of all processors that the process used."""

    wall: float
    cpu: float


def run(shape: str, rounds: int, new_tokens: int, console: Console) -> list[dict[str, Any]]:
    """Measure engines without slots and with 32 empty ones.  Returns two rows, and prints them."""
    folder = checkpoint(shape)
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_total_tokens": BATCH * 512,
        "enable_return_routed_experts": False,
    }
    slots: dict[str, Any] = {"enable_lora": True, "max_loras_per_batch": 32}
    first, second, third, fourth = (Harness(folder, **common, **more) for more in ({}, slots, slots, {}))
    cases = {"32 empty slots": [(first, second), (fourth, third)], "no slots again": [(first, fourth)]}
    rng = random.Random(0)
    pairs: dict[str, list[tuple[Turn, Turn]]] = defaultdict(list)
    for turn in range(rounds + 1):  # turn 0 warms up
        for case, engines in cases.items():
            for plain, other in engines:
                prompts = [[rng.randrange(SHAPES[shape].vocab_size) for _ in range(PROMPT)] for _ in range(BATCH)]
                found = _race(plain, other, prompts, new_tokens)
                pairs[case] += found if turn else []
    rows = [_row(shape, case, found) for case, found in pairs.items()]
    for row in rows:
        console.print(
            f"{shape}: {BATCH} requests without adapters, {row['case']} over no slots: tokens a second "
            f"{row['ratio']:.3f} (half of {row['pairs']} pairs {row['low']:.3f} to {row['high']:.3f}), "
            f"by CPU time {row['cpu_ratio']:.3f}"
        )
    return rows


def _row(shape: str, case: str, pairs: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    wall = sorted(before.wall / after.wall for before, after in pairs)
    quarter, cpu = len(wall) // 4, statistics.median(before.cpu / after.cpu for before, after in pairs)
    row: dict[str, Any] = {"part": "adapter slots", "shape": shape, "case": case, "pairs": len(pairs), "cpu_ratio": cpu}
    return row | {"ratio": statistics.median(wall), "low": wall[quarter], "high": wall[-1 - quarter]}


def _race(plain: Harness, other: Harness, prompts: list[list[int]], new_tokens: int) -> list[tuple[Turn, Turn]]:
    """Return pairs of turns that decode all requests, of the first engine and of the other one.

    Raises `AssertionError` if the tokens differ.
    """
    params = {"temperature": 1.0, "max_new_tokens": new_tokens}
    rids = []
    for engine in (plain, other):
        rids.append([engine.submit(ids, params=params | {"sampling_seed": n}) for n, ids in enumerate(prompts)])
        while len(engine.scheduler.queues.running) < BATCH:
            engine.tick()
    pairs, order = [], [plain, other]
    for _ in range((new_tokens - 2 * STEPS) // STEPS):
        turns = {engine: _turn(engine) for engine in order}
        pairs.append((turns[plain], turns[other]))
        order.reverse()
    for engine in order:
        engine.run()
    tokens = [[engine.results.pop(rid).token_ids for rid in own] for engine, own in zip((plain, other), rids)]
    assert tokens[0] == tokens[1]
    return pairs


def _turn(engine: Harness) -> Turn:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        engine.scheduler.tick(0)
    turn = Turn(time.perf_counter() - wall, time.process_time() - cpu)
    engine._collect()
    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=["S", "M"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    for shape in args.shapes:
        run(shape, args.rounds, args.new_tokens, Console())


if __name__ == "__main__":
    main()
