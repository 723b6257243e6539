"""Versions of small models for tests of deltas: real bfloat16 tensors, and masters that an optimiser moves a little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from tests.logical_weights_fake import FakeWeights
from weight_sync.delta.frame import DeltaFrame
from weight_sync.receivers.base import BucketSource
from weight_sync.receivers.delta import DeltaSource
from weight_sync.tensor_meta import TensorMeta

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
    return {delta.entry.meta.name: delta.apply(base[delta.entry.meta.name]) for delta in frame.deltas()}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Delivered(BucketSource):
    """A transport that brings these tensors."""

    must_drain = True

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._named = [(f"part {number}", tensor) for number, tensor in enumerate(tensors)]

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._named]

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        yield self._named


def delta_source(payload: bytes, weights: FakeWeights) -> DeltaSource:
    return DeltaSource(Delivered(torch.frombuffer(bytearray(payload), dtype=torch.uint8)), weights)


def nudged(tensors: Tensors, steps: int = 1) -> Tensors:
    """Move every third element by a few units in the last place."""
    result = {}
    for name, tensor in tensors.items():
        words = tensor.clone().view(-1).view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
        words[::3] += steps
        result[name] = words.view(tensor.dtype).view(tensor.shape)
    return result
