"""`lockstep build-kernels`: compile the CPU operators ahead of the first start of a server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rollout.kernels.build import load_kernels
from rollout.kernels.isa import CHOICES


def main(words: Sequence[str]) -> int:
    """Exit status 0 also where they cannot be compiled: the server runs without them, more slowly."""
    parser = argparse.ArgumentParser(prog="lockstep build-kernels", description=__doc__)
    parser.add_argument("--cpu-isa", choices=CHOICES, help="default: $LOCKSTEP_CPU_ISA, or the best that works")
    args = parser.parse_args(words)
    status = load_kernels(print, args.cpu_isa)
    if status.available:
        print(f"CPU operators are ready ({status.isa})")
    else:
        print(f"CPU operators are not available, plain torch is used instead: {status.reason}")
    return 0
