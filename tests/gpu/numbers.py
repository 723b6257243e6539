"""Random numbers for operators on a device, the same numbers in float64 on the CPU, and how near results must be.

float32 within a relative error of 1e-5, bfloat16 within 1e-2.
"""

from __future__ import annotations

import torch

from rollout.kernels.ops import plain_ops

plain = plain_ops()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
EPS = 1e-6


class Numbers:
    """Random tensors on the device in one dtype; `exact` of one is the same numbers in float64 on the CPU."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(self._dtype).to(self._device)

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self._generator).to(self._device)

    def distinct(self, high: int, count: int) -> torch.Tensor:
        return torch.randperm(high, generator=self._generator)[:count].to(self._device)


def exact(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu().double()


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.cpu().double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    return float("inf") if difference.isnan() else difference.item()


def close(got: torch.Tensor, want: torch.Tensor | None, dtype: torch.dtype) -> bool:
    assert want is not None and got.shape == want.shape, (got.shape, want)
    return error_of(got, want) < TOLERANCE[dtype]
