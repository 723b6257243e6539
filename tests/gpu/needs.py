"""The needs of a test; where the machine lacks one, the test is listed as NOT RUN with the reason."""

from __future__ import annotations

import importlib.util
from typing import NoReturn

import pytest
import torch

from tests.gpu.steps import NOT_RUN


def not_run(reason: str) -> NoReturn:
    """End the test: this machine cannot run it."""
    pytest.skip(NOT_RUN + reason)


def need_cuda(device: torch.device, what: str) -> None:
    """Leave the test out, as not run, unless on a CUDA device, which alone has `what`."""
    if device.type != "cuda":
        not_run(f"a dry run on the CPU has no {what}")


def need_gpus(device: torch.device, count: int) -> None:
    found = torch.cuda.device_count() if device.type == "cuda" else 0
    if found < count:
        not_run(f"needs {count} CUDA devices, this machine has {found}")


def need_module(name: str, how: str) -> None:
    """Leave the test out, as not run, unless an optional library is installed; `how` tells how to install it."""
    if importlib.util.find_spec(name) is None:
        not_run(f"{name} is not installed: {how}")
