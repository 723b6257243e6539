"""Who may call what: the keys of `--api-key` and `--admin-api-key`.

Knows paths and headers.  An ASGI middleware, so that it also stands before streams and unknown paths.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.entrypoints.http_io import json_response

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/ping", "/metrics"})


class KeyMiddleware:
    """Refuses with 401 what does not carry the right `Authorization: Bearer KEY`.

    With an admin key, control paths take that key and no other; without one they take the API key.  `OPEN_PATHS` take
    anything.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, admin_api_key: str | None, control_paths: Collection[str]
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._control_paths = frozenset(control_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            content = {"error": {"type": "Unauthorized", "message": "missing or wrong key: Authorization: Bearer KEY"}}
            await json_response(content, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS:
            return True
        wanted = self._api_key
        if self._admin_api_key is not None and path in self._control_paths:
            wanted = self._admin_api_key
        return wanted is None or _same(_bearer(scope), wanted)


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


def _same(given: bytes, wanted: str) -> bool:
    """In a time that does not depend on where they differ."""
    return hmac.compare_digest(given, wanted.encode())
