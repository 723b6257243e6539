"""A call as data: method, path, body, deadline, and how its answer is read; and the call of a declared control verb."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from rollout.client.errors import ResponseFormatError, ServerError
from rollout.client.types import Timeouts
from rollout.core.errors import BadRequest
from rollout.core.known_fields import unknown_field
from rollout.core.messages.message import AnyReply, ControlReqInput, Method, body_fields, reply_type
from weight_sync.json_lists import JsonList

T = TypeVar("T")
JsonObject = dict[str, Any]

SHORT_S = 60.0
BEYOND_SERVER_S = 10.0
"""A verb that the server gives over `SHORT_S` has this much longer here, so that its own reason arrives."""
_CONVERTING = threading.Lock()
"""The process can crash if two threads make msgspec read a type of structs that it does not know yet."""


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, whole.

    `retry_after_s`: in how many seconds the server wants to be asked again.  `start_id`: of the server's process, where
    it is sent.  `media_type`: of the body, where it is known.
    """

    status: int
    body: bytes
    retry_after_s: float | None = None
    start_id: str | None = None
    media_type: str | None = None


@dataclass(frozen=True)
class Health:
    """The answer to a health check.  `start_id`: another one after each start of the server; None: not reported."""

    is_healthy: bool
    start_id: str | None = None


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP exchange.

    `admin` calls carry the admin key where there is one.  `timeout` names a field of `Timeouts`; `timeout_s` overrides.
    `unanswered`: the result if no answer comes, instead of an error.  `retry`: the errors after which the call may be
    made again, see `retries`; "refused" is 503 or no connection, "always" a broken connection too.  `accept`: the media
    types that `parse` reads, if others than JSON are among them.
    """

    method: Method
    path: str
    parse: Callable[[Reply], T]
    json: dict[str, Any] | None = None
    admin: bool = False
    timeout: Literal["control", "generate", "weights"] = "control"
    timeout_s: float | None = None
    unanswered: T | None = None
    retry: Literal["never", "refused", "always"] = "never"
    accept: str | None = None

    def __post_init__(self) -> None:
        if self.method == "GET":
            object.__setattr__(self, "retry", "always")

    def deadline(self, timeouts: Timeouts) -> float:
        """Return for how many seconds to wait for the answer."""
        return self.timeout_s if self.timeout_s is not None else getattr(timeouts, self.timeout)


Steps = Generator[Call[Any] | float, Any, T]
"""Yields calls, and seconds to wait; a call's result is sent back, or its error raised.  Returns a method's result."""


# --- writing bodies ----------------------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """Return JSON, with the kept JSON of each `JsonList` that objects hold.

    Raises `TypeError` or `ValueError` for what JSON cannot hold.
    """
    if isinstance(value, JsonList):
        return value.json
    if _holds_lists(value):
        fields = [json.dumps(name).encode() + b":" + to_json(part) for name, part in value.items()]
        return b"{%b}" % b",".join(fields)
    return json.dumps(value, allow_nan=False).encode()


def _holds_lists(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(part, JsonList) or _holds_lists(part) for part in value.values()
    )


def _plain_values(value: Any) -> Any:
    """Return plain values, of which `to_json` makes JSON.  Raises `TypeError`."""
    if isinstance(value, JsonList):
        return value
    if _holds_lists(value):
        return {name: _plain_values(part) for name, part in value.items()}
    return msgspec.to_builtins(value, enc_hook=_plain)


# --- reading answers ---------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Any:
    """Parse the JSON content of an answer.  Raises `ResponseFormatError`."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ResponseFormatError(f"the server's answer is not JSON: {body[:200]!r}") from None


