"""Access control: the keys of `--api-key` and `--admin-api-key`, and, where no key is asked for, the calling web page.

An ASGI middleware, so that it also stands before streams and unknown paths.

A browser on this machine takes a request of any page to a server without a key.  What such a request has:

    Sec-Fetch-Site: cross-site     another site's link, image, form or script
    Origin: http://other           the same, of a form or script
    Host: other                    a name that its owner made to resolve to this machine (DNS rebinding)
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.core.args.server_args import ServerArgs
from rollout.http.io import json_response
from rollout.http.turns import Turns
from rollout.http.web_page import Page

OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/ready", "/liveness", "/ping", "/metrics", "/dashboard"})


class KeyMiddleware:
    """Refuses with 401 what does not carry the right `Authorization: Bearer KEY`, with 403 what a page of another site
    sends where no key is asked for, and with 503 what comes over one connection too many, unless it is control.

    With an admin key, control paths take that key and no other; without one they take the API key.  `OPEN_PATHS` take
    anything.  What passes takes its turn, but for control and what is open.  `asking_pages`: what a 401 is instead of
    JSON, by path: a page that asks for the key, as a browser cannot send one when it opens a page.
    """

    def __init__(
        self, app: ASGIApp, *, args: ServerArgs, control_paths: Collection[str], asking_pages: Mapping[str, Page]
    ) -> None:
        self._app = app
        self._asking_pages = asking_pages
        self._api_key = args.api_key
        self._admin_api_key = args.admin_api_key
        self._control_paths = frozenset(control_paths)
        self._goes_first = self._control_paths | OPEN_PATHS
        self._sites = SiteCheck(args)
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            if scope["path"] not in self._goes_first:
                await self._turns.take()
            await self._app(scope, receive, send)
            return
        status, kind, message = refusal
        response = json_response({"error": {"type": kind, "message": message}}, status)
        if status == 401 and scope["method"] == "GET" and scope["path"] in self._asking_pages:
            response = self._asking_pages[scope["path"]].response(status)
        if status == 503:
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        path = scope["path"]
        if path in OPEN_PATHS:
            return None
        is_over_limit = scope.get("state", {}).get("is_over_limit")
        if is_over_limit is not None and is_over_limit() and path not in self._control_paths:
            return 503, "Unavailable", "too many connections are open"
        headers = dict(scope["headers"])
        wanted = self._api_key
        if self._admin_api_key is not None and path in self._control_paths:
            wanted = self._admin_api_key
        if wanted is None:
            reason = self._sites.objection(headers)
            return None if reason is None else (403, "Forbidden", reason)
        if _same(_bearer(headers), wanted):
            return None
        return 401, "Unauthorized", "missing or wrong key: Authorization: Bearer KEY"


class SiteCheck:
    """The check that a request does not come from a page of another site.

    Names by which this server is known: addresses, names without a dot (of the local network only), `--host`,
    `--allowed-hosts`.  A server that listens beyond this machine may have others; there, without `--allowed-hosts`,
    only requests with an `Origin` are held to them.
    """

    def __init__(self, args: ServerArgs) -> None:
        given = [name.strip().lower() for name in (args.allowed_hosts or "").split(",") if name.strip()]
        self._allowed = frozenset(given)
        self._names = self._allowed | {args.host.lower()}
        self._any = "*" in given
        self._is_strict = bool(given) or args.is_local

    def objection(self, headers: dict[bytes, bytes]) -> str | None:
        """Return why a request with these headers is refused, or None."""
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin:
            authority = origin.partition("://")[2]
            is_own = authority.lower() == host.lower() and self._knows(host)
            if not is_own and _name(authority) not in self._allowed:
                return f"pages of {origin!r} may not call this server (--allowed-hosts)"
        elif headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            return "pages of other sites may not call this server"
        if self._is_strict and host and not self._knows(host):
            return f"{host!r} is not a name of this server (--allowed-hosts)"
        return None

    def _knows(self, authority: str) -> bool:
        name = _name(authority)
        return self._any or name in self._names or "." not in name or _is_address(name)


def _name(authority: str) -> str:
    """`localhost:80` -> `localhost`, `[::1]:80` -> `::1`."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bearer(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _same(given: bytes, wanted: str) -> bool:
    """Compare in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, wanted.encode())
