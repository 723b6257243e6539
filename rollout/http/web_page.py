"""Web pages for people: `Page`, one document, and `FilesPage`, one with scripts and styles in files of their own.

Headers keep a page to itself: it may load nothing from elsewhere and call only its own server.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.responses import Response

from rollout.core.errors import NotFound

_STYLE, _SCRIPT = "/*STYLE*/", "/*SCRIPT*/"
_KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".txt": "text/plain"}


class Page:
    """The same bytes for everybody: it holds no data.  `package`: where `page.html`, `page.css` and `page.js` are.

    Script and style are inside the document and allowed by their hashes.
    """

    def __init__(self, package: str) -> None:
        folder = files(package)
        style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
        html = (folder / "page.html").read_text("utf-8")
        self._content = html.replace(_STYLE, style).replace(_SCRIPT, script).encode()
        self._headers = _headers(_allowed(script), _allowed(style))

    def response(self, status: int = 200) -> Response:
        return Response(self._content, status, headers=self._headers, media_type="text/html")


class FilesPage:
    """A document and the files that it loads, all read once.  Neither holds data.

    `folders`: of `package`; each file in them is served by its name.  `index`: the name of the document.
    """

    def __init__(self, package: str, folders: Sequence[str], index: str) -> None:
        found = {one.name: one for folder in folders for one in (files(package) / folder).iterdir() if one.is_file()}
        self._files = {name: _File(name, one) for name, one in found.items()}
        self._index = index
        self._headers = _headers("'self'", "'self'")

    @property
    def names(self) -> list[str]:
        """The names of the files, the document among them."""
        return list(self._files)

    def response(self) -> Response:
        """Return the document."""
        return Response(self._files[self._index].content, headers=self._headers, media_type="text/html")

    def file(self, name: str, known: str | None) -> Response:
        """Return a file, or 304 if the caller has it: `known` is its `if-none-match`.  Raises `NotFound`."""
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"the page has no file {name[:80]!r}")
        headers = self._headers | {"etag": found.etag}
        if known == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers=headers, media_type=found.media_type)


class _File:
    def __init__(self, name: str, source: Traversable) -> None:
        self.content = source.read_bytes()
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:20]}"'
        self.media_type = _KINDS["." + name.rpartition(".")[2]]


def _headers(scripts: str, styles: str) -> dict[str, str]:
    """Return the headers of a page that may run these scripts and use these styles."""
    policy = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": styles,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }


def _allowed(text: str) -> str:
    """Return the source expression that allows an inline element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
