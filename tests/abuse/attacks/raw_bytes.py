"""Bytes that are not HTTP, or almost HTTP."""

from __future__ import annotations

from tests.abuse.registry import KEYED, OPEN, attack
from tests.abuse.server import Victim
from tests.abuse.wire import connect, send, status_of

HOST = b"Host: 127.0.0.1\r\n"
WRONG = [
    b"\r\n\r\n\r\n", b"\x00" * 1000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 600,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"G" * 200_000,
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nA: " + b"b" * 500_000 + b"\r\n\r\n", b"GET /health HTTP/1.1\r\n: \r\n\r\n",
    b"GET /health HTTP/1.1\r\nA\x00B: c\r\n\r\n", b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\n" + HOST + b"\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Length: -5\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n{}",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /abort_request HTTP/1.1\r\n" + HOST + b"Expect: 200-maybe\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n" * 20 + b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n" * 20,
    b"{}", "é\ud7ff".encode() * 100,
]  # fmt: skip


@attack(OPEN, KEYED, seconds=60.0, quick=True)
def bytes_that_are_no_http(victim: Victim) -> str:
    """Send broken request lines, headers, lengths and chunks: the server refuses them or closes the connection."""
    for data in WRONG:
        one = connect(victim)
        try:
            send(one, data)
            status = status_of(one, 0.3)
            victim.statuses[status or 0] += 1
            if status is not None and status >= 500 and status not in victim.named:
                victim.complain(f"{data[:60]!r}: {status}")
        finally:
            one.close()
    return f"{len(WRONG)} kinds"


@attack(OPEN, seconds=60.0)
def a_thousand_requests_in_one_packet(victim: Victim) -> str:
    """Send a thousand pipelined requests, read almost no answer, and cut the connection."""
    for path in ("health", "server_info", "openapi.json"):
        one = connect(victim)
        send(one, (b"GET /" + path.encode() + b" HTTP/1.1\r\n" + HOST + b"\r\n") * 1000)
        status_of(one, 0.5)
        one.close()
    return "3000 requests"