def error_message(body: bytes) -> str:
    """Return the reason in an answer of any of the error shapes that SGLang-compatible servers use."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body[:2000].decode("utf-8", "replace").strip() or "no reason given"
    if isinstance(content, dict):
        error = content.get("error")
        for candidate in (error.get("message") if isinstance(error, dict) else error, content.get("message")):
            if isinstance(candidate, str) and candidate:
                return candidate
        if "detail" in content:
            return str(content["detail"])
    return str(content)[:2000]


def check(reply: Reply) -> Reply:
    """Return `reply` itself.  Raises `ServerError` if its status is not a success."""
    if not 200 <= reply.status < 300:
        raise ServerError(reply.status, error_message(reply.body), reply.retry_after_s)
    return reply


def object_of(reply: Reply) -> dict[str, Any]:
    content = parse_json(check(reply).body)
    if not isinstance(content, dict):
        raise ResponseFormatError(f"expected a JSON object, got {str(content)[:200]}")
    return content


def verb_result(reply: Reply) -> dict[str, Any]:
    content = object_of(reply)
    if content.get("success") is False:  # some servers report a failure under status 200
        raise ServerError(reply.status, error_message(reply.body))
    return content


def json_of(reply: Reply) -> Any:
    return parse_json(check(reply).body)


def text_of(reply: Reply) -> str:
    return check(reply).body.decode("utf-8", "replace").strip()


def nothing(reply: Reply) -> None:
    check(reply)


def field_of(name: str, kind: type[T]) -> Callable[[Reply], T]:
    def parse(reply: Reply) -> T:
        value = object_of(reply).get(name)
        if not isinstance(value, kind):
            raise ResponseFormatError(f"the answer has no {name}, or it is not a {kind.__name__}")
        return value

    return parse


def health_of(reply: Reply) -> Health:
    """Read an answer of /health.  Raises `ServerError` for statuses other than success and 503."""
    if reply.status == 503:
        return Health(False)
    check(reply)
    return Health(True, reply.start_id)


def is_healthy(reply: Reply) -> bool:
    return health_of(reply).is_healthy


def health_call(timeout_s: float) -> Call[Health]:
    """Return the health check; without an answer its result is unhealthy, not an error."""
    return Call("GET", "/health", health_of, timeout_s=timeout_s, unanswered=Health(False))


# --- control verbs -----------------------------------------------------------------------------------------------


def verb_call(
    verb: type[ControlReqInput[Any]],
    parse: Callable[[Reply], T],
    *,
    timeout_s: float | None = None,
    retry: Literal["never", "refused"] = "never",
    **fields: Any,
) -> Call[T]:
    """Return the call of `verb` as it is declared; fields that are None are left to the server.

    Raises `BadRequest` for a field that it does not have.
    """
    endpoint = verb.endpoint
    if endpoint.path is None:
        raise TypeError(f"{verb.__name__} cannot be called over HTTP")
    known = {*(item.name for item in body_fields(verb)), *endpoint.accepts, *endpoint.other_names}
    require_known(fields, known, place=f"{endpoint.path}: ")
    method: Method = "POST" if "POST" in endpoint.methods else "GET"
    path, stated = endpoint.path, {name: value for name, value in fields.items() if value is not None}
    if method in endpoint.query:
        path = f"{path}?{urlencode(stated)}" if stated else path
    if timeout_s is None and endpoint.timeout_s is not None and endpoint.timeout_s > SHORT_S:
        timeout_s = endpoint.timeout_s + BEYOND_SERVER_S
    return Call(
        method,
        path,
        parse,
        None if method in endpoint.query else stated,
        admin=endpoint.key == "admin",
        timeout=endpoint.client_waits or ("weights" if endpoint.timeout_s is None else "control"),
        timeout_s=timeout_s,
        retry=retry,
    )


def require_known(given: Iterable[str], known: Collection[str], advice: str = "", place: str = "") -> None:
    """Raise `BadRequest` for the first name that is not known, with the one that was probably meant."""
    for name in given:
        if name not in known:
            raise BadRequest(unknown_field(f"{place}{name}", known) + advice)


def method_call(verb: type[ControlReqInput[Any]], arguments: Mapping[str, Any]) -> Call[JsonObject]:
    """Return the call of a client's method, whose `arguments` have the names of the verb's fields; `self` is ignored.

    Bytes are sent as base64, each `JsonList` as its JSON.  Raises `BadRequest` for what JSON cannot hold.
    """
    given = {name: value for name, value in arguments.items() if name != "self"}
    try:
        return verb_call(verb, verb_result, **{name: _plain_values(value) for name, value in given.items()})
    except TypeError as error:
        raise BadRequest(f"{verb.endpoint.path}: the arguments cannot be sent as JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def reply_of(verb: type[ControlReqInput[AnyReply]]) -> Callable[[Reply], AnyReply]:
    """Return a function that reads an answer as the reply that `verb` declares."""
    kind = reply_type(verb)

    def parse(reply: Reply) -> AnyReply:
        content = verb_result(reply)
        known = {name: content[name] for name in kind.__struct_fields__ if name in content}
        try:
            with _CONVERTING:
                return msgspec.convert(known, kind)
        except msgspec.ValidationError as error:
            raise ResponseFormatError(
                f"the answer to {verb.endpoint.path} does not match its reply type: {error}"
            ) from None

    return parse
