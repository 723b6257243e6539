"""Settings of the engines that these tests build: few batch sizes are captured, so that an engine starts in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.scheduler_harness import Harness

CAPTURED_MAX = 8


def engine(folder: Path, device: torch.device, **settings: Any) -> Harness:
    """A real scheduler on `device`, driven step by step; `settings` are those of `ServerArgs`."""
    return Harness(folder, **{"device": str(device), "cuda_graph_max_bs": CAPTURED_MAX} | settings)
