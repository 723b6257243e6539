"""Requests that are begun and never ended."""

from __future__ import annotations

from tests.abuse.registry import KEYED, OPEN, attack
from tests.abuse.server import Victim
from tests.abuse.wire import closed_within, connections, send

MARGIN_S = 5.0
"""Seconds that the server may take beyond `--receive-timeout`."""
HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BEGUN = [
    b"",
    b"POST",
    b"POST /generate HTTP/1.1\r\n",
    HEAD + b"X-Slow: 1\r\n",
    HEAD + b"Content-Length: 1000\r\n\r\n",
    HEAD + b'Content-Length: 1000\r\n\r\n{"text": "',
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    HEAD + b'Transfer-Encoding: chunked\r\n\r\n9\r\n{"text":"\r\n',
    HEAD + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
]


@attack(OPEN, KEYED, seconds=120.0)
def requests_that_are_never_ended(victim: Victim) -> str:
    """Send half of a request on each of a hundred connections: the server closes them all by itself."""
    with connections(victim, 12 * len(BEGUN)) as sockets:
        for index, one in enumerate(sockets):
            send(one, BEGUN[index % len(BEGUN)])
        victim.call("GET", "/get_load", timeout=5.0)
        seconds = victim.setup.settings["receive_timeout"] + MARGIN_S
        closed = closed_within(sockets, seconds)
        if closed < len(sockets):
            victim.complain(f"{len(sockets) - closed} of {len(sockets)} are open after {seconds:g} s")
        return f"{len(sockets)} connections"
