"""The command line of `lockstep bench`: read without torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rollout.core.args.parser import Parser
from rollout.core.args.server_args import DTYPES

WATCHED_EVERY = 6
"""Decode steps from one that is watched to the next."""
MIN_OUTPUT_LEN = 4 * WATCHED_EVERY
LONG_PROMPT = 2048
"""Tokens of the long prompt.  It is shorter where the model's context is."""


def parser() -> Parser:
    """Return the parser of `lockstep bench`."""
    parser = Parser(
        prog="lockstep bench",
        description="Tokens a second, the breakdown of a step, and how far each operator is from the roofline.",
    )
    add = parser.add_argument
    add("--model-path", type=Path, help="checkpoint folder (default: a small random model)")
    add(
        "--batch-sizes",
        type=_count(),
        nargs="+",
        default=[1, 8, 32, 64],
        metavar="N",
        help="requests of a batch (default: 1 8 32 64)",
    )
    add("--input-len", type=_count(), default=128, metavar="N", help="prompt tokens of a request (default: 128)")
    add(
        "--output-len", type=_count(MIN_OUTPUT_LEN), default=64, metavar="N",
        help=f"decode steps that are measured, at least {MIN_OUTPUT_LEN} (default: 64)",
    )  # fmt: skip
    add(
        "--prefill",
        type=_count(0),
        metavar="N",
        help=f"tokens of one long prompt; 0: none (default: {LONG_PROMPT}, less in a shorter context)",
    )
    add("--temperature", type=_temperature, default=0.0, help="sampling temperature; 0 is greedy (default: 0)")
    add("--chunked-prefill-size", type=int, default=2048, help="maximum prompt tokens of a step (default: 2048)")
    add("--dtype", choices=DTYPES, default="auto", help="dtype of weights and KV (default: the checkpoint's)")
    add("--threads", type=_count(), help="compute threads (default: all cores)")
    add("--disable-native-kernels", action="store_true", help="run on plain torch")
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace of a few steps")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    return parser


def _count(least: int = 1) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` up."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return parse


def _temperature(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value
