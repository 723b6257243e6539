"""Names, dtypes, shapes and boxes of tensors in messages: as JSON until someone asks for them, and as lists.

A trainer sends the same lists at each refresh.  JSON that came before is passed on under its digest, and is not read
again: the main process has read it once, and an engine may keep what it made of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from rollout.core.messages.message import Size

PIECE = 1024
"""Elements of a long list that are decoded at once: about a millisecond, for which all threads wait."""

Json = bytes | msgspec.Raw
StrictSize = Annotated[Size, msgspec.Meta(ge=0, le=2**63 - 1)]
Boxes = list[list[list[Size]] | None]
"""The part of each tensor that comes: [start, stop] in each dimension of its shape; None: all of it."""
StrictBoxes = list[list[tuple[StrictSize, StrictSize]] | None]


class Lists(NamedTuple):
    """Parallel lists of tensors; `boxes` None: all are whole."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    boxes: Boxes | None = None


class ManifestEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A logical tensor as the trainer announces it.  There may be 100,000 in a body, which is read as these structs."""

    name: str
    dtype: str
    shape: list[StrictSize]
    fingerprint: str | None = None  # 16 hex digits, see weight_sync.fingerprint


class ManifestLists(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A manifest in lists.  `fingerprints`: 16 hex digits for each tensor, end to end; null: none are stated."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[StrictSize]]
    fingerprints: str | None = None


class _Parts(msgspec.Struct):
    names: msgspec.Raw
    dtypes: msgspec.Raw
    shapes: msgspec.Raw
    boxes: msgspec.Raw = msgspec.Raw(b"null")


_PARTS = msgspec.json.Decoder(_Parts)


def joined_lists(names: Json, dtypes: Json, shapes: Json, boxes: Json | None = None) -> bytes:
    """Return the JSON object of lists in JSON."""
    more = (b',"boxes":', boxes) if boxes is not None else ()
    return b"".join((b'{"names":', names, b',"dtypes":', dtypes, b',"shapes":', shapes, *more, b"}"))


def encode_lists(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    boxes: Sequence[object] | None = None,
) -> bytes:
    """Return the JSON object of lists, without white space."""
    lists = (names, dtypes, shapes) if boxes is None else (names, dtypes, shapes, boxes)
    return joined_lists(*map(msgspec.json.encode, lists))


def decode_lists(data: bytes) -> Lists:
    """Return the lists of a JSON object from `joined_lists`.  Raises `msgspec.ValidationError`."""
    parts = _PARTS.decode(data)
    names = decode_in_pieces(parts.names, list[str])
    dtypes = decode_in_pieces(parts.dtypes, list[str])
    shapes = decode_in_pieces(parts.shapes, list[list[int]])
    boxes = None if bytes(parts.boxes) == b"null" else decode_in_pieces(parts.boxes, Boxes)
    return Lists(names, dtypes, shapes, boxes)


def digest_of(data: bytes) -> bytes:
    """Return 32 bytes that stand for this JSON.

    It is a SHA-256, so that no other lists can be made to have it.  Processors have instructions for it, with which it
    takes half the time of BLAKE2b.
    """
    return hashlib.sha256(data).digest()


def decode_in_pieces(data: Json, kind: Any) -> list[Any]:
    """Decode a list of JSON as `kind`.  Other threads run between its pieces.  Raises `msgspec.ValidationError`."""
    return [element for piece in pieces_of(data, kind) for element in piece]


def pieces_of(data: Json, kind: Any) -> Iterator[list[Any]]:
    """Yield the list of `decode_in_pieces` piece by piece."""
    elements = msgspec.json.decode(data, type=list[msgspec.Raw])
    for start in range(0, len(elements), PIECE):
        piece = b",".join(elements[start : start + PIECE])  # a `msgspec.Raw` has a buffer
        yield msgspec.json.decode(b"[%b]" % piece, type=kind)


class WithLists:
    """Mixin of verbs with lists of tensors.  The lists are empty where `tensor_lists` has them, as the JSON that came.

    `lists_digest`: of that JSON.  `boxes` None: the verb takes none.
    """

    __slots__ = ()

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    boxes: Boxes | None = None
    tensor_lists: bytes | None
    lists_digest: bytes | None

    def lists(self) -> Lists:
        """Return the names, dtypes, shapes and boxes.  JSON is decoded at each call."""
        if self.tensor_lists is not None:
            return decode_lists(self.tensor_lists)
        return Lists(self.names, self.dtypes, self.shapes, self.boxes)

    def digest(self) -> bytes:
        """Return what stands for these lists: calls of one digest have equal lists."""
        if self.lists_digest is not None:
            return self.lists_digest
        return digest_of(self.tensor_lists or encode_lists(*self.lists()))
