"""Many histories, or one again.

python -m tests.history run --histories 5000 [--seed N] [--target adapter]
python -m tests.history replay '{"actions": ...}'
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, given, settings

from tests.adapter_updates import random_content
from tests.faults.contents import HISTORY_SHAPE, Contents
from tests.history.actions import History, decode, histories
from tests.history.checker import Tally
from tests.history.machine import HistoryFailed, Zoo, play
from tests.history.transports import TRANSPORTS
from tests.integration.test_adapter_history import NUM_ADAPTERS, NUM_BASES, explained

_REPORT_EVERY_S = 30.0


def run(num_histories: int, seed: int, zoo: Zoo) -> None:
    """Play random histories.  Raises `HistoryFailed` for the smallest one found that fails."""
    print(f"{num_histories} histories over {', '.join(TRANSPORTS)}; --seed {seed}", flush=True)
    tally, failed = Tally(), False
    started = reported = time.monotonic()

    @hypothesis.seed(seed)
    @settings(max_examples=num_histories, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(histories(tuple(TRANSPORTS), max_actions=24))
    def many(history: History) -> None:
        nonlocal reported, failed
        try:
            tally.add(play(history, zoo))
        except HistoryFailed as failure:
            if not failed:
                print(f"{failure}\nfailed; looking for a smaller one", file=sys.stderr, flush=True)
            failed = True
            raise
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"{reported - started:.0f} s: {tally}", flush=True)

    many()
    print(f"all explained, in {time.monotonic() - started:.0f} s: {tally}")


def run_of_adapters(num_histories: int, seed: int, scratch: Path) -> None:
    """Play histories in which a base and two adapters change.  Raises `HistoryFailed` for the first that fails."""
    zoo = Contents(scratch / "zoo", HISTORY_SHAPE, "float32", NUM_BASES)
    adapters = [random_content(scratch / f"adapter{it}", zoo.contents[0], it) for it in range(NUM_ADAPTERS)]
    tokens, totals, started = 0, Counter[str](), time.monotonic()
    for number in range(seed, seed + num_histories):
        try:
            compared, counts = explained(zoo, adapters, scratch / str(number), number)
        except Exception as failure:
            raise HistoryFailed(f"--target adapter --histories 1 --seed {number}: {failure}") from failure
        tokens += compared
        totals.update(counts)
    said = ", ".join(f"{count} {what}" for what, count in totals.items())
    print(f"all explained, in {time.monotonic() - started:.0f} s: {num_histories} histories, {tokens} tokens, {said}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.history", description="The history checker.")
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="play random histories")
    run_parser.add_argument("--histories", type=int, default=5000)
    run_parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    run_parser.add_argument("--target", choices=["model", "adapter"], default="model")
    replay_parser = commands.add_parser("replay", help="play one history again")
    replay_parser.add_argument("history", help="its JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            if args.command == "replay":
                print(f"all explained: {play(decode(args.history), Zoo(scratch / 'model'))}")
                return 0
            seed = secrets.randbelow(2**32) if args.seed is None else args.seed
            if args.target == "model":
                run(args.histories, seed, Zoo(scratch / "model"))
            else:
                run_of_adapters(args.histories, seed, scratch)
        except HistoryFailed as failure:
            print(failure, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
