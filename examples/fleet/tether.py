"""`python -m examples.fleet.tether PID MODULE word ...`: `python -m MODULE word ...` that ends with the process PID.

PID is the parent.  However it ends, by SIGKILL too, nothing that it started is left (on Linux).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tethered(module: str, *words: str) -> list[str]:
    """Return the command of a child that ends with this process."""
    return [sys.executable, "-m", "examples.fleet.tether", str(os.getpid()), module, *words]


def main(argv: Sequence[str]) -> None:
    parent, module, *words = argv
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit("the parent has ended already")
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
