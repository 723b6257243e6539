"""Mutations of JSON bodies: another kind of value, a neighbour of a number, broken base64, a missing field."""

from __future__ import annotations

import base64
import binascii
import copy
import random
from collections.abc import Callable
from typing import Any

from tests.abuse.schema import JUNK, NUMBERS, TEXTS

Path = tuple[str | int, ...]
ANY_FIELD = 0.15
"""Share of mutations that may hit a plain field of the body, too."""
MAX_MUTATIONS = 3
MAX_COPIES = 200
WORDS: list[Any] = [
    "role", "content", "tool_calls", "function", "arguments", "name", "type", "text", "image_url", "parameters",
    "properties", "$ref", "start", "shape", "dtype", "data", "__class__", "constructor", "id", "tool_call_id", "user",
    "assistant", "tool", "system", "descr", "fortran_order", "{{ 7*7 }}", "{% for x in y %}", "<tool_call>", "</think>",
]  # fmt: skip
SMALL_TEXTS = [text for text in TEXTS if len(text) < 1000]


def mutated(rng: random.Random, body: Any, structured: list[str]) -> Any:
    """Return a copy of `body` with one to three mutations, mostly within the fields named `structured`."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, MAX_MUTATIONS)):
        paths = [path for path in places(body) if path]
        inner = [path for path in paths if path[0] in structured]
        chosen = paths if not inner or rng.random() < ANY_FIELD else inner
        if not chosen:
            return _other(rng, body)
        body = _changed(rng, body, rng.choice(chosen))
    return body


def places(value: Any, prefix: Path = ()) -> list[Path]:
    """Return the path of every value in a JSON tree, the root first."""
    found: list[Path] = [prefix]
    if isinstance(value, dict):
        for name, part in value.items():
            found += places(part, (*prefix, name))
    elif isinstance(value, list):
        for index, part in enumerate(value[:64]):
            found += places(part, (*prefix, index))
    return found


def _changed(rng: random.Random, body: Any, path: Path) -> Any:
    holder = body
    for step in path[:-1]:
        holder = holder[step]
    rng.choice(_OPERATIONS)(rng, holder, path[-1])
    return body


# --- operations: each changes one place of its holder -------------------------------------------------------------


def _replace(rng: random.Random, holder: Any, key: Any) -> None:
    holder[key] = _other(rng, holder[key])


def _near(rng: random.Random, holder: Any, key: Any) -> None:
    holder[key] = _neighbour(rng, holder[key])


def _remove(rng: random.Random, holder: Any, key: Any) -> None:
    del holder[key]


def _add(rng: random.Random, holder: Any, key: Any) -> None:
    value, name = holder[key], rng.choice([*WORDS, *SMALL_TEXTS])
    if isinstance(value, dict):
        value[name] = _other(rng, None)
    elif isinstance(value, list):
        value.insert(rng.randint(0, len(value)), _other(rng, None))
    else:
        holder[key] = {name: value}


def _repeat(rng: random.Random, holder: Any, key: Any) -> None:
    value, times = holder[key], rng.choice([2, 3, MAX_COPIES])
    if isinstance(value, (str, list)):
        holder[key] = value[:256] * times
    elif isinstance(value, dict):
        holder[key] = {f"{name}{number}": part for number in range(times) for name, part in list(value.items())[:4]}
    else:
        holder[key] = [value] * times


def _nest(rng: random.Random, holder: Any, key: Any) -> None:
    for _ in range(rng.choice([1, 2, 40])):
        holder[key] = [holder[key]] if rng.random() < 0.5 else {rng.choice(WORDS): holder[key]}


def _swap(rng: random.Random, holder: Any, key: Any) -> None:
    other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


_OPERATIONS: list[Callable[[random.Random, Any, Any], None]] = [
    *(_replace, _replace, _near, _near, _near),
    *(_remove, _add, _repeat, _nest, _swap),
]


# --- values -------------------------------------------------------------------------------------------------------


def _other(rng: random.Random, value: Any) -> Any:
    """Return a value that need not be of the same kind."""
    return copy.deepcopy(rng.choice(rng.choice([JUNK, NUMBERS, SMALL_TEXTS, WORDS])))


def _neighbour(rng: random.Random, value: Any) -> Any:
    """Return a value of about the same form."""
    if isinstance(value, bool):
        return rng.choice([not value, int(value), str(value)])
    if isinstance(value, int):
        if abs(value) > 2**62:
            return -value
        return rng.choice([value + 1, value - 1, -value, float(value), value + 0.5, str(value), bool(value), [value]])
    if isinstance(value, float):
        return rng.choice(
            [-value, value * 1e300, value / 1e300, str(value), float("nan"), float("inf"), round(value, 1)]
        )
    if isinstance(value, str):
        return _broken_base64(rng, value) if len(value) >= 16 and rng.random() < 0.7 else _broken_text(rng, value)
    if isinstance(value, list) and value:
        return rng.choice([value[1:], value[::-1], value[:1], [value], dict(enumerate(map(str, value)))])
    if isinstance(value, dict) and value:
        return rng.choice(
            [list(value), list(value.values()), [value], {str(part): name for name, part in value.items()}]
        )
    return [value]


def _broken_text(rng: random.Random, text: str) -> str:
    at = rng.randint(0, len(text))
    part = rng.choice(["\x00", "\ud800", "\u202e", "\U0001f600", "}", '"', "{{", "=", " ", "é" * 9])
    return rng.choice([text[:at], text[at:], text[:at] + part + text[at:], text.upper(), text + text])


def _broken_base64(rng: random.Random, text: str) -> str:
    """Return base64 of the same bytes with some changed, cut, repeated or put in."""
    try:
        data = bytearray(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error):
        return _broken_text(rng, text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), 160) or 1)  # headers are at the beginning
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[at] = rng.randrange(256)
        elif kind == 1 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at : at + rng.randint(1, 16)]
        elif kind == 3:
            data[at:at] = rng.choice([b"9" * 12, b"\xff" * 8, b"\x00" * 8, b"-1", b"[[", b"(", b'"', b"None", b"e99"])
        else:
            del data[rng.randint(0, len(data)) :]
    return base64.b64encode(bytes(data)).decode()


def _turned(value: dict[str, Any]) -> dict[str, Any]:
    """Exchange the names of an object and their values."""
    return {str(part)[:100]: name for name, part in value.items()}
