"""Lines for the operator, on stderr: the log's level does not silence them.

2026-11-26 23:15:02 INFO lockstep: ready at http://127.0.0.1:30000      a line of the log, in the log's format
lockstep: error: cannot listen on 127.0.0.1:30000                       why a command did not start or ended
"""

from __future__ import annotations

import sys
import time

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def say(line: str, level: str = "INFO") -> None:
    """Print a line as one of the log."""
    print(f"{time.strftime(TIME_FORMAT)} {level} lockstep: {line}", file=sys.stderr, flush=True)


def fail(reason: str) -> int:
    """Print why the command ends, in one line; the exit status."""
    print(f"lockstep: error: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return 1
