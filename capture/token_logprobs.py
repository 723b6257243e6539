"""`TokenLogprobs`: log-probabilities of tokens and of the likeliest ones at their places, and their compact wire form.

    header, 48 bytes     magic "LSLP", version, bytes of a log-probability (4 or 8), bytes of an id (2 or 4)
                         T u64, K u32, C u32, start u64, vocabulary u32, CRC-32 of all other bytes u32, 8 zero bytes
    log-probabilities    logprobs [T], top_logprobs [T, K], chosen_logprobs [T, C]: float32, or float64
    ids                  token_ids [T], top_ids [T, K], chosen_ids [C]: uint16 up to 65536 tokens, else int32

All numbers are little-endian, one array after the other in row-major order, without gaps.  Every bit of a number
survives, NaN and infinities too.

Shapes: T tokens, K likeliest ones at each place, C ids chosen by the caller.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture.errors import LogprobFormatError, LogprobValueError

MAGIC = b"LSLP"
FORMAT_VERSION = 1
_HEADER = struct.Struct("<4sHBBQIIQII8x")
_CRC = slice(36, 40)
_B64_BYTES = 3 << 18  # encoded at once: the interpreter can turn to another thread between two such parts
_LOGPROB_DTYPES: dict[int, np.dtype] = {4: np.dtype("<f4"), 8: np.dtype("<f8")}
_ID_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """The log-probabilities of the tokens `token_ids` [T] at positions `start ..` of their sequence.

    `logprobs` [T]; `top_ids` and `top_logprobs` [T, K], best first; `chosen_logprobs` [T, C] of `chosen_ids` [C].
    Log-probabilities are float32, or float64 from an engine that computes in it; ids are uint16 up to a vocabulary of
    65536 tokens, else int32.  Raises `LogprobValueError` for other dtypes, shapes that do not fit, or ids outside the
    vocabulary.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    chosen_ids: np.ndarray
    chosen_logprobs: np.ndarray
    vocab_size: int
    start: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size < 1 << 31 or not 0 <= self.start < 1 << 48:
            raise LogprobValueError(f"vocabulary {self.vocab_size}, start {self.start}")
        if (self.logprobs.ndim, self.top_ids.ndim, self.chosen_ids.ndim) != (1, 2, 1):
            raise LogprobValueError("logprobs, top_ids and chosen_ids must be [T], [T, K] and [C]")
        (count,), (_, num_top), (num_chosen,) = self.logprobs.shape, self.top_ids.shape, self.chosen_ids.shape
        wanted = {
            "token_ids": (count,),
            "top_ids": (count, num_top),
            "top_logprobs": (count, num_top),
            "chosen_ids": (num_chosen,),
            "chosen_logprobs": (count, num_chosen),
        }
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise LogprobValueError(f"{name} has shape {list(getattr(self, name).shape)}, expected {list(shape)}")
        if self.logprobs.dtype not in _LOGPROB_DTYPES.values():
            raise LogprobValueError(f"log-probabilities must be float32 or float64, got {self.logprobs.dtype}")
        if {self.top_logprobs.dtype, self.chosen_logprobs.dtype} != {self.logprobs.dtype}:
            raise LogprobValueError("log-probabilities have different dtypes")
        for name in ("token_ids", "top_ids", "chosen_ids"):
            _check_ids(name, getattr(self, name), self.vocab_size)

    def __len__(self) -> int:
        return len(self.logprobs)

    def encode(self) -> bytes:
        """Return the record's compact form."""
        columns = [np.ascontiguousarray(column) for column in self._columns()]
        header = _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.logprobs.dtype.itemsize,
            self.top_ids.dtype.itemsize,
            len(self),
            self.top_ids.shape[1],
            len(self.chosen_ids),
            self.start,
            self.vocab_size,
            0,
        )
        content = bytearray(b"".join([header, *(column.data for column in columns if column.size)]))
        content[_CRC] = zlib.crc32(content).to_bytes(4, "little")
        return bytes(content)

    def encode_text(self) -> str:
        """Return the record's compact form in base64."""
        data = memoryview(self.encode())
        parts = [data[first : first + _B64_BYTES] for first in range(0, len(data), _B64_BYTES)]
        return b"".join([binascii.b2a_base64(part, newline=False) for part in parts]).decode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> TokenLogprobs:
        """Invert `encode`; the arrays are views of `data`, and nothing else of their size is allocated.

        Raises `LogprobFormatError` for anything but an undamaged record, `LogprobValueError` for one that holds ids
        outside its vocabulary.
        """
        if len(data) < _HEADER.size or data[:4] != MAGIC:
            raise LogprobFormatError(f"{len(data)} bytes are not a record of log-probabilities")
        _, version, value_size, id_size, count, num_top, num_chosen, start, vocab_size, crc = _HEADER.unpack_from(data)
        if version != FORMAT_VERSION:
            raise LogprobFormatError(
                f"the record of log-probabilities has version {version}; this version reads {FORMAT_VERSION}"
            )
        values, ids = _LOGPROB_DTYPES.get(value_size), _ID_DTYPES.get(id_size)
        if values is None or ids is None:
            raise LogprobFormatError(f"log-probabilities of {value_size} bytes, ids of {id_size}")
        shapes = [(count,), (count, num_top), (count, num_chosen), (count,), (count, num_top), (num_chosen,)]
        dtypes = [values] * 3 + [ids] * 3
        sizes = [math.prod(shape) for shape in shapes]
        expected = _HEADER.size + sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))
        if expected != len(data):
            raise LogprobFormatError(f"the record has {len(data)} bytes, but its header needs {expected}")
        if crc != _checksum(data):
            raise LogprobFormatError("checksum mismatch: the record of log-probabilities is damaged")
        columns, offset = [], _HEADER.size
        for shape, size, dtype in zip(shapes, sizes, dtypes, strict=True):
            columns.append(np.frombuffer(data, dtype, size, offset).reshape(shape))
            offset += size * dtype.itemsize
        logprobs, top_logprobs, chosen_logprobs, token_ids, top_ids, chosen_ids = columns
        return cls(token_ids, logprobs, top_ids, top_logprobs, chosen_ids, chosen_logprobs, vocab_size, start)

    @classmethod
    def decode_text(cls, text: Any) -> TokenLogprobs:
        """Invert `encode_text`.  Raises as `decode` does."""
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise LogprobFormatError(f"a record of log-probabilities is not base64: {error}") from None
        return cls.decode(data)

    def require(self, token_ids: Sequence[int], start: int) -> None:
        """Raise `LogprobValueError` unless the record is about the tokens `token_ids` at positions `start ..`."""
        wanted = np.asarray(token_ids, dtype=np.int64)
        if self.start != start or not np.array_equal(self.token_ids, wanted):
            raise LogprobValueError(
                f"log-probabilities of {len(self)} tokens from position {self.start} do not match the "
                f"{len(wanted)} tokens from position {start}"
            )

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (
            self.logprobs,
            self.top_logprobs,
            self.chosen_logprobs,
            self.token_ids,
            self.top_ids,
            self.chosen_ids,
        )


def token_id_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of ids in the compact form: the narrower of uint16 and int32 that fits."""
    return _ID_DTYPES[2 if vocab_size <= 1 << 16 else 4]


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.dtype != token_id_dtype(vocab_size):
        raise LogprobValueError(f"{name} has dtype {ids.dtype}, which does not fit a vocabulary of {vocab_size}")
    if ids.size and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        raise LogprobValueError(f"{name} holds ids {int(ids.min())}..{int(ids.max())}, outside 0..{vocab_size - 1}")


def _checksum(data: bytes) -> int:
    """Return the checksum over all bytes, with its own bytes taken as zeros."""
    view = memoryview(data)
    head = bytearray(view[: _HEADER.size])
    head[_CRC] = bytes(4)
    return zlib.crc32(view[_HEADER.size :], zlib.crc32(head))
