"""What both clients share of HTTP: connection options, headers, bodies, deadlines, and the mapping of errors.

Knows httpx's arguments and exceptions.  Sends nothing.
"""

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


def client_options(base_url: str) -> dict[str, Any]:
    """Arguments of `httpx.Client` and `httpx.AsyncClient`.

    Proxies from the environment are not used: the server is a neighbour, and a proxy would cut off long waits.
    Raises `BadRequest` unless `base_url` is an http or https URL with a host.
    """
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise BadRequest(f"base_url {base_url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise BadRequest(f"base_url {base_url!r} is not like http://127.0.0.1:30000")
    # No cap on connections: a rollout waits on hundreds of generations at once, and pausing must not queue behind them.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_S)
    return {"base_url": url, "limits": limits, "trust_env": False}


def request_arguments(
    call: Call[Any], timeouts: Timeouts, api_key: str | None, admin_api_key: str | None
) -> dict[str, Any]:
    """Arguments of `httpx` request and stream calls.  Raises `BadRequest` for a body that JSON cannot hold."""
    headers = {}
    content = None
    if call.json is not None:
        headers["content-type"] = "application/json"
        try:
            content = json.dumps(call.json, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise BadRequest(f"{call.path}: the arguments cannot be sent as JSON: {error}") from None
    key = (admin_api_key or api_key) if call.admin else api_key
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    timeout = httpx.Timeout(call.deadline(timeouts), connect=min(timeouts.connect, call.deadline(timeouts)))
    return {"method": call.method, "url": call.path, "headers": headers, "content": content, "timeout": timeout}


def no_answer(error: httpx.HTTPError, call: Call[T], timeouts: Timeouts, base_url: str) -> T:
    """The result of a call that nobody answered, if it has one for that.  Raises `ClientError` otherwise."""
    if call.unanswered is None:
        raise client_error(error, call, timeouts, base_url) from error
    return call.unanswered


def client_error(error: httpx.HTTPError, call: Call[Any], timeouts: Timeouts, base_url: str) -> ClientError:
    """The typed error for what `httpx` raised."""
    what = f"{call.method} {call.path}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerUnreachable(f"no server answers at {base_url} ({error or 'timed out'}): is it running there?")
    if isinstance(error, httpx.TimeoutException):
        return ServerTimeout(f"{what} at {base_url}: no answer within {call.deadline(timeouts):g} s")
    return ServerUnreachable(f"{what} at {base_url}: the connection broke: {type(error).__name__}: {error}")
