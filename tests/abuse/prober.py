"""Asks /health twenty times a second for as long as the suite runs, from a process of its own.

The delay of an answer counts from when its question was due.  So a server that stands still for two seconds is late
for forty questions, not for one.  Needs the standard library only, so that it starts at once.
"""

from __future__ import annotations

import http.client
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

EVERY_S = 0.05
GIVE_UP_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One probe: when it was due (CLOCK_MONOTONIC), the seconds until its answer, and why it failed."""

    due: float
    seconds: float
    failed: str | None


class Prober:
    """The probing process, and the samples that came so far."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_probe, args=(port, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._samples: list[Sample] = []

    def since(self, when: float) -> list[Sample]:
        """Wait for the sample that is due now, and return all that were due after `when`."""
        now = time.monotonic()
        while not self._samples or self._samples[-1].due < now:
            if not self._pipe.poll(GIVE_UP_S + 1.0):
                break
            try:
                self._samples.append(Sample(*self._pipe.recv()))
            except EOFError:
                break
        return [sample for sample in self._samples if sample.due >= when]

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def percentile(samples: list[Sample], share: float) -> float:
    """Return the delay in seconds that a `share` of the samples does not exceed; 0 without samples."""
    seconds = sorted(sample.seconds for sample in samples)
    return seconds[min(len(seconds) - 1, int(share * len(seconds)))] if seconds else 0.0


def _probe(port: int, pipe: Connection) -> None:
    """Ask again and again over one connection, as a router does, and connect anew when it is lost."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
    due = time.monotonic()
    while True:
        failed = None
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            if response.status not in (200, 503):  # 503: poisoned, as some attacks may
                failed = f"status {response.status}"
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            failed = f"{type(error).__name__}: {error}"
        now = time.monotonic()
        try:
            pipe.send((due, now - due, failed))
            while (due := due + EVERY_S) < now:  # this answer counts for all probes that were due meanwhile
                pipe.send((due, now - due, failed))
        except OSError:
            return
        time.sleep(max(0.0, due - time.monotonic()))
