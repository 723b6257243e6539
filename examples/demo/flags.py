"""The command line of `lockstep demo`: read without torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from examples.demo.questions import load_questions
from examples.make_checkpoint.spec import FAMILIES, CheckpointSpec
from rollout.core.args.parser import Parser

SIZES = {
    "standard": CheckpointSpec(shards=4),
    "tiny": CheckpointSpec(
        vocab_size=384, hidden_size=64, layers=3, heads=4, head_dim=16, kv_heads=2, intermediate_size=128,
        experts=16, moe_intermediate_size=32, shards=2,
    ),
}  # fmt: skip


def parser() -> Parser:
    """Return the parser of `lockstep demo`."""
    num_questions = len(load_questions())
    parser = Parser(prog="lockstep demo", description="Run one whole step of reinforcement learning on a small model.")
    add = parser.add_argument
    add("--workdir", type=Path, help="folder for checkpoint and logs, kept (default: a temporary one)")
    add("--keep", action="store_true", help="keep the temporary folder")
    add("--size", choices=sorted(SIZES), default="standard", help="model to train (default: standard, 15 M parameters)")
    add("--family", choices=FAMILIES, default="qwen3_moe", help="family of the model (default: qwen3_moe)")
    add("--seed", type=int, default=0, help="seed of weights and sampling (default: 0)")
    add("--steps", type=_count(8), default=1, help="policy-gradient steps, each with a refresh (default: 1)")
    add("--prompts", type=_count(num_questions), default=12, help=f"questions, at most {num_questions} (default: 12)")
    add("--samples", type=_count(64, least=2), default=6, help="samples per question (default: 6)")
    add("--max-new-tokens", type=_count(256), default=32, help="longest answer in tokens (default: 32)")
    add("--learning-rate", type=float, default=3e-4, help="learning rate of Adam (default: 3e-4)")
    add("--port", type=int, default=0, help="the server's port (default: a free one)")
    return parser


def _count(most: int, least: int = 1) -> Any:
    """Return a parser of whole numbers in least..most."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be in {least}..{most}")
        return value

    return parse
