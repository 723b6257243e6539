"""`Gate`: the first middleware before the routes, so that it also stands before streams and unknown paths.

    key or site     the keys of `--api-key` and `--admin-api-key`; without a key, the web page that calls
    turn            how many requests begin in one pass of the event loop
    application     a 500 for an unexpected error, and a note of each error that it answers

A browser on this machine sends the requests of any page to a server without a key.  Marks of such a request:

    Sec-Fetch-Site: cross-site     another site's link, image, form or script
    Origin: http://other           the same, of a form or script
    Host: other                    a name that its owner made to resolve to this machine (DNS rebinding)
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.core.args.addresses import is_loopback
from rollout.core.args.server_args import ServerArgs
from rollout.http.io import error_response, json_response
from rollout.http.web_page import Page

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/ready", "/liveness", "/ping", "/metrics", "/dashboard"})
AT_ONCE = 8
"""Requests that begin in one pass of the event loop."""

Refused = Callable[[str, str, int, bytes], None]
"""Takes method, path, status and body of an error that the application answered."""


class Access:
    """Decides on a request by its path, key and site.

    It refuses with 401 a request without the right `Authorization: Bearer KEY` or `x-api-key: KEY`.  Where no key is
    asked for, it refuses with 403 a request of another site's page.  It refuses with 503 a request over one connection
    too many, unless it is control.  With an admin key, control paths take that key and no other; without one they take
    the API key.
    `OPEN_PATHS` and `page_files` take anything.
    """

    def __init__(self, args: ServerArgs, control_paths: Collection[str], page_files: Collection[str]) -> None:
        self._api_key = args.api_key
        self._admin_api_key = args.admin_api_key
        self.control_paths = frozenset(control_paths)
        self._open_paths = OPEN_PATHS | frozenset(page_files)
        self._goes_first = self.control_paths | self._open_paths
        self._sites = SiteCheck(args.host, args.allowed_hosts)

    def goes_first(self, path: str) -> bool:
        """Return whether requests of a path take no turn."""
        return path in self._goes_first

    def refusal(
        self, path: str, headers: dict[bytes, bytes], is_over_limit: Callable[[], bool] | None = None
    ) -> tuple[int, str, str] | None:
        """Return status, type and message of a request's refusal, or None.  `is_over_limit` is its connection's."""
        if path in self._open_paths:
            return None
        if is_over_limit is not None and is_over_limit() and path not in self.control_paths:
            return 503, "Unavailable", "too many connections are open"
        wanted = self._api_key
        if self._admin_api_key is not None and path in self.control_paths:
            wanted = self._admin_api_key
        if wanted is None:
            reason = self._sites.objection(headers)
            return None if reason is None else (403, "Forbidden", reason)
        if _same(_key(headers), wanted):
            return None
        return 401, "Unauthorized", "missing or wrong key: Authorization: Bearer KEY"


class Gate:
    """Refuses a request, or passes it on and watches its answer.

    A request that passes takes its turn, but for control and open paths.  `asking_pages`: by path, the page that takes
    the place of the JSON of a 401 and asks for the key: a browser cannot send one when it opens a page.

    `refused` hears of the application's errors.  It does not hear of refusals here, so that clients without a key
    cannot fill a log.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        asking_pages: Mapping[str, Page],
        refused: Refused,
    ) -> None:
        self._app = app
        self._access = access
        self._asking_pages = asking_pages
        self._refused = refused
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, is_over_limit = scope["path"], scope.get("state", {}).get("is_over_limit")
        refusal = self._access.refusal(path, dict(scope["headers"]), is_over_limit)
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)
            return
        if not self._access.goes_first(path):
            await self._turns.take()
        await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and answer an unexpected error with a 500, so that the client's connection stays open.

        Starlette's own handler raises the error again once it is answered.  The server then closes the connection, and
        the next request of a pooled client fails.
        """
        started, error_status = False, 0

        async def watched(message: Message) -> None:
            nonlocal started, error_status
            if message["type"] == "http.response.start":
                started, error_status = True, message["status"] if message["status"] >= 400 else 0
            elif error_status:
                self._refused(scope["method"], scope["path"], error_status, message.get("body", b""))
                error_status = 0  # the first part of a body is enough
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            answer = error_response(error)
            self._refused(scope["method"], scope["path"], answer.status_code, bytes(answer.body))
            if started:
                raise
            logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await answer(scope, receive, send)

    async def _refuse(self, refusal: tuple[int, str, str], scope: Scope, receive: Receive, send: Send) -> None:
        status, kind, message = refusal
        response = json_response({"error": {"type": kind, "message": message}}, status)
        if status == 401 and scope["method"] == "GET" and scope["path"] in self._asking_pages:
            response = self._asking_pages[scope["path"]].response(status)
        if status == 503:
            response.headers["connection"] = "close"
        await response(scope, receive, send)


class Turns:
    """The order in which requests begin: first come, first served.  Use from one event loop.

    A thousand requests that come at once would otherwise all be parsed before anything else gets its turn: health,
    control and the answers of others.
    """

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._is_due = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for the request's turn, which is in a later pass if `AT_ONCE` others begin in this one."""
        if self._waiting or not self._left:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
            return
        self._left -= 1
        self._see_to_next_pass()

    def _see_to_next_pass(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._is_due = False
        self._left = AT_ONCE
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            self._see_to_next_pass()


class SiteCheck:
    """The check that a request does not come from a page of another site.

    Names by which this server is known: addresses, names without a dot (of the local network only), `host`, and
    `allowed_hosts`, split by commas.  A server that listens beyond this machine may have others; there, without
    `allowed_hosts`, only requests with an `Origin` are held to them.
    """

    def __init__(self, host: str, allowed_hosts: str | None = None) -> None:
        given = [name.strip().lower() for name in (allowed_hosts or "").split(",") if name.strip()]
        self._allowed = frozenset(given)
        self._names = self._allowed | {host.lower()}
        self._any = "*" in given
        self._is_strict = bool(given) or is_loopback(host)

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
    """Return the host of an authority without its port: `localhost` for `localhost:80`, `::1` for `[::1]:80`."""
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


def _key(headers: dict[bytes, bytes]) -> bytes:
    """Return the key that a request came with: after `Bearer`, or where Anthropic's clients put it."""
    if b"authorization" not in headers:
        return headers.get(b"x-api-key", b"")
    scheme, _, key = headers[b"authorization"].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _same(given: bytes, wanted: str) -> bool:
    """Return whether the keys are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, wanted.encode())
