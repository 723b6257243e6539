"""The addresses that settings may name: of a host, of a rendezvous, of a router."""

from __future__ import annotations

import importlib
import ipaddress
from urllib.parse import urlsplit


def is_address(text: str | None) -> bool:
    host, colon, port = (text or "").rpartition(":")
    return bool(host and colon) and port.isdigit() and 1 <= int(port) <= 65535


def objection_to_base_url(text: str) -> str | None:
    """Return why paths cannot be appended to `text` and called; None if they can."""
    httpx = importlib.import_module("httpx")  # a third of the time of `lockstep serve --help`, which needs no URL
    try:
        parts, url = urlsplit(text), httpx.URL(text)
        url.raw_host.decode().encode("idna")  # as the resolver does
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL) as error:
        return str(error)
    if not is_whole:
        return "scheme, host or port is missing"
    return "nothing may follow the path" if parts.query or parts.fragment else None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
