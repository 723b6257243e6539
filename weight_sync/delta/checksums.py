"""Checksums of tensor content under the names that trainers write into delta folders.

None of these but BLAKE3 withstands someone who forges content.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import blake3
import torch
import xxhash

from weight_sync.errors import WeightRequestError

DEFAULT_CHECKSUM = "xxh3-128"
CHECKSUMS: dict[str, Callable[[memoryview], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def require_checksum(name: object) -> str:
    """`name` if it is known.  Raises `WeightRequestError`."""
    if not isinstance(name, str) or name not in CHECKSUMS:
        raise WeightRequestError(f"unknown checksum_format {str(name)[:64]!r}; known: {', '.join(CHECKSUMS)}")
    return name


def checksum(name: str, tensor: torch.Tensor) -> str:
    """Of the tensor's bytes in row-major order, in lower-case hex digits."""
    return CHECKSUMS[name](tensor_bytes(tensor).numpy().data)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes in row-major order, uint8 [nbytes], in host memory; a view where possible."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
