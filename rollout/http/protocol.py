"""`Body`, the base of all bodies, as pydantic models, which /openapi.json shows; and bodies of control endpoints.

Bodies of control verbs are made from the verbs' declarations, see `verb_body`.  Values are not checked against a model
here: `TokenizerManager` and the scheduler do that.

Rules for all bodies: unknown fields are ignored and named in the answer (see `unknown_fields`).  Null means the
default.  Numeric strings count as numbers, but not as token ids.  A field that asks for a feature this server lacks is
refused, not ignored.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema

from rollout.core.errors import BadRequest, TooLarge, UnsupportedFeature
from rollout.core.known_fields import (
    MAX_IGNORED,
    shown,
)
from rollout.core.messages.message import UpdateId
from rollout.http.known_lists import RawLists

TokenId = Annotated[int, Field(strict=True)]
TokenIds = list[TokenId]


class ListsPlace(NamedTuple):
    """The place of lists of tensors in a body: the names of the lists, and of fields and elements around them.

    `boxes`: the name of a fourth list that may be there, or none.
    """

    path: tuple[str | int, ...] = ()
    names: tuple[str, str, str] = ("names", "dtypes", "shapes")
    boxes: tuple[str, ...] = ()


class UnknownField(NamedTuple):
    """The `path` of an unknown field, and the names that are known in its place."""

    path: str
    known: frozenset[str]


MAX_DEPTH = 64
"""Depth of objects and lists in a field without a schema; templates indent them."""
MAX_VALUES = 1 << 16
"""Most values in a field without a schema."""
MAX_MESSAGES = 1 << 16
"""Most messages of a chat."""


def _bounded(value: Any, info: ValidationInfo) -> Any:
    """Check a field without a schema.  Raises `BadRequest` over `MAX_DEPTH`, and `TooLarge` over `MAX_VALUES`."""
    _check_nested(value, str(info.field_name), MAX_VALUES)
    return value


def _checked_messages(value: Any, info: ValidationInfo) -> Any:
    """Check the messages of a chat.  Raises `TooLarge` over `MAX_MESSAGES`, and `BadRequest` over `MAX_DEPTH`."""
    name = str(info.field_name)
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise TooLarge(f"{name} has {len(value)} messages; the limit is {MAX_MESSAGES}")
    _check_nested(value, name, sys.maxsize)
    return value


def _check_nested(value: Any, name: str, max_values: int) -> None:
    level, depth, count = [value], 0, 0
    while level:
        count += len(level)
        if count > max_values:
            raise TooLarge(f"{name} has over {max_values} values")
        if depth > MAX_DEPTH:
            raise BadRequest(f"{name} is nested more than {MAX_DEPTH} levels deep")
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
        depth += 1


FreeForm = BeforeValidator(_bounded)
"""The validator of a field that holds any JSON."""
Messages = Annotated[list[dict[str, Any]], BeforeValidator(_checked_messages)]
FreeObject = Annotated[dict[str, Any], FreeForm]
Tools = Annotated[list[dict[str, Any]], FreeForm]
BUDGETS = {"thinking_token_budget", "max_thinking_tokens"}
"""Fields in which a 0 asks for something, and a -1 for nothing."""


def _harden(node: Any) -> None:
    """Set on a schema what holds for every body: see `Body`."""
    if isinstance(node, dict):
        kind = node.get("type")
        if kind in ("list", "dict"):
            node["fail_fast"] = True  # what `pydantic.FailFast` sets
        elif kind == "float":
            node["allow_inf_nan"] = False
        elif kind == "int":
            if not node.keys() & {"ge", "gt"}:
                node["ge"] = -(2**63)
            if not node.keys() & {"lt", "le"}:
                node["lt"] = 2**63
        for part in node.values():
            _harden(part)
    elif isinstance(node, list | tuple):
        for part in node:
            _harden(part)


class Body(BaseModel):
    """Base of every request body.  `unsupported` names fields that are refused when they hold a true value.

    `other_names` are of another dialect, refused whatever they hold, with what to ask with instead.  `harmless` ones
    are known and change nothing.  `struct_lists`: fields that are lists of msgspec's structs, by their types: decoded
    as such, they need not be validated again.  `list_places`: where lists of tensors may stand; the first one counts.
    Null means the default.  Integers have at most 64 bits, and numbers are finite, also where they come as text.  A
    list is checked up to its first bad element: pydantic would keep an error, hundreds of bytes, for each.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    unsupported: ClassVar[frozenset[str]] = frozenset()
    struct_lists: ClassVar[dict[str, Any]] = {}
    list_places: ClassVar[tuple[ListsPlace, ...]] = ()
    other_names: ClassVar[dict[str, str]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()
    _unknown: list[UnknownField] = PrivateAttr(default=[])
    _lists: RawLists | None = PrivateAttr(default=None)

    @property
    def unknown(self) -> list[UnknownField]:
        """The unknown fields that it came with."""
        return self._unknown

    @unknown.setter
    def unknown(self, fields: list[UnknownField]) -> None:
        self._unknown = fields

    @property
    def lists(self) -> RawLists | None:
        """The lists of tensors that stayed JSON: the fields that had them are empty."""
        return self._lists

    @lists.setter
    def lists(self, lists: RawLists | None) -> None:
        self._lists = lists

    @property
    def ignored_fields(self) -> list[str]:
        return [shown(field.path) for field in self._unknown]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _harden(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _prepared(cls, raw: Any) -> Any:
        """Return the body without nulls.  Raises `UnsupportedFeature`, also for a body inside a body."""
        if not isinstance(raw, dict):
            return raw
        refuse_unsupported(raw, cls.unsupported)
        for name, ours in cls.other_names.items():
            if raw.get(name) is not None:
                raise UnsupportedFeature(f"{name} is not known here; ask with {ours}")
        return {key: value for key, value in raw.items() if value is not None}


def refuse_unsupported(raw: dict[str, Any], names: frozenset[str], place: str = "") -> None:
    """Raise `UnsupportedFeature` for the first of `names` that holds a true value; `place` begins the message."""
    for name in sorted(names & raw.keys()):
        value = raw[name]
        asks = value is not None and value is not False and value != -1 if name in BUDGETS else value
        if asks:
            raise UnsupportedFeature(f"{place}{name} is not supported by this server")


# --- unknown fields ---------------------------------------------------------------------------------------------------


def unknown_fields(model: type[Body], raw: Mapping[str, Any]) -> list[UnknownField]:
    """Return the first `MAX_IGNORED` unknown fields of a body, also in bodies inside it."""
    return list(itertools.islice(_unknown(model, raw, ""), MAX_IGNORED))


def _unknown(model: type[Body], raw: Mapping[str, Any], place: str) -> Iterator[UnknownField]:
    known = known_names(model)
    for name, value in raw.items():
        if value is not None and name not in known:
            yield UnknownField(place + name, known)
    for (name, in_list), inner in _inner_bodies(model).items():
        value = raw.get(name)
        if isinstance(value, dict) and not in_list:
            yield from _unknown(inner, value, f"{place}{name}.")
        elif isinstance(value, list) and in_list:
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    yield from _unknown(inner, each, f"{place}{name}[{index}].")


@functools.cache
def known_names(model: type[Body]) -> frozenset[str]:
    """Return the names of fields that are honoured, refused by name, or harmless."""
    return frozenset({*model.model_fields, *model.unsupported, *model.other_names, *model.harmless})


@functools.cache
def _inner_bodies(model: type[Body]) -> dict[tuple[str, bool], type[Body]]:
    """Return the types of bodies in fields: by the field's name, and whether they are in a list there."""
    fields = model.model_fields.items()
    return {(name, in_list): inner for name, item in fields for in_list, inner in _bodies_in(item.annotation)}


def body_in(kind: Any) -> type[Body] | None:
    """Return the body that a field of type `kind` holds, also in a list or union; None if it holds none."""
    return next((inner for _, inner in _bodies_in(kind)), None)


def _bodies_in(kind: Any, in_list: bool = False) -> Iterator[tuple[bool, type[Body]]]:
    if isinstance(kind, type) and issubclass(kind, Body):
        yield in_list, kind
    for arm in get_args(kind):
        yield from _bodies_in(arm, in_list or get_origin(kind) is list)


# --- control -----------------------------------------------------------------------------------------------------


class EmptyRequest(Body):
    """The body of an endpoint that takes nothing from it."""


class RouteProbeRequest(Body):
    """POST /dashboard/route_probe."""

    text: str | None = None
    input_ids: TokenIds | None = None


class TrainerMetricsRequest(Body):
    """POST /dashboard/trainer_metrics."""

    values: dict[str, float]
    step: int | None = None


class AbortRequest(Body):
    rid: str | list[str] = ""
    abort_all: bool = False


class BucketAddress(Body):
    """The address of a broadcast bucket: the fields that are read first of a body that is wrong elsewhere."""

    update_id: UpdateId | None = None
    group_name: str = "weight_update_group"
    weight_version: str | None = None
