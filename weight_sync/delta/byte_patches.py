"""Two delta encodings of single tensors as slime and miles write them: differences of bytes, zstd-compressed.

    xor        new ^ old                                            applied twice it is undone
    overwrite  u32 count | u32 position of each changed byte | the new bytes

Numbers are little-endian, positions ascend.  Neither names the tensor that it starts from: only a checksum of the new
content shows a wrong one, under the names that trainers write into delta folders.  Only BLAKE3 withstands forgery.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import blake3
import numpy as np
import torch
import xxhash

from weight_sync.delta.compression import compress, decompress, decompress_exactly
from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.tensor_meta import tensor_bytes

_NUMBER_BYTES = 4
_MAX_POSITIONS = 2**32


DEFAULT_CHECKSUM = "xxh3-128"
CHECKSUMS: dict[str, Callable[[memoryview], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def require_checksum(name: object) -> str:
    """Return `name` if it is known.  Raises `WeightRequestError`."""
    if not isinstance(name, str) or name not in CHECKSUMS:
        raise WeightRequestError(f"unknown checksum_format {str(name)[:64]!r}; known: {', '.join(CHECKSUMS)}")
    return name


def checksum(name: str, tensor: torch.Tensor) -> str:
    """Return the checksum of the tensor's bytes in row-major order, in lower-case hex digits."""
    return CHECKSUMS[name](tensor_bytes(tensor).numpy().data)


def encode_xor(old: torch.Tensor, new: torch.Tensor) -> bytes:
    """Return the payload that leads from `old` to `new`, of one dtype and shape."""
    return compress((tensor_bytes(old).numpy() ^ tensor_bytes(new).numpy()).data)


def encode_overwrite(old: torch.Tensor, new: torch.Tensor) -> bytes:
    """Return the payload that leads from `old` to `new`.  Raises `WeightRequestError` for a tensor of 4 GiB or more."""
    before, after = tensor_bytes(old).numpy(), tensor_bytes(new).numpy()
    if after.size >= _MAX_POSITIONS:
        raise WeightRequestError(f"overwrite cannot describe a tensor of {after.size} bytes")
    positions = np.flatnonzero(before != after)
    count = np.array([positions.size], dtype="<u4")
    return compress(count.tobytes() + positions.astype("<u4").tobytes() + after[positions].tobytes())


def apply_xor(payload: bytes, base: torch.Tensor) -> torch.Tensor:
    """Return a new tensor in host memory.  Raises `ContentError`."""
    old = tensor_bytes(base).numpy()
    difference = np.frombuffer(decompress_exactly(payload, old.size, "xor delta"), dtype=np.uint8)
    return _as(old ^ difference, base)


def apply_overwrite(payload: bytes, base: torch.Tensor) -> torch.Tensor:
    """Return a new tensor in host memory.  Raises `ContentError`."""
    old = tensor_bytes(base).numpy()
    limit = _NUMBER_BYTES + old.size * (_NUMBER_BYTES + 1)
    content = np.frombuffer(decompress(payload, limit, "overwrite delta"), dtype=np.uint8)
    if content.size < _NUMBER_BYTES:
        raise ContentError(f"overwrite delta: {content.size} bytes do not hold its header")
    count = int(content[:_NUMBER_BYTES].view("<u4")[0])
    values_start = _NUMBER_BYTES * (1 + count)
    if content.size != values_start + count:
        raise ContentError(f"overwrite delta: {count} changed bytes do not fit into {content.size} bytes")
    positions = content[_NUMBER_BYTES:values_start].view("<u4").astype(np.int64)
    if count and (int(positions[-1]) >= old.size or (np.diff(positions) <= 0).any()):
        raise ContentError(f"overwrite delta: positions do not ascend inside a tensor of {old.size} bytes")
    new = old.copy()
    new[positions] = content[values_start:]
    return _as(new, base)


ENCODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], bytes]] = {
    "xor": encode_xor,
    "overwrite": encode_overwrite,
}
APPLIERS: dict[str, Callable[[bytes, torch.Tensor], torch.Tensor]] = {
    "xor": apply_xor,
    "overwrite": apply_overwrite,
}


def _as(content: np.ndarray, base: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(content).view(base.dtype).view(base.shape)
