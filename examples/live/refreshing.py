"""The trainer's link to the server that it refreshes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lockstep_rl import Client, WeightSender


@contextlib.contextmanager
def connected_sender(url: str) -> Iterator[WeightSender]:
    """Yield a sender that shares a group with the server; both leave it in the end, also amid a refresh."""
    with Client(url) as client:
        sender = WeightSender(client)
        sender.connect()
        try:
            yield sender
        finally:
            sender.close()
