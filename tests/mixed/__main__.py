"""Many schedules, or one again.

python -m tests.mixed run --seeds 5000 [--seed N] [--processes 2] [--minutes M]
python -m tests.mixed replay 123                a seed, or the JSON of a schedule
python -m tests.mixed shrink 123                a smaller schedule that fails all the same
python -m tests.mixed wrong [NAME ...]          after how many schedules each wrong engine is noticed
"""

from __future__ import annotations

import argparse
import math
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.mixed.many import run
from tests.mixed.play import MixedFailed, play
from tests.mixed.schedule import Schedule, decode, encode, schedule_of
from tests.mixed.shrink import shrink
from tests.mixed.wrong_engines import WRONG_ENGINES, schedules_until_noticed
from tests.mixed.zoo import Zoo


def main() -> int:
    args = _parser().parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lockstep-mixed-") as folder:
        zoo = Zoo(Path(folder))
        if args.command == "run":
            first = secrets.randbelow(2**32) if args.seed is None else args.seed
            seeds = range(first, first + args.seeds)
            return 0 if run(zoo, Path(folder), seeds, args.processes, args.minutes) else 1
        if args.command == "wrong":
            return _wrong(args.names or list(WRONG_ENGINES), args.most, zoo)
        return _again(_schedule(args.schedule, zoo), zoo, shrinks=args.command == "shrink")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mixed", description="The mixed fuzz.")
    commands = parser.add_subparsers(dest="command", required=True)
    many = commands.add_parser("run", help="play the schedules of many seeds")
    many.add_argument("--seeds", type=int, default=5000, help="how many")
    many.add_argument("--seed", type=int, default=None, help="the first; default: a new one, which is printed")
    many.add_argument("--processes", type=int, default=1)
    many.add_argument("--minutes", type=float, default=math.inf, help="at most; default: until all are played")
    for name, what in (("replay", "play one again"), ("shrink", "make one that fails smaller")):
        one = commands.add_parser(name, help=what)
        one.add_argument("schedule", help="a seed, or the JSON of a schedule")
    wrong = commands.add_parser("wrong", help="play schedules on wrong engines until each is noticed")
    wrong.add_argument("names", nargs="*", help="default: all of them")
    wrong.add_argument("--most", type=int, default=400, help="schedules for each")
    return parser


def _schedule(text: str, zoo: Zoo) -> Schedule:
    return schedule_of(int(text), zoo.shapes) if text.isdigit() else decode(text)


def _again(schedule: Schedule, zoo: Zoo, *, shrinks: bool) -> int:
    print(schedule.text(), flush=True)
    try:
        print(f"nothing differs: {play(schedule, zoo)}")
    except MixedFailed as failure:
        if shrinks:
            failure = shrink(failure, zoo)
            print(f"smaller: python -m tests.mixed replay '{encode(failure.schedule)}'")
        print(failure, file=sys.stderr)
        return 1
    return 0


def _wrong(names: Sequence[str], most: int, zoo: Zoo) -> int:
    missed = 0
    for name in names:
        count, noticed = schedules_until_noticed(name, zoo, most)
        missed += noticed is None
        print(f"{name}: " + ("never noticed" if noticed is None else f"schedule {count}, {noticed}"), flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
