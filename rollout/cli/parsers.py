"""The parser of `lockstep build-kernels`, which reads its words without torch."""

from __future__ import annotations

import argparse

from rollout.kernels.isa import CHOICES


def build_kernels_parser() -> argparse.ArgumentParser:
    """Return the parser of `lockstep build-kernels`."""
    parser = argparse.ArgumentParser(
        prog="lockstep build-kernels", description="Compile the CPU operators ahead of the first start of a server."
    )
    parser.add_argument("--cpu-isa", choices=CHOICES, help="default: $LOCKSTEP_CPU_ISA, or the best that works")
    return parser
