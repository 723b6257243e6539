"""`Page`: one HTML document, put together from three files of a package, and the headers that keep it to itself.

Script and style are inside it and allowed by their hashes; it may load nothing and call only its own server.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.responses import Response

_STYLE, _SCRIPT = "/*STYLE*/", "/*SCRIPT*/"


class Page:
    """The same bytes for everybody: it holds no data.  `package`: where `page.html`, `page.css` and `page.js` are."""

    def __init__(self, package: str) -> None:
        folder = files(package)
        style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
        html = (folder / "page.html").read_text("utf-8")
        self._content = html.replace(_STYLE, style).replace(_SCRIPT, script).encode()
        policy = {
            "default-src": "'none'",
            "script-src": _allowed(script),
            "style-src": _allowed(style),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        self._headers = {
            "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache",
        }

    def response(self, status: int = 200) -> Response:
        return Response(self._content, status, headers=self._headers, media_type="text/html")


def _allowed(text: str) -> str:
    """Return the source expression that allows an inline element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
