"""HTTP calls to one server, every answer counted: an unexpected status and a broken connection are wrong."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

import httpx

TIMEOUT_S = 120.0
MAX_COMPLAINTS = 20


class Ended(Exception):
    """The connection broke, or no answer came in time; the complaint is noted."""


RECEIVE_FAILED = (502,)
"""Statuses that the protocol names for a rendezvous or a receive whose sender is gone, or that an abort ended."""


class Calls:
    """Calls to a server, with a record of its answers.  Safe from any thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.complaints: list[str] = []
        self.num_wrong = 0
        self.longest: dict[str, float] = {}  # seconds, by path
        self._lock = threading.Lock()
        self.client = self._new_client()

    def post(self, path: str, body: Any = None, may: Collection[int] = ()) -> httpx.Response:
        """Send a POST and return its answer.  `may`: statuses of 500 and more that are right here.  Raises `Ended`."""
        return self._request("POST", path, {} if body is None else body, may)

    def get(self, path: str, **query: Any) -> httpx.Response:
        """Send a GET and return its answer.  Raises `Ended`."""
        return self._request("GET", path, None, (), query)

    def new_connections(self) -> None:
        """Close all connections, so that calls open new ones; no call may be under way."""
        self.client.close()
        self.client = self._new_client()

    def note(self, path: str, status: int, said: str, may: Collection[int] = ()) -> None:
        """Count an answer, and complain of one that is a failure of the server."""
        with self._lock:
            self.statuses[path, status] += 1
        if status >= 500 and status not in may:
            self.complain(f"{path}: {status} {said[:300]}")

    def complain(self, what: str) -> None:
        with self._lock:
            self.num_wrong += 1
            if len(self.complaints) < MAX_COMPLAINTS:
                self.complaints.append(what)

    def _request(
        self, method: str, path: str, body: Any, may: Collection[int], query: dict[str, Any] | None = None
    ) -> httpx.Response:
        began = time.monotonic()
        try:
            response = self.client.request(method, path, json=body, params=query)
        except httpx.HTTPError as error:
            self.complain(f"{method} {path}: {type(error).__name__}: {error}")
            raise Ended(path) from error
        self.longest[path] = max(self.longest.get(path, 0.0), time.monotonic() - began)
        self.note(path, response.status_code, response.text, may)
        return response

    def _new_client(self) -> httpx.Client:
        # Idle connections end here before the server ends them: a call must never meet one that is being closed.
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=64, keepalive_expiry=2.0)
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, limits=limits, trust_env=False)


class Noted(httpx.BaseTransport):
    """A transport for clients that are not ours: their answers are counted too."""

    def __init__(self, calls: Calls, may: Collection[int]) -> None:
        self._calls = calls
        self._may = may
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        try:
            response = self._real.handle_request(request)
            response.read()
        except httpx.HTTPError as error:
            self._calls.complain(f"{path}: {type(error).__name__}: {error}")
            raise
        self._calls.note(path, response.status_code, response.text, self._may)
        return response

    def close(self) -> None:
        self._real.close()
