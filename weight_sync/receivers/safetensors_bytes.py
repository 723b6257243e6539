"""Receives tensors as one safetensors file in memory: the bytes in the call itself, or in shared memory by name.

The form without pickle.  Each tensor is a view of the call's bytes, or read once from shared memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.receivers.base import BucketSource
from weight_sync.safetensors_file import parse_header
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import (
    InlineStorage,
    SegmentStorage,
    Storage,
    StoredTensor,
    check_total,
    contiguous_place,
    name_tensor,
    read_in_parts,
)
from weight_sync.tensor_meta import TensorMeta

MAX_HEADER_BYTES = 16 << 20
UNLINK_PREFIX = "lockstep_"
"""Of names that a call may have removed: other shared memory of this machine is none of its business."""


class SafetensorsSource(BucketSource):
    """One call's tensors: `content` is the file, or the segment that holds it.

    A segment is read and left alone; with `unlink` its name, which must begin with `UNLINK_PREFIX`, is removed once it
    is read, or refused after it was found to be a safetensors file.
    """

    def __init__(self, content: bytearray | SharedSegment, *, unlink: bool = False) -> None:
        self._content = content
        self._tensors: Sequence[StoredTensor] = ()
        self._unlink = unlink
        self._release: Callable[[], object] = _nothing

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Every tensor of the file.  Raises `WeightRequestError`."""
        tensors = self._parse()
        try:
            check_total(tensors, max_bytes)
        except WeightRequestError:
            self._release()
            raise
        self._tensors = tensors
        return [tensor.meta for tensor in tensors]

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        """A few tensors a bucket.

        Raises `ContentError` (shared memory ends early), `WeightRequestError` (it is gone).
        """
        try:
            yield from read_in_parts(self._tensors)
        finally:
            self._tensors = ()
            self._release()

    def refuse(self, reason: str) -> None:
        """The call failed: remove the segment's name now if that was asked for."""
        self._tensors = ()
        if self._unlink and self._release is _nothing:
            with suppress(WeightRequestError):
                self._parse()
        self._release()

    def _parse(self) -> Sequence[StoredTensor]:
        storage = self._storage()
        header = parse_header(
            "safetensors", storage.nbytes, lambda start, n: storage.read(start, start + n), MAX_HEADER_BYTES
        )
        tensors = [
            name_tensor(meta.name, contiguous_place(storage, meta.dtype, meta.shape, start))
            for meta, start in ((tensor.meta, tensor.start) for tensor in header.tensors)
        ]
        if self._unlink and isinstance(self._content, SharedSegment):
            self._release = weakref.finalize(self, self._content.unlink)
        return tensors

    def _storage(self) -> Storage:
        if not isinstance(self._content, SharedSegment):
            return InlineStorage(memoryview(self._content))
        name = self._content.name
        if self._unlink and not name.removeprefix("/").startswith(UNLINK_PREFIX):
            raise WeightRequestError(f"shm_unlink is for names that begin with {UNLINK_PREFIX!r}, not {name[:200]!r}")
        self._content.check()
        return SegmentStorage(self._content)


def _nothing() -> None:
    """What is let go where nothing is held."""
