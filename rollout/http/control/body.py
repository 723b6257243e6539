"""HTTP bodies of control verbs: pydantic models made from the verbs' declarations, and a verb's fields from a body."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from pydantic import Discriminator, Field, Tag, WrapValidator, create_model

from rollout.core.known_fields import HARMLESS_CONTROL_FIELDS
from rollout.core.messages.message import ControlReqInput, body_fields
from rollout.http.protocol import Body, ListsPlace


@functools.cache
def body_of(verb: type[ControlReqInput[Any]]) -> type[Body]:
    """Return the model of the fields that a body, or the URL, may have to call `verb`."""
    for item in body_fields(verb):
        # The process can crash if two threads make msgspec read a type of structs that it does not know yet.
        msgspec.json.Decoder(item.type)
    declared = {item.name: (_pydantic_type(item.type), _default(item)) for item in body_fields(verb)}
    others = {other: (declared[name][0] | None, None) for other, name in verb.endpoint.other_names.items()}
    accepted = {name: (_pydantic_type(kind), default) for name, (kind, default) in verb.endpoint.accepts.items()}
    body = _model(verb, declared | others | accepted)
    body.unsupported = verb.endpoint.refuses
    body.harmless = HARMLESS_CONTROL_FIELDS
    body.list_places = _list_places(declared)
    body.struct_lists = {item.name: kind for item in body_fields(verb) if (kind := _struct_list(item.type)) is not None}
    return body


def fields_of(verb: type[ControlReqInput[Any]], body: Body) -> dict[str, Any]:
    """Return the fields of `verb`, with the values that `body` gives them."""
    values = {name: getattr(body, name) for name in type(body).model_fields}
    for other, name in verb.endpoint.other_names.items():
        if values[name] is None:
            values[name] = values[other]
    return {
        item.name: msgspec.convert(values[item.name], item.type, from_attributes=True) for item in body_fields(verb)
    }


def _list_places(fields: Collection[str]) -> tuple[ListsPlace, ...]:
    """Return where a verb with these fields takes lists of tensors: among its fields, or in its manifest."""
    if {"names", "dtypes", "shapes"} <= set(fields):
        return (ListsPlace(boxes=("boxes",) if "boxes" in fields else ()),)
    return (ListsPlace(("manifest",)),) if "manifest" in fields else ()


def _struct_list(kind: Any) -> Any:
    """Return the type of the list of structs that a field holds, also if it may be null; None if it holds none."""
    for arm in (kind, *get_args(kind)):
        if get_origin(arm) is list and _is_struct(get_args(arm)[0]):
            return arm
    return None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _model(struct: type, fields: dict[str, tuple[Any, Any]]) -> type[Body]:
    name = struct.__name__.removesuffix("ReqInput") + "Request"
    return create_model(name, __base__=Body, __doc__=struct.__doc__, **fields)  # type: ignore[call-overload, no-any-return]


def _default(item: msgspec.structs.FieldInfo) -> Any:
    if item.default_factory is not msgspec.NODEFAULT:
        return Field(default_factory=item.default_factory)
    return ... if item.default is msgspec.NODEFAULT else item.default


def _pydantic_type(kind: Any) -> Any:
    """Return the same type, in which each struct is replaced by a `Body` inside the body."""
    if _is_struct(kind):
        inner = {item.name: (_pydantic_type(item.type), _default(item)) for item in msgspec.structs.fields(kind)}
        return _model(kind, inner)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (None, Literal, Annotated):
        return kind
    arms = tuple(_pydantic_type(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return _union(args, arms)
    return origin[arms] if _struct_list(kind) is None else Annotated[origin[arms], WrapValidator(_unless(args[0]))]


def _union(kinds: tuple[Any, ...], arms: tuple[Any, ...]) -> Any:
    """Return the union of `arms`, made of `kinds`.

    Where a list and a struct are among them, an object is read as the struct, and anything else as the list.
    """
    if not (any(get_origin(kind) is list for kind in kinds) and any(map(_is_struct, kinds))):
        return Union[arms]  # noqa: UP007 - made from a list
    tagged = tuple(Annotated[arm, Tag(_tag(kind))] for kind, arm in zip(kinds, arms))
    chosen = Discriminator(lambda value: _tag(value if value is None else type(value)))
    return Annotated[Union[tagged], chosen]  # noqa: UP007


def _tag(kind: Any) -> str:
    """Return the arm of a union that a type belongs to: no identifier, so that an error's place does not show it."""
    if kind in (None, types.NoneType):
        return "a null"
    return "an object" if kind is dict or _is_struct(kind) else "a list"


def _unless(struct: type[msgspec.Struct]) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """Return a validator that leaves a list alone if its elements were already decoded as these structs.

    Either all elements of a list were, or none.
    """

    def validate(value: Any, validated: Callable[[Any], Any]) -> Any:
        return value if isinstance(value, list) and value and type(value[0]) is struct else validated(value)

    return validate
