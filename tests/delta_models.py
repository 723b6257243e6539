"""Versions of small models for tests of deltas: real bfloat16 tensors, and masters that an optimiser moves a little."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weight_sync.delta.frame import DeltaFrame

Tensors = dict[str, torch.Tensor]


class DriftingMasters:
    """float32 masters of random tensors that move by about `rate` a step, as Adam's do."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._masters = {name: torch.randn(shape, generator=self._generator) * 0.02 for name, shape in shapes.items()}

    def step(self, rate: float = 1e-6) -> None:
        for master in self._masters.values():
            master += rate * torch.randn(master.shape, generator=self._generator)

    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> Tensors:
        return {name: master.to(dtype, copy=True) for name, master in self._masters.items()}


def applied(frame: DeltaFrame, base: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors of a frame, applied to those in `base`."""
    return {name: delta.apply(base[name]) for name, delta in frame.open().items()}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
