"""`ShadowStaging`: a full second copy of what a refresh touches, in the layout in which it will serve.

    write      each tensor lands in the shadow of its storage, as it would in the model
    prepare    shadow ^= live     what was not sent comes out as zero
    commit     live ^= shadow     one pass, as long as a copy: nothing is packed or unpacked any more
    undo       live ^= shadow     again; a sum of the old words, taken in `prepare`, proves that they are back

Only `commit` stalls the steps; the rest runs beside them.  Memory: the bytes of every storage that the refresh touches
(a full refresh: the model's, padding and replicas included), in host memory or on the weights' device.

Knows places and bytes.  Does not know names' meaning, coverage or versions.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from weight_sync.errors import StagingError
from weight_sync.tensor_meta import LogicalWeights, Place

_PART_BYTES = 32 << 20  # what is copied at a time from one device to another
_HUGE_FROM = 4 << 20


class ShadowStaging:
    """Staging in host memory (`mode="host"`) or on the device of the weights (`"device"`)."""

    holds_steps = False

    def __init__(self, weights: LogicalWeights, mode: Literal["host", "device"] = "host") -> None:
        self.mode = mode
        self._weights = weights
        self._shadows: dict[int, _Shadow] = {}
        self._residents: dict[int, _Residents] = {}
        self._written: set[str] = set()
        self._prepared = False
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def dirty(self) -> bool:
        return bool(self._exchanged)

    @property
    def num_bytes(self) -> int:
        return sum(shadow.live.numel() for shadow in self._shadows.values())

    def write(self, name: str, tensor: torch.Tensor) -> None:
        for place in self._weights.places(name):
            self._aside(place).write(tensor)
        self._written.add(name)

    def read(self, name: str) -> torch.Tensor:
        place = self._weights.places(name)[0]
        content = self._aside(place).read()
        return _xor_of(content, place.read()) if self._prepared else content

    def prepare(self) -> None:
        for key, shadow in self._shadows.items():
            if not shadow.is_copy:
                self._fill(key)
            shadow.fold()
        self._prepared = True

    def commit(self) -> None:
        assert self._prepared
        for shadow in self._shadows.values():
            for live, aside in shadow.parts():
                self.exchange(live, aside)
                self._exchanged.append((live, aside))

    @staticmethod
    def exchange(live: torch.Tensor, aside: torch.Tensor) -> None:
        """`live ^= aside`, int64 or uint8 [n].  One that raises has not begun; `undo` finds out if it has."""
        live.bitwise_xor_(aside.to(live.device))

    def undo(self) -> None:
        for live, aside in reversed(self._exchanged):
            self.exchange(live, aside)
        if self._prepared and any(shadow.live_sum() != shadow.old_sum for shadow in self._shadows.values()):
            raise StagingError("the sum of the restored weights is not that of the old ones")
        self.close()

    def close(self) -> None:
        self._shadows.clear()
        self._exchanged.clear()
        self._written.clear()
        self._prepared = False

    def _aside(self, place: Place) -> Place:
        """The same place in the shadow of its storage."""
        key = place.storage.untyped_storage().data_ptr()
        if key not in self._shadows:
            self._shadows[key] = self._new_shadow(key, place.storage)
        return place.over(self._shadows[key].view_like(place.storage))

    def _new_shadow(self, key: int, storage: torch.Tensor) -> _Shadow:
        if not self._residents:
            self._residents = _residents_of(self._weights)
        has_gaps = self._residents[key].num_bytes != storage.untyped_storage().nbytes()
        return _Shadow(storage, torch.device("cpu") if self.mode == "host" else storage.device, copy=has_gaps)

    def _fill(self, key: int) -> None:
        """What else lives in a storage stays as it is."""
        for name in self._residents[key].names.keys() - self._written:
            for place in self._weights.places(name):
                if place.storage.untyped_storage().data_ptr() == key:
                    self._aside(place).write(place.read())


@dataclass
class _Residents:
    """The logical tensors in one storage (as an ordered set), and the bytes that they take."""

    names: dict[str, None] = field(default_factory=dict)
    num_bytes: int = 0


def _residents_of(weights: LogicalWeights) -> dict[int, _Residents]:
    """By address of the storage."""
    residents: dict[int, _Residents] = {}
    for name, meta in weights.metas().items():
        for place in weights.places(name):
            found = residents.setdefault(place.storage.untyped_storage().data_ptr(), _Residents())
            found.names[name] = None
            found.num_bytes += meta.nbytes
    return residents


class _Shadow:
    """Bytes beside one storage.  `copy`: start from the live content, for storages with more in them than tensors."""

    def __init__(self, storage: torch.Tensor, device: torch.device, copy: bool) -> None:
        self.live = _bytes_of(storage)
        self.aside = _new_bytes(self.live, device)
        self.is_copy = copy
        self.old_sum = 0
        if copy:
            self.aside.copy_(self.live)

    def view_like(self, storage: torch.Tensor) -> torch.Tensor:
        typed = torch.empty(0, dtype=storage.dtype, device=self.aside.device)
        return typed.set_(self.aside.untyped_storage(), storage.storage_offset(), storage.size(), storage.stride())

    def fold(self) -> None:
        """`aside ^= live`, and the sum of the live words."""
        self.old_sum = 0
        for live, aside in self.parts():
            self.old_sum += int(live.sum())
            aside.bitwise_xor_(live.to(aside.device))

    def live_sum(self) -> int:
        return sum(int(live.sum()) for live, _ in self.parts())

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Both sides, int64 and, for what is left at the end, uint8; in parts only if a copy of each is needed."""
        size = self.live.numel()
        end = size // 8 * 8
        step = max(end, 1) if self.live.device == self.aside.device else _PART_BYTES
        for start in range(0, end, step):
            stop = min(start + step, end)
            yield self.live[start:stop].view(torch.int64), self.aside[start:stop].view(torch.int64)
        if end < size:
            yield self.live[end:], self.aside[end:]


def _bytes_of(storage: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage.untyped_storage())


def _new_bytes(live: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that goes back to the system with its last view, uint8 [bytes of `live`]."""
    size = live.numel()
    if device.type != "cpu" or size < _HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu" and live.is_cuda)
    area = mmap.mmap(-1, size)
    area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def _xor_of(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Bit by bit, of two tensors of one dtype and shape; on the device of `left`."""
    left_bytes = left.contiguous().view(-1).view(torch.uint8)
    right_bytes = right.contiguous().view(-1).view(torch.uint8).to(left.device)
    return (left_bytes ^ right_bytes).view(left.dtype).view(left.shape)
