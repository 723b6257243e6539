"""`HeldMemory`: what an update takes beside the model, and whether it goes back or stays for the next one.

The first touch of fresh memory costs more than everything else that is done with it, so whoever refreshes often keeps
it.  Where it goes back, no step waits for it.

Knows memory.  Does not know what an update is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from weight_sync.errors import StagingError
from weight_sync.pages import new_area
from weight_sync.receivers.distributed import ReceiveMemory


class ShadowMemory:
    """Areas as large as storages of the model, by their addresses, which never change.

    `keep`: areas stay when an update ends, until `give_back`.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._areas: dict[int, torch.Tensor] = {}

    def take(self, live: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Memory for a shadow of `live`, uint8 [bytes], on `device`, with any content; of one update at a time."""
        area = self._areas.get(live.data_ptr())
        if area is None or area.numel() != live.numel() or area.device.type != device.type:
            area = self._areas[live.data_ptr()] = _new_bytes(live, device)
        return area

    def end(self) -> None:
        """The update is over."""
        if not self._keep:
            self.give_back()

    def give_back(self) -> None:
        """Nobody may have any of it in use."""
        self._areas.clear()


class HeldMemory:
    """`receive`: for messages; `shadows`: for staging.  `keep`: both are kept from update to update."""

    def __init__(self, *, keep: bool = False) -> None:
        self.receive = ReceiveMemory()
        self.shadows = ShadowMemory(keep=keep)
        self._keep = keep
        self._closing: threading.Thread | None = None

    def let_go(self, close: Callable[[], None]) -> None:
        """Call `close` on a thread of its own: a second copy of the weights takes a while to go back to the system.

        Where no thread can be started it is called at once.
        """

        def run() -> None:
            close()
            self.end()

        closing = threading.Thread(target=run, name="weight-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # there is no thread to be had: what was committed is in force all the same
            run()
        else:
            self._closing = closing

    def end(self) -> None:
        """No update is open any more."""
        self.shadows.end()
        if not self._keep:
            self.receive.close()

    def give_back(self, timeout_s: float) -> None:
        """Everything, kept or not, while no update is open.  Raises `StagingError`."""
        self.await_gone(timeout_s)
        self.shadows.give_back()
        self.receive.close()

    def await_gone(self, timeout_s: float) -> None:
        """Before anything is taken again: never two copies at once.  Raises `StagingError`."""
        if self._closing is not None:
            self._closing.join(timeout_s)
            if self._closing.is_alive():
                raise StagingError("the memory of the weight update before is still being given back")
            self._closing = None


def _new_bytes(live: torch.Tensor, device: torch.device) -> torch.Tensor:
    size = live.numel()
    if device.type == "cpu" and live.is_cpu:
        return new_area(size, at=live.data_ptr())
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu" and live.is_cuda)
