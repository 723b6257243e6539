"""Lets client code that was written for GPUs move its tensors on a CPU: "cuda" means the CPU, "nccl" means gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d

SHIM = "gloo for NCCL, CPU tensors for CUDA's"


def install() -> None:
    """Put the CPU in the place of CUDA for the rest of the process."""
    real_to, real_helper = torch.Tensor.to, distributed_c10d._new_process_group_helper

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return real_to(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    def helper(*args: Any, **kwargs: Any) -> Any:
        return real_helper(*["gloo" if arg == "nccl" else arg for arg in args], **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign]
    distributed_c10d._new_process_group_helper = helper
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(torch.cuda, name, _nothing)
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]


def _on_cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return "cpu" if is_cuda else value


def _nothing(*_: Any, **__: Any) -> None:
    pass
