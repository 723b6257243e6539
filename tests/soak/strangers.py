"""Strangers: other clients that reach the server, and pause, continue, flush, begin, end and abort as they like.

All their calls are right by the protocol.  They may change the weights in force only in ways that the trainer learns
from the answers to its own calls.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

from tests.soak.calls import Calls, Ended
from tests.soak.traffic import Traffic

PAUSE_MODES = ("abort", "retract", "in_place")
MAX_CONTINUES = 20


class Strangers:
    """A thread that meddles about every `every_s` seconds, until `stop`."""

    def __init__(self, calls: Calls, traffic: Traffic, every_s: float, seed: int) -> None:
        self._calls = calls
        self._traffic = traffic
        self._every_s = every_s
        self._rng = random.Random(f"{seed}/strangers")
        self._go = threading.Event()
        self._over = threading.Event()
        self._busy = threading.Lock()
        self._last = 0.0
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._meddle, daemon=True)
        self._thread.start()

    def go(self) -> None:
        self._go.set()

    def hold(self) -> None:
        """Stop meddling, and wait until nothing that a stranger paused or began is left."""
        self._go.clear()
        with self._busy:
            pass

    def stop(self) -> None:
        self._over.set()
        self._go.set()
        self._thread.join(60)

    def meddled(self, since: float) -> bool:
        """Return whether a stranger did something since then (`time.monotonic()`), or is about to."""
        return self._last >= since or self._busy.locked()

    def _meddle(self) -> None:
        deeds: list[tuple[int, str, Callable[[], None]]] = [
            (6, "pause", self._pause),
            (2, "pause twice", self._pause_twice),
            (2, "continue", lambda: self._calls.post("/continue_generation") and None),
            (3, "flush", lambda: self._calls.post("/flush_cache") and None),
            (2, "begin", self._begin),
            (2, "end", lambda: self._calls.post("/end_weight_update") and None),
            (2, "abort the update", lambda: self._calls.post("/abort_weight_update") and None),
            (2, "a bucket of an unknown update", self._bucket),
            (1, "abort all", self._abort_all),
        ]
        while not self._over.wait(self._rng.uniform(0.5, 1.5) * self._every_s):
            self._go.wait()
            with self._busy:
                if self._over.is_set() or not self._go.is_set():
                    continue
                _, name, deed = self._rng.choices(deeds, [weight for weight, _, _ in deeds])[0]
                try:
                    deed()
                    self.counts[name] += 1
                except Ended:
                    pass  # noted
                self._last = time.monotonic()

    def _pause(self, times: int = 1) -> None:
        for _ in range(times):
            mode = self._rng.choice(PAUSE_MODES)
            if mode == "abort":
                with self._traffic.aborting_all():
                    self._calls.post("/pause_generation", {"mode": mode})
            else:
                self._calls.post("/pause_generation", {"mode": mode})
            time.sleep(self._rng.uniform(0.0, 0.4))
        resume(self._calls)

    def _pause_twice(self) -> None:
        self._pause(2)

    def _begin(self) -> None:
        """Begin an update of its own, and give it up."""
        name = f"stranger-{self._rng.random()}"
        if (
            self._calls.post("/begin_weight_update", {"weight_version": "stranger", "update_id": name}).status_code
            == 200
        ):
            time.sleep(self._rng.uniform(0.0, 0.3))
            self._calls.post("/abort_weight_update", {"update_id": name})

    def _bucket(self) -> None:
        """Send a bucket of an update that was never begun: the server must refuse it, even if an update is open."""
        body = {
            "update_id": f"never-{self._rng.random()}",
            "format": "safetensors",
            "serialized_named_tensors": ["AAAA"],
        }
        if self._calls.post("/update_weights_from_tensor", body).status_code < 400:
            self._calls.complain("a bucket of an update that was never begun was taken")

    def _abort_all(self) -> None:
        with self._traffic.aborting_all():
            self._calls.post("/abort_request", {"abort_all": True})


def resume(calls: Calls) -> None:
    """End a pause of any client.  The server may refuse once to report a loss, or because it is too early."""
    for _ in range(MAX_CONTINUES):
        if calls.post("/continue_generation").status_code == 200:
            return
        time.sleep(0.02)
    calls.complain(f"/continue_generation was refused {MAX_CONTINUES} times")
