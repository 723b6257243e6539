"""Triton kernels as plain Python on CPU tensors: imported before any module that has kernels.

Whether a kernel is interpreted is decided where it is defined, triton's own functions included, so that triton must not
have been loaded before; processes that compile kernels are started with `compiling_environment`.
"""

from __future__ import annotations

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was loaded before tests.interpreted: its functions would not be interpreted")
os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="pip install triton")


def compiling_environment() -> dict[str, str]:
    """The environment of a process that compiles kernels."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
