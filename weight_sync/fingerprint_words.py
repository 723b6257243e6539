"""The words of a fingerprint's blocks, and the fixed multiplier of each word.

b(j) = splitmix64(2j + 1) | 1,  j < BLOCK
"""

from __future__ import annotations

import functools

import torch

BLOCK = 4096
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # for what torch does not do unsigned
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}  # int64 wraps like uint64


@functools.lru_cache(maxsize=16)
def multipliers(device: str) -> torch.Tensor:
    """Return b(j): int64 [BLOCK]."""
    return mix_odd(2 * torch.arange(BLOCK, device=device) + 1)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as signed integers [numel]; a copy where the tensor is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(SIGNED[tensor.dtype.itemsize])


def mix_odd(k: torch.Tensor) -> torch.Tensor:
    """Compute `splitmix64(k) | 1`, element by element, int64 in and out: the k-th output of the generator started at 0.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    z = (k + 1) * signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * signed(0x94D049BB133111EB)
    return (z ^ _shift_right(z, 31)) | 1


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right logically; torch's own shift is arithmetic on int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """Return a number in [0, 2^64) as an int64 holds it."""
    return value - (1 << 64) if value >> 63 else value
