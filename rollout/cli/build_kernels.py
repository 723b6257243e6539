"""`lockstep build-kernels`: compile the CPU operators ahead of the first start of a server."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.cli.parsers import build_kernels_parser
from rollout.kernels.build import load_kernels


def main(words: Sequence[str]) -> int:
    """Compile the operators.  The exit status is 0 even where that fails: the server runs without them, more slowly."""
    args = build_kernels_parser().parse_args(words)
    status = load_kernels(print, args.cpu_isa)
    if status.available:
        print(f"CPU operators are ready ({status.isa})")
    else:
        print(f"CPU operators are not available, plain torch is used instead: {status.reason}")
    return 0
