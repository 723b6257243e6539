"""The flags that every example has, and the console that it prints to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

LINE_WIDTH = 118  # where there is no terminal


def run_parser(name: str, description: str, *, steps: str, out: str) -> argparse.ArgumentParser:
    """Return a parser of `make NAME` with the flags of every example.  `steps`: how many are taken by default."""
    parser = argparse.ArgumentParser(prog=f"make {name}", description=description)
    parser.add_argument("--steps", type=int, help=f"training steps (default: {steps})")
    parser.add_argument(
        "--threads", type=int, default=1, help="compute threads of the trainer and of each server (default: 1)"
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of results and plots")
    return parser


def add_seeds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="runs, one after the other (default: 0)")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of a run.  Ends the process with one line for numbers that make no run."""
    args = parser.parse_args(argv)
    if (args.steps is not None and args.steps < 1) or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    return args


def prepare(threads: int) -> Console:
    """Give torch its threads, have transformers show no bars of its own, and return the console of the run."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return Console() if sys.stdout.isatty() else Console(width=LINE_WIDTH)
