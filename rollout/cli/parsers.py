"""The parser of `lockstep build-kernels`, which reads its words without torch."""

from __future__ import annotations

from rollout.core.args.parser import Parser
from rollout.kernels.isa import CHOICES


def build_kernels_parser() -> Parser:
    """Return the parser of `lockstep build-kernels`."""
    parser = Parser(
        prog="lockstep build-kernels", description="Compile the CPU operators ahead of the first start of a server."
    )
    parser.add_argument("--cpu-isa", choices=CHOICES, help="default: $LOCKSTEP_CPU_ISA, or the best that works")
    return parser
