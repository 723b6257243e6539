"""The HTTP of both clients: connection options, headers, bodies, deadlines, and the mapping of errors."""

from __future__ import annotations

import errno
import resource
import time
from typing import Any, TypeVar

import httpx

from rollout.client.errors import ClientError, ServerTimeout, ServerUnreachable
from rollout.client.pool import GENERATION
from rollout.client.types import Timeouts
from rollout.client.wire import Call, Reply, to_json
from rollout.core.errors import BadRequest
from rollout.core.messages.message import START_ID_HEADER

T = TypeVar("T")
# Below uvicorn's 5 seconds, so that no request is sent into a connection that the server is just closing.
KEEPALIVE_S = 2.0
_MAX_CONNECTIONS = 4096


class Connection:
    """The server's address, the keys for it, the times to wait, and the number of generations at once."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        admin_api_key: str | None,
        timeouts: Timeouts | None,
        max_connections: int | None,
    ) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        self.timeouts = timeouts or Timeouts()
        self.max_connections = _within_file_limit() if max_connections is None else max_connections
        if self.max_connections < 1:
            raise BadRequest(f"max_connections must be at least 1, got {max_connections}")

    def options(self) -> dict[str, Any]:
        """Return the arguments of `httpx.Client` and `httpx.AsyncClient`.

        Proxies from the environment are not used: the server is a neighbour, and a proxy would cut off long waits.
        Raises `BadRequest` unless the base URL is an http or https URL with a host.
        """
        try:
            url = httpx.URL(self._base_url)
        except httpx.InvalidURL as error:
            raise BadRequest(f"base_url {self._base_url!r}: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise BadRequest(f"base_url must look like http://127.0.0.1:30000, got {self._base_url!r}")
        # No cap on connections: generations wait for a place before they come here, and pausing must not queue there.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=self.max_connections, keepalive_expiry=KEEPALIVE_S
        )
        return {"base_url": url, "limits": limits, "trust_env": False}

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """Return the arguments of `httpx` request and stream calls.

        Raises `BadRequest` for a body that JSON cannot hold.
        """
        headers = {} if call.accept is None else {"accept": call.accept}
        content = None
        if call.json is not None:
            headers["content-type"] = "application/json"
            try:
                content = to_json(call.json)
            except (TypeError, ValueError) as error:
                raise BadRequest(f"{call.path}: the arguments cannot be sent as JSON: {error}") from None
        key = self._admin_api_key if call.admin else self._api_key
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        deadline = self.deadline(call)
        timeout = httpx.Timeout(deadline, connect=min(self.timeouts.connect, deadline))
        extensions = {GENERATION: True} if call.timeout == "generate" else {}
        return {
            "method": call.method,
            "url": call.path,
            "headers": headers,
            "content": content,
            "timeout": timeout,
            "extensions": extensions,
        }

    def deadline(self, call: Call[Any]) -> float:
        """Return for how many seconds to wait for the answer."""
        return call.deadline(self.timeouts)

    def no_place(self, call: Call[Any]) -> str:
        """Return why a generation was not sent."""
        within = f"within {self.deadline(call):g} s"
        return f"{call.path}: none of {self.max_connections} generations at {self._base_url} made room {within}"

    def no_answer(self, error: httpx.HTTPError, call: Call[T]) -> T:
        """Return the result of an unanswered call, if it has one for that.  Raises `ClientError` otherwise."""
        if call.unanswered is None:
            raise self._error(error, call) from error
        return call.unanswered

    def _error(self, error: httpx.HTTPError, call: Call[Any]) -> ClientError:
        what, url = f"{call.method} {call.path}", self._base_url
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            if _is_out_of_files(error):
                return ServerUnreachable(f"{what} at {url}: too many open files here: raise `ulimit -n`", False)
            return ServerUnreachable(
                f"no server answers at {url} ({error or 'timed out'}): is it running there?", False
            )
        if isinstance(error, httpx.TimeoutException):
            return ServerTimeout(f"{what} at {url}: no answer within {self.deadline(call):g} s")
        return ServerUnreachable(f"{what} at {url}: the connection broke: {type(error).__name__}: {error}")


def read_reply(response: httpx.Response, body: bytes | bytearray) -> Reply:
    """Return a `Reply` out of an answer and its body."""
    seconds = response.headers.get("retry-after", "")
    retry_after_s = float(seconds) if seconds.isdecimal() else None
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return Reply(response.status_code, bytes(body), retry_after_s, response.headers.get(START_ID_HEADER), media_type)


def require_before(deadline: float) -> None:
    """Raise `httpx.ReadTimeout` after `deadline` (`time.monotonic()`), for answers that come in drops."""
    if time.monotonic() > deadline:
        raise httpx.ReadTimeout("the answer was cut short")


def _within_file_limit() -> int:
    """Return a number of connections that leaves half of the allowed open files to the rest of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_CONNECTIONS, soft // 2))


def _is_out_of_files(error: BaseException | None) -> bool:
    while error is not None and not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
        error = error.__cause__ or error.__context__
    return error is not None
