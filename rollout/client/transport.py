"""What both clients share of HTTP: connection options, headers, bodies, deadlines, and the mapping of errors."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import httpx

from rollout.client.errors import ClientError, ServerTimeout, ServerUnreachable
from rollout.client.types import Timeouts
from rollout.client.wire import Call
from rollout.core.errors import BadRequest

T = TypeVar("T")
# Below uvicorn's 5 seconds, so that no request is sent into a connection that the server is just closing.
_KEEPALIVE_S = 2.0


class Connection:
    """Where the server is, the keys for it, and how long to wait."""

    def __init__(
        self, base_url: str, api_key: str | None, admin_api_key: str | None, timeouts: Timeouts | None
    ) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        self._timeouts = timeouts or Timeouts()

    def options(self) -> dict[str, Any]:
        """Arguments of `httpx.Client` and `httpx.AsyncClient`.

        Proxies from the environment are not used: the server is a neighbour, and a proxy would cut off long waits.
        Raises `BadRequest` unless the base URL is an http or https URL with a host.
        """
        try:
            url = httpx.URL(self._base_url)
        except httpx.InvalidURL as error:
            raise BadRequest(f"base_url {self._base_url!r}: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise BadRequest(f"base_url {self._base_url!r} is not like http://127.0.0.1:30000")
        # No cap on connections: a rollout waits on hundreds of generations, and pausing must not queue behind them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_S)
        return {"base_url": url, "limits": limits, "trust_env": False}

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """Arguments of `httpx` request and stream calls.  Raises `BadRequest` for a body that JSON cannot hold."""
        headers = {}
        content = None
        if call.json is not None:
            headers["content-type"] = "application/json"
            try:
                content = json.dumps(call.json, allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                raise BadRequest(f"{call.path}: the arguments cannot be sent as JSON: {error}") from None
        key = self._admin_api_key if call.admin else self._api_key
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        deadline = call.deadline(self._timeouts)
        timeout = httpx.Timeout(deadline, connect=min(self._timeouts.connect, deadline))
        return {"method": call.method, "url": call.path, "headers": headers, "content": content, "timeout": timeout}

    def no_answer(self, error: httpx.HTTPError, call: Call[T]) -> T:
        """The result of a call that nobody answered, if it has one for that.  Raises `ClientError` otherwise."""
        if call.unanswered is None:
            raise self._error(error, call) from error
        return call.unanswered

    def _error(self, error: httpx.HTTPError, call: Call[Any]) -> ClientError:
        what, url = f"{call.method} {call.path}", self._base_url
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerUnreachable(f"no server answers at {url} ({error or 'timed out'}): is it running there?")
        if isinstance(error, httpx.TimeoutException):
            return ServerTimeout(f"{what} at {url}: no answer within {call.deadline(self._timeouts):g} s")
        return ServerUnreachable(f"{what} at {url}: the connection broke: {type(error).__name__}: {error}")
