"""`wait_for_predecessor`, the first statement of every kernel of this package: see `launch_options`.

The wait ends when the kernels before have completed and their memory operations can be seen (PTX ISA,
`griddepcontrol.wait`).  Then the kernel lets the next one begin (`griddepcontrol.launch_dependents`).  That one is
placed when all programs of this one have waited.  So the last kernel but one has completed before a kernel begins.
FlashInfer needs that: its kernels read the tables of their plan before they wait.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _has_instructions(_semantic: Any = None) -> Any:
    """Return whether the device that is compiled for has the instructions.  The interpreter has none."""
    if _semantic is None:
        return False
    options = _semantic.builder.options
    return tl.constexpr(options.backend_name == "cuda" and int(options.arch.removeprefix("sm")) >= 90)


_has_instructions.__triton_builtin__ = True  # type: ignore[attr-defined]  # the compiler calls it with `_semantic`


@triton.jit
def wait_for_predecessor():
    if _has_instructions():
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
