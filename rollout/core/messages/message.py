"""The base of every message between the main process and the scheduler, and how a control verb is declared.

A control verb is declared once, by a struct in one of the `*_io_struct` files:

    its fields          what the scheduler gets; all but the `hidden` ones are also the fields of the HTTP body
    its type parameter  the struct of its reply
    its `endpoint`      path, methods, API key, deadline, and what the body takes in addition to fields

and listed in its file's `VERBS`.  HTTP routes, OpenAPI, the scheduler's decoder and the client's calls follow from
that; what is left to write is the handler, in `rollout.control`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import UNSET, UnsetType

from rollout.core.errors import DeadlinePassed, status_of

CHANNEL_SECRET = "LOCKSTEP_CHANNEL_SECRET"
"""Environment variable with the secret by which ranks authenticate their messages over the network."""

START_ID_HEADER = "x-start-id"
"""Header of an answer of `/health`: an id of the server's process, another one after each start."""

WEIGHT_MARGIN_S = 30.0
"""Over `--weight-update-timeout`, so that the scheduler's own deadline is the one that passes first."""

Method = Literal["GET", "POST"]
GET_AND_POST: tuple[Method, ...] = ("GET", "POST")
"""The methods of many verbs, as in SGLang."""


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Tagged with the name of its class, so that a union of messages can be decoded."""


# --- replies -----------------------------------------------------------------------------------------------------


def _sums(lists: Iterable[list[int]]) -> list[int]:
    """Add up lists, place by place; a shorter one has zeros at its end."""
    return [sum(numbers) for numbers in zip_longest(*lists, fillvalue=0)]


Total = Annotated[int, msgspec.Meta(extra={"over_ranks": sum})]
TotalFloat = Annotated[float, msgspec.Meta(extra={"over_ranks": sum})]
Totals = Annotated[list[int], msgspec.Meta(extra={"over_ranks": _sums})]
AnyRank = Annotated[bool, msgspec.Meta(extra={"over_ranks": any})]


class Reply(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer of a verb; over HTTP its fields are at the top of the JSON object.  An unset one is left out.

    `dp_ranks`: the replies of all data-parallel ranks, where there are several and they have numbers that add up.
    """

    dp_ranks: list[Any] | UnsetType = UNSET

    def merged(self, replies: Sequence[Any]) -> Any:
        """Merge the numbers of all data-parallel ranks: `Total` fields add up, `AnyRank` ones are or-ed."""
        found: dict[str, Any] = {}
        for name, combine in _over_ranks(type(self)).items():
            if getattr(self, name) is not UNSET:
                found[name] = combine(getattr(reply, name) for reply in replies)
        return msgspec.structs.replace(self, **found, dp_ranks=list(replies)) if found else self

    @property
    def of_ranks(self) -> list[Any]:
        """The reply of each data-parallel rank."""
        return [self] if self.dp_ranks is UNSET else self.dp_ranks


def _over_ranks(reply: type[Reply]) -> dict[str, Callable[[Any], Any]]:
    """Return the function that merges each field over ranks, for the fields that have one."""
    found: dict[str, Callable[[Any], Any]] = {}
    for item in msgspec.structs.fields(reply):
        for arm in (item.type, *get_args(item.type)):
            metas = arm.__metadata__ if get_origin(arm) is Annotated else ()
            for meta in metas:
                if meta.extra:
                    found[item.name] = meta.extra["over_ranks"]
    return found


class NoReply(Reply, kw_only=True):
    """The reply of a verb that answers with its success and its message alone."""


AnyReply = TypeVar("AnyReply", bound=Reply)


class ControlReqOutput(Message, Generic[AnyReply]):
    """Answer of one data-parallel rank to one control verb.

    `data`: the verb's reply if it succeeded; as plain values until `Communicator` reads them as the reply's struct.
    `error_type`: the name of the exception if it did not.
    """

    request_id: str
    success: bool
    message: str = ""
    status_code: int = 200
    error_type: str = "ControlError"
    data: AnyReply | None = None
    dp_rank: int = 0

    @property
    def reply(self) -> AnyReply:
        """The reply of a verb that succeeded."""
        assert self.data is not None, "only a verb that succeeded has a reply"
        return self.data


