"""JSON of bodies: decoded as plain values, but for long lists, whose elements are not made twice or not made at all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.core.errors import TooLarge
from rollout.core.messages.tensor_lists import Json, decode_in_pieces
from rollout.http.known_lists import CutBody, KnownLists, NotThere, RawLists
from rollout.http.protocol import Body, ListsPlace
from weight_sync.known_calls import without_collections

HEAVY_BODY_BYTES = 1024 * 1024
"""Bodies over this size are parsed one at a time: parsed, they may take fifteen times their size."""
MAX_BODY_OBJECTS = 1 << 20
"""Strings, arrays and objects in a body; a manifest of 100,000 tensors has 900,000."""
INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_Fields = dict[str, msgspec.Raw]
_EMPTY, _NULL = msgspec.Raw(b"[]"), msgspec.Raw(b"null")


def decode(data: bytes, model: type[Body], known: KnownLists | None = None) -> tuple[Any, RawLists | None]:
    """Return a body as plain values, and the lists of tensors that it has at the place that `model` names.

    The lists are empty in the values then.  Lists that are not valid as they are, or all without `known`, stay values.
    Raises what `INVALID` holds, and `TooLarge` for more than `MAX_BODY_OBJECTS`.
    """
    cut = known.cut(data) if known is not None and model.list_places else None
    if cut is not None:
        with contextlib.suppress(NotThere):
            return _decode_cut(cut, model)
    if len(data) <= HEAVY_BODY_BYTES:
        return _decode(data, model, known)
    _check_objects(data)
    with without_collections():  # they would block everything meanwhile
        return _decode(data, model, known)


def _decode_cut(cut: CutBody, model: type[Body]) -> tuple[Any, RawLists]:
    """Decode a body that has stand-ins for its lists.  Raises `NotThere`, also for JSON that is not valid."""
    if len(cut.data) > HEAVY_BODY_BYTES:
        _check_objects(cut.data)
    for place in model.list_places:
        try:
            return _without_lists(cut.data, place, place.path, cut)
        except LookupError:
            continue
        except INVALID:
            break
    raise NotThere


def _decode(data: bytes, model: type[Body], known: KnownLists | None) -> tuple[Any, RawLists | None]:
    for place in model.list_places:
        if known is None:
            break
        try:
            return _without_lists(data, place, place.path, known)
        except LookupError:
            continue  # no lists there
        except INVALID:
            break
    return _decode_structs(data, model), None


def _without_lists(
    data: Json, place: ListsPlace, path: Sequence[str | int], known: KnownLists | CutBody
) -> tuple[Any, RawLists]:
    """Decode JSON that has the lists of `place` at `path`.

    Raises `LookupError` if it has none there, else as `KnownLists.read`.
    """
    if not path:
        fields = msgspec.json.decode(data, type=_Fields)
        boxes = [name for name in place.boxes if name in fields]
        lists = known.read(*(fields[name] for name in (*place.names, *boxes)))
        return _plain(fields | dict.fromkeys(place.names, _EMPTY) | dict.fromkeys(boxes, _NULL)), lists
    step = path[0]
    parts: Any = msgspec.json.decode(data, type=list[msgspec.Raw] if isinstance(step, int) else _Fields)
    value, lists = _without_lists(parts[step], place, path[1:], known)
    parts[step] = _EMPTY
    outer = _plain(parts)
    outer[step] = value
    return outer, lists


def _plain(parts: Any) -> Any:
    """Decode the values of a dictionary, or the elements of a list."""
    if isinstance(parts, list):
        return [msgspec.json.decode(part) for part in parts]
    return {name: msgspec.json.decode(part) for name, part in parts.items()}


def _decode_structs(data: bytes, model: type[Body]) -> Any:
    """Decode a body, and the fields in its `struct_lists` as lists of their structs.

    A list that does not fit its type is decoded as plain values, and refused later.
    """
    if not model.struct_lists:
        return msgspec.json.decode(data)
    try:
        fields = msgspec.json.decode(data, type=_Fields)
    except msgspec.ValidationError:  # no object
        return msgspec.json.decode(data)
    return {name: _decode_field(raw, model.struct_lists.get(name)) for name, raw in fields.items()}


def _decode_field(raw: msgspec.Raw, kind: Any) -> Any:
    if kind is not None:
        with contextlib.suppress(msgspec.ValidationError):
            return decode_in_pieces(raw, kind)
    return msgspec.json.decode(raw)


def _check_objects(data: bytes) -> None:
    """Refuse what would take thirty times its size in memory, before it does.  Raises `TooLarge`."""
    characters = np.frombuffer(data, dtype=np.uint8)  # `bytes.count` takes three times as long
    quotes, arrays, objects = (int(np.count_nonzero(characters == ord(each))) for each in '"[{')
    if quotes // 2 + arrays + objects <= MAX_BODY_OBJECTS:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    count = plain.count(b'"') // 2
    if count <= MAX_BODY_OBJECTS:
        outside = b"".join(plain.split(b'"')[::2])
        count += outside.count(b"[") + outside.count(b"{")
    if count > MAX_BODY_OBJECTS:
        raise TooLarge(f"the body has over {MAX_BODY_OBJECTS} strings, arrays and objects")
