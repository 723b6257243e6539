"""Memory that an update takes in addition to the model, released after it or kept for the next one.

The first touch of fresh memory costs more than everything else that is done with it, so an engine that is refreshed
often keeps it.  No step waits for its release.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from weight_sync.errors import StagingError
from weight_sync.pages import new_area

_MIN_REGISTERED_BYTES = 1 << 20


class Areas:
    """Memory by key, with any content, kept from one use to the next.  `keep`: also when an update ends."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._areas: dict[int, torch.Tensor] = {}
        self._knower: Hashable = None
        self._known: dict[int, Any] = {}

    def take(
        self, key: int, num_bytes: int, device: torch.device | str, *, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return an area, uint8 [num_bytes]; the same as before if that will do.  Of one user at a time.

        `like`: what will be exchanged with it.
        """
        device = torch.device(device)
        area = self._areas.get(key)
        if area is None or area.numel() < num_bytes or area.device.type != device.type:
            self._areas.pop(key, None)
            self._known.pop(key, None)
            area = self._areas[key] = _new_bytes(num_bytes, device, like)
        return area[:num_bytes]

    def known_to(self, user: Hashable) -> dict[int, Any]:
        """Return what `user` has put here by key: of areas that stayed, and since no other user asked."""
        if user != self._knower:
            self._knower = user
            self._known.clear()
        return self._known

    def end(self) -> None:
        """End the update."""
        if not self._keep:
            self.close()

    def close(self) -> None:
        """Release everything; none of it may be in use."""
        self._knower = None
        self._known.clear()
        self._areas.clear()


class HeldMemory:
    """`receive`: for messages; `shadows`: for staging.  `keep`: both are kept from update to update."""

    def __init__(self, *, keep: bool = False) -> None:
        self.receive = Areas(keep=keep)
        self.shadows = Areas(keep=keep)
        self._closing: threading.Thread | None = None

    def release_in_background(self, close: Callable[[], None]) -> None:
        """Call `close` on a thread of its own: releasing a second copy of the weights takes a while.

        Where no thread can be started it is called at once.
        """

        def run() -> None:
            close()
            self.end()

        closing = threading.Thread(target=run, name="weight-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # no thread can be started: the commit stands all the same
            run()
        else:
            self._closing = closing

    def end(self) -> None:
        """Note that no update is open any more."""
        self.shadows.end()
        self.receive.end()

    def release(self, timeout_s: float) -> None:
        """Release everything, kept or not, while no update is open.  Raises `StagingError`."""
        self.await_release(timeout_s)
        self.shadows.close()
        self.receive.close()

    def await_release(self, timeout_s: float) -> None:
        """Wait for the last release, before memory is taken again: never two copies at once.  Raises `StagingError`."""
        if self._closing is not None:
            self._closing.join(timeout_s)
            if self._closing.is_alive():
                raise StagingError("the memory of the previous weight update is still being released; try again")
            self._closing = None


def _new_bytes(num_bytes: int, device: torch.device, like: torch.Tensor | None) -> torch.Tensor:
    is_beside_device = like is not None and not like.is_cpu
    if device.type == "cpu" and not is_beside_device:
        return new_area(num_bytes, at=0 if like is None else like.data_ptr())
    if device.type == "cpu" and like is not None and like.is_cuda:
        return pinned_area(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def pinned_area(num_bytes: int) -> torch.Tensor:
    """Return host memory that a CUDA device reaches next to other work, uint8 [num_bytes]; it goes with its last view.

    torch's own pinned memory takes the next power of two, and is kept by torch for ever.  It is taken for small areas,
    and where the driver registers no memory of others.
    """
    if num_bytes >= _MIN_REGISTERED_BYTES:
        area, cudart = new_area(num_bytes), torch.cuda.cudart()
        if int(cudart.cudaHostRegister(area.data_ptr(), num_bytes, 0)) == 0:
            content = (ctypes.c_ubyte * num_bytes).from_address(area.data_ptr())
            weakref.finalize(content, _unregister, cudart, area).atexit = False
            return torch.frombuffer(content, dtype=torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _unregister(cudart: Any, area: torch.Tensor) -> None:
    """Unregister the area before it goes; this call holds it."""
    cudart.cudaHostUnregister(area.data_ptr())
