"""The parser of `lockstep make-checkpoint`, which reads its words without torch."""

from __future__ import annotations

from examples.make_checkpoint.spec import CheckpointSpec
from rollout.core.args.parser import Parser
from rollout.core.args.server_cli import add_cli_args


def parser() -> Parser:
    """Return a parser with one flag for each field of `CheckpointSpec`."""
    flags = Parser(
        prog="lockstep make-checkpoint", description="Write a small random checkpoint in Hugging Face format."
    )
    flags.add_argument("path", metavar="DIR", help="folder to write, new or empty")
    flags.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    add_cli_args(flags, CheckpointSpec)
    return flags
