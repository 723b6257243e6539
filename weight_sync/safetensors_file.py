"""Safetensors: the one reader of headers, and files on disk whose content is read by plain reads.

    8 bytes: length n of the header | n bytes: JSON {name: {dtype, shape, data_offsets}} | content, without gaps

The header is read here and not by the `safetensors` package, which maps files into memory (a mapped file that another
process truncates kills the reader, a plain read returns an error) and copies every tensor out of bytes.  What the
package writes is accepted; the tests compare the two on right and wrong files.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from weight_sync.errors import ContentError, TransportError, WeightRequestError
from weight_sync.fp8_blocks import SCALE_SUFFIX
from weight_sync.tensor_meta import TensorMeta, dtype_name, parse_meta

MAX_HEADER_BYTES = 100_000_000  # what the safetensors package takes
_LENGTH = struct.Struct("<Q")
_MAX_OFFSET = 2**63

# As headers of safetensors files spell them.
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file; `start`: its first byte, counted from the beginning of the file."""

    meta: TensorMeta
    start: int

    @property
    def end(self) -> int:
        """The byte behind its last."""
        return self.start + self.meta.nbytes


class FileStamp(NamedTuple):
    """Changes whenever a file is written or replaced; times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStamp:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class Header:
    """A parsed header: `tensors` in the order of their content, `metadata` as it is, `content_start` in bytes."""

    tensors: tuple[FileTensor, ...]
    metadata: dict[str, str]
    content_start: int


@dataclass(frozen=True)
class SafetensorsFile(Header):
    """A file of `nbytes`."""

    path: Path
    nbytes: int

    @property
    def metas(self) -> list[TensorMeta]:
        return [tensor.meta for tensor in self.tensors]


@dataclass(frozen=True)
class RawHeader:
    """The header of a file, read and not parsed; `stamp`: of the file that was read."""

    path: Path
    stamp: FileStamp
    content: bytes

    @property
    def digest(self) -> bytes:
        """The digest of all that `parse` depends on, but for the path."""
        return hashlib.sha256(self.stamp.size.to_bytes(8, "little") + self.content).digest()

    def parse(self) -> SafetensorsFile:
        """Parse and check the header.  Raises `ContentError`."""
        header = parse_text(str(self.path), self.stamp.size, self.content)
        return SafetensorsFile(header.tensors, header.metadata, header.content_start, self.path, self.stamp.size)


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open the file for reading; anything but a regular file is refused, as it could be waited on for ever.

    Raises `WeightRequestError` when it is missing or not a file, `TransportError` when it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WeightRequestError(f"{path} is missing") from None
    except OSError as error:
        raise TransportError(f"{path} cannot be opened: {error.strerror}") from None
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WeightRequestError(f"{path} is not a file")
        yield file


def read_small(path: Path, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes.  Raises as `open_regular`, `ContentError` for a larger one."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ContentError(f"{path} has {size} bytes; the limit is {limit}")
        return read_at(file, path, 0, size).numpy().tobytes()


def read_at(file: BinaryIO, path: Path, start: int, nbytes: int) -> torch.Tensor:
    """Read bytes of a file as uint8 [nbytes].  Raises as `read_into`."""
    content = torch.empty(nbytes, dtype=torch.uint8)
    read_into(file, path, start, content)
    return content


def read_into(file: BinaryIO, path: Path, start: int, content: torch.Tensor) -> None:
    """Fill `content`, uint8 [nbytes], from byte `start` of a file on.

    Raises `ContentError` if the file ends before, `TransportError`.
    """
    view, done, nbytes = content.numpy().data, 0, content.numel()
    try:
        file.seek(start)
        while done < nbytes:
            count = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise ContentError(f"{path} ends at byte {start + done}, expected {start + nbytes}")
            done += count
    except OSError as error:
        raise TransportError(f"{path} cannot be read: {error.strerror}") from None


def read_tensor(file: BinaryIO, path: Path, tensor: FileTensor) -> torch.Tensor:
    """Read one tensor into host memory.  Raises as `read_at`."""
    content = read_at(file, path, tensor.start, tensor.meta.nbytes)
    return content.view(tensor.meta.dtype).view(tensor.meta.shape)


def read_raw_header(path: Path) -> RawHeader:
    """Read the header.  Raises as `open_regular`, and `ContentError` for a damaged or shortened file."""
    with open_regular(path) as file:
        stamp = FileStamp.of(os.fstat(file.fileno()))
        content = header_text(
            str(path), stamp.size, lambda start, nbytes: read_at(file, path, start, nbytes), MAX_HEADER_BYTES
        )
    return RawHeader(path, stamp, content)


def read_header(path: Path) -> SafetensorsFile:
    """Read and check the header.  Raises as `read_raw_header`."""
    return read_raw_header(path).parse()


def header_text(where: str, nbytes: int, read: Callable[[int, int], torch.Tensor], max_header_bytes: int) -> bytes:
    """Return the JSON of the header of `nbytes` bytes; `read(start, count)` gives some of them, uint8.

    `where` they are, for messages.  Raises `ContentError`.
    """
    if nbytes < _LENGTH.size:
        raise ContentError(f"{where} is not a safetensors file: it has {nbytes} bytes")
    (length,) = _LENGTH.unpack(read(0, _LENGTH.size).numpy().tobytes())
    if length > max_header_bytes or length > nbytes - _LENGTH.size:
        raise ContentError(f"{where} is not a safetensors file, or cut short: {nbytes} bytes, a header of {length}")
    return read(_LENGTH.size, length).numpy().tobytes()


def parse_text(where: str, nbytes: int, text: bytes) -> Header:
    """Parse the JSON of a header of `nbytes` bytes in all.  Raises `ContentError`."""
    header = _parse_json(where, text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ContentError(f"{where}: __metadata__ must map text to text")
    start = _LENGTH.size + len(text)
    tensors, position = [], 0
    for (begin, end), name in sorted((_extent(where, name, entry), name) for name, entry in header.items()):
        meta = _meta(where, name, header[name])
        if begin != position or end - begin != meta.nbytes:
            raise ContentError(
                f"{where}: {name[:200]!r} of {dtype_name(meta.dtype)} {list(meta.shape)} cannot lie at {begin} to {end}"
            )
        tensors.append(FileTensor(meta, start + begin))
        position = end
    if start + position != nbytes:
        raise ContentError(f"{where} has {nbytes} bytes, but its header describes {start + position}")
    return Header(tuple(tensors), metadata, start)


def _parse_json(where: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"{where}: the header is not JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise ContentError(f"{where}: the header is not an object")
    return header


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object in which no name comes twice, for `json.loads`.  Raises `ValueError`."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("it holds a name twice")
    return result


def _extent(where: str, name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(number) is not int for number in offsets):
        raise ContentError(f"{where}: {name[:200]!r} has no data_offsets")
    if not 0 <= offsets[0] <= offsets[1] < _MAX_OFFSET:
        raise ContentError(f"{where}: {name[:200]!r} has data_offsets out of order or out of range")
    return offsets[0], offsets[1]


def _meta(where: str, name: str, entry: dict[str, Any]) -> TensorMeta:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    try:
        if dtype == "F8_E8M0" and name.endswith(SCALE_SUFFIX) and isinstance(shape, list):
            return parse_meta(name, "uint8", shape)._replace(dtype=torch.float8_e8m0fnu)
        if not isinstance(dtype, str) or dtype not in _DTYPES or not isinstance(shape, list):
            raise WeightRequestError("one of them is missing or unknown")
        return parse_meta(name, dtype_name(_DTYPES[dtype]), shape)
    except WeightRequestError:
        described = f"dtype {str(dtype)[:64]!r} and shape {str(shape)[:64]}"
        raise ContentError(f"{where}: {name[:200]!r} has {described}") from None
