"""zstd with caps: nothing is allocated before it is known to be allowed."""

from __future__ import annotations

import zstandard

from weight_sync.errors import ContentError

_MAX_WINDOW_BYTES = 128 << 20
_CHUNK_BYTES = 1 << 20


def compress(data: bytes | memoryview, level: int = 1) -> bytes:
    """Return one zstd frame that states its content's size and carries a checksum of it."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


def decompress(data: bytes | memoryview, limit: int, what: str) -> bytes:
    """Return the content of one zstd frame.  Raises `ContentError` for anything else, or more than `limit` bytes of
    content.

    `what`: a name of the content for the message.
    """
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        if stated != zstandard.CONTENTSIZE_UNKNOWN:
            if stated > limit:
                raise ContentError(f"{what}: unpacks to {stated} bytes, at most {limit} are valid")
            content = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompress(data)
        else:
            content = _decompress_unstated(data, limit, what)
    except zstandard.ZstdError as error:
        raise ContentError(f"{what}: not a whole zstd frame ({error})") from None
    return content


def decompress_exactly(data: bytes | memoryview, nbytes: int, what: str) -> bytes:
    """Return the content as `decompress` does, of exactly `nbytes`."""
    content = decompress(data, nbytes, what)
    if len(content) != nbytes:
        raise ContentError(f"{what}: {len(content)} bytes when unpacked, expected {nbytes}")
    return content


class Unpacker:
    """The content of one zstd frame, taken part by part: no more than a part is held, and a window of the frame's."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._what = what
        self._reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(data)

    def take(self, nbytes: int) -> bytes:
        """Return the next `nbytes`.  Raises `ContentError` for a frame that is damaged, or that ends before."""
        content = self._read(nbytes)
        if len(content) != nbytes:
            raise ContentError(f"{self._what}: it is cut short: {nbytes - len(content)} unpacked bytes are missing")
        return content

    def finish(self) -> None:
        """Raise `ContentError` if the frame has more content."""
        if self._read(1):
            raise ContentError(f"{self._what}: it unpacks to more bytes than its tensors have")

    def _read(self, nbytes: int) -> bytes:
        content = bytearray()
        try:
            while len(content) < nbytes and (chunk := self._reader.read(nbytes - len(content))):
                content += chunk
        except zstandard.ZstdError as error:
            raise ContentError(f"{self._what}: not a whole zstd frame ({error})") from None
        return bytes(content)


def _decompress_unstated(data: bytes | memoryview, limit: int, what: str) -> bytes:
    content = bytearray()
    unpacker = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    with unpacker.stream_reader(data) as reader:
        while chunk := reader.read(_CHUNK_BYTES):
            content += chunk
            if len(content) > limit:
                raise ContentError(f"{what}: more than {limit} bytes when unpacked")
    return bytes(content)
