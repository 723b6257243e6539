"""The command lines of `lockstep make-checkpoint` and `lockstep build-kernels`: read without torch."""

from __future__ import annotations

import argparse

from rollout.core.server_cli import add_cli_args
from rollout.entrypoints.checkpoint_spec import CheckpointSpec
from rollout.kernels.isa import CHOICES


def make_checkpoint_parser() -> argparse.ArgumentParser:
    """Return a parser with one flag for each field of `CheckpointSpec`."""
    parser = argparse.ArgumentParser(
        prog="lockstep make-checkpoint", description="Write a small random checkpoint in Hugging Face format."
    )
    parser.add_argument("path", metavar="DIR", help="folder to write, new or empty")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    add_cli_args(parser, CheckpointSpec)
    return parser


def build_kernels_parser() -> argparse.ArgumentParser:
    """Return the parser of `lockstep build-kernels`."""
    parser = argparse.ArgumentParser(
        prog="lockstep build-kernels", description="Compile the CPU operators ahead of the first start of a server."
    )
    parser.add_argument("--cpu-isa", choices=CHOICES, help="default: $LOCKSTEP_CPU_ISA, or the best that works")
    return parser
