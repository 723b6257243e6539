"""The settings of the parts of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """`dry_run`: take tiny sizes, to try the code on a CPU; the numbers mean nothing then."""

    device: torch.device
    num_layers: int
    dry_run: bool

    @property
    def dtype(self) -> str:
        return "float32" if self.dry_run else "bfloat16"
