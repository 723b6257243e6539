"""Options of kernel launches: programmatic dependent launch, on devices of compute capability 9.0 and above.

    without     A runs           | B is launched | B runs
    with        A runs           | B runs                      B's programs are placed while A's end, and wait

A kernel that is launched with the option may begin while the kernel before it on the stream runs.  It has to wait for
that one before it reads or writes memory.  So the first statement of every kernel of this package is
`predecessor.wait_for_predecessor`; `tests/unit/kernels/test_dependent_launch.py` refuses others.  A kernel ends only
after the one before it has.  So waiting for the last kernel is waiting for all of them, whatever option they have.

A kernel without the option begins after everything before it has completed, and so does a copy.  A capture turns the
option into a programmatic edge of the graph (CUDA programming guide, "Programmatic Dependent Launch").

`$LOCKSTEP_DEPENDENT_LAUNCH=0` launches every kernel without the option.  Kernels are compiled the same: without a
kernel that may begin early their two instructions do nothing.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from rollout.core.errors import StartupError

VARIABLE = "LOCKSTEP_DEPENDENT_LAUNCH"
NEVER = (1 << 30, 0)
_HOPPER = (9, 0)


def first_capability(switch: str) -> tuple[int, int]:
    """Return the least compute capability with the option, by the value of `VARIABLE`: "" or "1": yes; "0": none.

    Raises `StartupError` for another value.
    """
    if switch not in ("", "0", "1"):
        raise StartupError(f"${VARIABLE} is 0 or 1, not {switch!r}")
    return NEVER if switch == "0" else _HOPPER


# Read at each launch: a benchmark may put `NEVER` in its place.
FIRST_CAPABILITY = first_capability(os.environ.get(VARIABLE, ""))


def launch_options(x: torch.Tensor) -> dict[str, bool]:
    """Return the options of a launch on the device of `x`."""
    if x.is_cuda and capability(x.device.index) >= FIRST_CAPABILITY:
        return {"launch_pdl": True}
    return {}


@cache
def capability(device: int) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (0, 0) under ROCm, whose devices torch calls by that name."""
    return torch.cuda.get_device_capability(device) if torch.version.cuda is not None else (0, 0)
