"""Lines for the operator, on stderr: the log's level does not silence them."""

from __future__ import annotations

import sys


def say(line: str, prefix: str = "lockstep: ") -> None:
    print(prefix + line, file=sys.stderr, flush=True)


def fail(reason: str) -> int:
    """Print why the command ends, in one line; the exit status."""
    say(f"error: {' '.join(reason.split())}")
    return 1
