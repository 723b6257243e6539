"""A JSON object in the text of an answer: it ends where its last brace closes, whatever its strings hold."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from rollout.http.openai.parsers.text import NotACall, Reading, Text

MAX_DEPTH = 256
"""Objects and arrays within each other; a deeper one is no call, as readers of JSON give up at some depth."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_PART = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object as it is written, and each of its members as that is written."""

    written: str
    members: dict[str, str]


def read_object(text: Text) -> Reading[JsonObject]:
    """Read a JSON object.  Raises `NotACall` for anything else."""
    begin = text.at
    yield from text.expect("{")
    members: dict[str, str] = {}
    yield from text.run(_SPACE)
    if (yield from text.character()) != "}":
        yield from _member(text, members)
        while (yield from text.expect(",", "}")) == ",":
            yield from text.run(_SPACE)
            yield from _member(text, members)
    else:
        text.at += 1
    return JsonObject(text.since(begin), members)


def _member(text: Text, members: dict[str, str]) -> Reading[None]:
    """Read a member and the white space behind it."""
    key = yield from _key(text)
    yield from text.run(_SPACE)
    begin = text.at
    yield from _value(text)
    members[key] = text.since(begin)
    yield from text.run(_SPACE)


def _value(text: Text) -> Reading[None]:
    """Read a value, and all that is in it."""
    closers: list[str] = []
    while True:
        yield from _simple_value(text, closers)
        while closers:
            yield from text.run(_SPACE)
            character = yield from text.expect(",", closers[-1])
            if character == ",":
                break
            closers.pop()
        if not closers:
            return
        yield from text.run(_SPACE)
        if closers[-1] == "}":
            yield from _key(text)


def _simple_value(text: Text, closers: list[str]) -> Reading[None]:
    """Read a value without the members behind its first one, whose brackets `closers` will close."""
    while True:
        yield from text.run(_SPACE)
        character = yield from text.character()
        if character not in _CLOSERS:
            break
        text.at += 1
        closers.append(_CLOSERS[character])
        if len(closers) > MAX_DEPTH:
            raise NotACall
        yield from text.run(_SPACE)
        if (yield from text.character()) == closers[-1]:
            return
        if character == "{":
            yield from _key(text)
    if character == '"':
        yield from _string(text)
    elif character in "tfn":
        yield from text.expect("true", "false", "null")
    else:
        yield from _number(text)


def _key(text: Text) -> Reading[str]:
    """Read a key and the colon behind it."""
    begin = text.at
    if (yield from text.character()) != '"':
        raise NotACall
    yield from _string(text)
    key: str = json.loads(text.since(begin))
    yield from text.run(_SPACE)
    yield from text.expect(":")
    return key


def _string(text: Text) -> Reading[None]:
    text.at += 1
    while True:
        yield from text.run(_PLAIN)
        character = yield from text.character()
        if character == '"':
            text.at += 1
            return
        if character != "\\":
            raise NotACall  # a control character
        escaped = (yield from text.need(2))[1]
        if escaped == "u":
            if not _HEX.fullmatch((yield from text.need(6))[2:]):
                raise NotACall
            text.at += 6
        elif escaped in '"\\/bfnrt':
            text.at += 2
        else:
            raise NotACall


def _number(text: Text) -> Reading[None]:
    begin = text.at
    number = yield from text.run(_NUMBER_PART)
    if not _NUMBER.fullmatch(number):
        is_cut = text.is_spent
        text.at = begin
        raise NotACall(is_cut=is_cut)
