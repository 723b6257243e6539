"""`HeldMemory`: what an update takes beside the model, and how it goes back without a step that waits for it.

Knows memory.  Does not know what an update is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from weight_sync.errors import StagingError
from weight_sync.receivers.distributed import ReceiveMemory


class HeldMemory:
    """`receive`: for messages, kept from call to call of one update."""

    def __init__(self) -> None:
        self.receive = ReceiveMemory()
        self._closing: threading.Thread | None = None

    def let_go(self, close: Callable[[], None]) -> None:
        """Call `close` on a thread of its own: a second copy of the weights takes a while to go back to the system."""

        def run() -> None:
            close()
            self.receive.close()

        self._closing = threading.Thread(target=run, name="weight-close", daemon=True)
        self._closing.start()

    def await_gone(self, timeout_s: float) -> None:
        """Before anything is taken again: never two copies at once.  Raises `StagingError`."""
        if self._closing is not None:
            self._closing.join(timeout_s)
            if self._closing.is_alive():
                raise StagingError("the memory of the weight update before is still being given back")
            self._closing = None