def failure(request_id: str, error: Exception) -> ControlReqOutput[Any]:
    """Return the answer to a verb that was refused or failed."""
    return ControlReqOutput(
        request_id=request_id,
        success=False,
        message=str(error) or type(error).__name__,
        status_code=status_of(error),
        error_type=type(error).__name__,
    )


# --- declarations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The way to call a verb.  Without a `path` only the server itself calls it.

    `aliases`: other paths for the same.  `query`: methods whose fields are in the URL instead of a body.
    `key`: "admin" verbs take the admin key where there is one.
    `timeout_s`: how long the answer may take; None: `--weight-update-timeout` and a margin.  `client_waits`: which of
    the client's deadlines its own wait takes, None: the one that fits `timeout_s`.
    `shape` of the HTTP reply: "common" adds `success` and `message`, "status" also `status`, "bare" nothing.
    `hidden`: fields that no body may set.  `accepts`: type and default of what a body may have as well, for the
    route itself or without effect.  `other_names`: of other dialects, for fields.  `refuses`: fields of features
    that this server lacks.  `timed_as`: name of its duration in the metrics.
    """

    path: str | None = None
    aliases: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ("POST",)
    query: tuple[Method, ...] = ()
    tag: str = "control"
    key: Literal["admin", "api"] = "admin"
    timeout_s: float | None = None
    client_waits: Literal["control", "weights"] | None = None
    shape: Literal["common", "status", "bare"] = "common"
    hidden: frozenset[str] = frozenset()
    accepts: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    refuses: frozenset[str] = frozenset()
    timed_as: str | None = None

    def deadline_s(self, weight_update_timeout_s: float) -> float:
        """Return how many seconds the answer may take."""
        return weight_update_timeout_s + WEIGHT_MARGIN_S if self.timeout_s is None else self.timeout_s


class ControlReqInput(Message, Generic[AnyReply], kw_only=True):
    """Base of the control verbs.

    `deadline`: when the caller stops waiting, in seconds of the monotonic clock that the main process and rank 0 share;
    a verb whose turn comes later is not carried out.  None: no deadline.
    """

    endpoint: ClassVar[Endpoint] = Endpoint()

    request_id: str
    deadline: float | None = None

    def answer(self, reply: AnyReply, message: str = "") -> ControlReqOutput[AnyReply]:
        """Return the answer to this verb after it succeeded."""
        return ControlReqOutput(request_id=self.request_id, success=True, message=message, data=reply)

    def require_in_time(self, now: float) -> None:
        """Raise `DeadlinePassed` if the verb's deadline has passed at `now`."""
        if self.deadline is not None and now >= self.deadline:
            raise DeadlinePassed("the deadline passed before the call began; it had no effect")


def reply_type(verb: type[ControlReqInput[AnyReply]]) -> type[AnyReply]:
    """Return the struct of a verb's reply: the type parameter in its declaration, or in its nearest base's."""
    for base in verb.__mro__:
        for declared in getattr(base, "__orig_bases__", ()):
            found = next((item for item in get_args(declared) if isinstance(item, type)), None)
            if found is not None:
                return found
    raise TypeError(f"{verb.__name__} does not declare its reply")


@functools.cache
def body_fields(verb: type[ControlReqInput[Any]]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a verb that a body carries, the verb's own before the fields of its bases."""
    not_sent = {*ControlReqInput.__struct_fields__, *verb.endpoint.hidden}
    return tuple(item for item in msgspec.structs.fields(verb) if item.name not in not_sent)


class Limits:
    """Limits on a field of a request body, under pydantic's names; in an `Annotated` type.

    They do not hold for the message: what the server sends itself is not checked twice, so that no limit can end the
    scheduler.
    """

    def __init__(self, **limits: Any) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return handler(source) | self._limits


Name = Annotated[str, Limits(min_length=1)]
UpdateId = Annotated[str, Limits(min_length=1, max_length=64)]
Size = Annotated[int, Limits(ge=0, lt=2**63)]
Int64 = Annotated[int, Limits(ge=-(2**63), lt=2**63)]
