"""A fingerprint of a logical tensor that does not depend on how the tensor is sharded, and a digest over many of them.

    F(w) = sum over i of  h(i) * (w_i + 1)   mod 2^64
    h(i) = a(i // BLOCK) * b(i % BLOCK)       a(c) = mix(2c) | 1,  b(j) = mix(2j + 1) | 1

`w_i` is the element at flat index `i` as an unsigned integer of the dtype's own width, `mix(k)` the k-th output of the
splitmix64 generator (Steele, Lea and Flood, 2014) started at 0.  Every h(i) is odd, so a change of a single element
always changes F.  F is a sum, so shards add up, and it depends on positions, so swapped rows or experts show.
It guards against mistakes and bit errors, not against someone who forges tensors to match.

Knows tensors and integers.  Does not know models, transports or versions.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.tensor_meta import DTYPES, TensorMeta, dtype_name

BLOCK = 4096
_BLOCKS_PER_CHUNK = 128  # a 4 MiB int64 scratch: it stays in a CPU cache, and bounds the memory on any device
_MASK = (1 << 64) - 1
_WORD_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}  # int64 wraps like uint64


def fingerprint(tensor: torch.Tensor, offset: int = 0) -> int:
    """F of a tensor in [0, 2^64), or of a contiguous shard of one.

    `tensor`: any shape, any dtype of `DTYPES`, any device; read in row-major order (a tensor that is not contiguous
    is copied first).  `offset`: flat index, in the whole logical tensor, of the shard's first element.
    Scratch memory is a few MiB whatever the size.  An empty tensor gives 0.
    """
    if tensor.dtype not in DTYPES.values():
        raise WeightRequestError(f"no fingerprint for dtype {dtype_name(tensor.dtype)}")
    words = tensor.detach().contiguous().view(-1).view(_WORD_DTYPES[tensor.dtype.itemsize])
    table = _table_b(str(words.device))
    head = min(words.numel(), -offset % BLOCK)
    num_blocks = (words.numel() - head) // BLOCK
    body_end = head + num_blocks * BLOCK

    total = _part_of_block(words[:head], offset, table)
    total += _whole_blocks(words[head:body_end].view(num_blocks, BLOCK), (offset + head) // BLOCK, table)
    total += _part_of_block(words[body_end:], offset + body_end, table)
    return total & _MASK


def combine(*parts: int) -> int:
    """F of a tensor from the fingerprints of the shards that make it up."""
    return sum(parts) & _MASK


def fingerprint_hex(value: int) -> str:
    """The wire form of a fingerprint: 16 lower-case hex digits."""
    return f"{value:016x}"


def parse_fingerprint(text: str) -> int:
    """Inverse of `fingerprint_hex`.  Raises `WeightRequestError` on anything but 16 hex digits."""
    digits = text.lower()
    if len(digits) != 16 or set(digits) - set("0123456789abcdef"):
        raise WeightRequestError(f"a fingerprint is 16 hex digits, got {text[:40]!r}")
    return int(digits, 16)


def digest(entries: Iterable[tuple[TensorMeta, int]]) -> str:
    """SHA-256 (64 hex digits) over (name, dtype, shape, F) of every tensor, whatever order they come in.

    Names the content of a weight version: equal digests on two sides mean equal tensors under equal names.
    """
    lines = sorted(
        f"{meta.name}\0{dtype_name(meta.dtype)}\0{','.join(map(str, meta.shape))}\0{fingerprint_hex(value)}\n"
        for meta, value in entries
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _part_of_block(words: torch.Tensor, offset: int, table: torch.Tensor) -> int:
    """Sum over `words` [n], all inside one block."""
    if words.numel() == 0:
        return 0
    block, first = divmod(offset, BLOCK)
    row = words.to(torch.int64, copy=True).add_(1).mul_(table[first : first + words.numel()])
    return int(row.sum()) * int(_mix_odd(torch.tensor([2 * block])))


def _whole_blocks(words: torch.Tensor, first_block: int, table: torch.Tensor) -> int:
    """Sum over `words` [num_blocks, BLOCK].  All arithmetic is int64 that wraps, on the tensor's device."""
    num_blocks = words.shape[0]
    if num_blocks == 0:
        return 0
    device = words.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    scratch = torch.empty(min(num_blocks, _BLOCKS_PER_CHUNK), BLOCK, dtype=torch.int64, device=device)
    sum_b = table.sum()  # the "+ 1" of every word, once per block
    for start in range(0, num_blocks, _BLOCKS_PER_CHUNK):
        chunk = words[start : start + _BLOCKS_PER_CHUNK]
        products = scratch[: chunk.shape[0]].copy_(chunk).mul_(table)
        blocks = torch.arange(start, start + chunk.shape[0], device=device) + first_block
        total += (_mix_odd(2 * blocks) * (products.sum(1) + sum_b)).sum()
    return int(total)


@functools.lru_cache(maxsize=16)
def _table_b(device: str) -> torch.Tensor:
    return _mix_odd(2 * torch.arange(BLOCK, device=device) + 1)


def _mix_odd(k: torch.Tensor) -> torch.Tensor:
    """`splitmix64(k) | 1`, element by element, int64 in and out."""
    z = (k + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift_right(z, 31)) | 1


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own is arithmetic on int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
