"""Heads of requests of the usual form, and the first lines of answers."""

from __future__ import annotations

import re

from uvicorn.protocols.http.h11_impl import STATUS_PHRASES

MAX_LENGTH_DIGITS = 15
# The characters of a path, of a name and of a value are h11's, but for bytes over 126 in values.
_REQUEST_LINE = re.compile(rb"(GET|POST|PUT|DELETE) (/[!-~]*) HTTP/1\.1")
_NAME = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_OTHER_BYTE = re.compile(rb"[^\t\r\n -~]")
_RULED = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
"""Headers with a meaning that only h11 knows."""
HEAD_LINES = {status: b"HTTP/1.1 %d %b\r\n" % (status, phrase) for status, phrase in STATUS_PHRASES.items()}

Headers = list[tuple[bytes, bytes]]


def read_head(head: bytes) -> tuple[bytes, bytes, Headers, int] | None:
    """Return method, target, headers with names in small letters, and the length of the body; None for other forms."""
    first, *lines = head.split(b"\r\n")
    request = _REQUEST_LINE.fullmatch(first)
    is_plain = _OTHER_BYTE.search(head) is None and head.count(b"\r") == head.count(b"\n") == len(lines)
    if request is None or not is_plain:
        return None
    headers: Headers = []
    length, num_hosts = None, 0
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or _NAME.fullmatch(name) is None:
            return None
        name, value = name.lower(), value.strip(b" \t")
        if name == b"host":
            num_hosts += 1
        elif name == b"content-length":
            if length is not None or not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
                return None
            length = int(value)
        elif name in _RULED or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        headers.append((name, value))
    return (request[1], request[2], headers, length or 0) if num_hosts == 1 else None
