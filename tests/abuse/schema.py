"""Bodies at their extremes, made from the schemas that the server itself publishes, so that new endpoints are covered.

Schemas are read as pydantic writes them.  Only `tests.abuse.good` knows single endpoints.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DATA_TAGS = {"native", "scores", "openai", "agents", "tokens", "sessions", "info"}
Body = dict[str, Any]

NUMBERS: list[Any] = [
    -(2**63) - 1, -(2**63), -(2**31), -1, 0, 1, 2, 511, 512, 65535, 65536, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1,
    2**63, 2**64, 10**30, 10**400, 1e-320, 1e-6, 0.5, 1.5, 3.5e38, 1e39, 1e308, True, "7", "nan", "inf",
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "\x00", "a\x00b", "0", "é" * 70, "x" * 513, "x" * 300_000, "../../../../etc/passwd", "/", "/dev/zero",
    "/proc/self/mem", ".", "ipc:///dev/null", "tcp://127.0.0.1:1", "\ud800", "\U0001f600", "'; --", "${jndi:x}", "%n%s",
    "null", "[]", "*", "torch.int128", "float31", "nccl", "mpi", "127.0.0.1:1", "a" * 64, "a" * 65, "default",
    "weight_update_group",
]  # fmt: skip
JUNK: list[Any] = [None, True, False, -1, 1.5, "", "x", [], [[]], [None], {}, {"": None}, [[[[]]]]]


@dataclass(frozen=True)
class Operation:
    """An endpoint; `schema` describes its body (empty without one), and `query` each parameter of its query."""

    method: str
    path: str
    tags: frozenset[str]
    schema: dict[str, Any]
    query: dict[str, dict[str, Any]]

    @property
    def is_control(self) -> bool:
        """True if the operation may change the server: it is not known to carry data or facts."""
        return not self.tags & DATA_TAGS

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        return self.schema.get("properties", {})


def operations(openapi: dict[str, Any]) -> list[Operation]:
    """Return every endpoint of the application."""
    found = []
    for path, methods in openapi["paths"].items():
        for method, spec in methods.items():
            content = spec.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            query = {item["name"]: item["schema"] for item in spec.get("parameters", ()) if item["in"] == "query"}
            found.append(Operation(method.upper(), path, frozenset(spec.get("tags", ())), schema, query))
    return found


def extremes(field: dict[str, Any]) -> Iterator[Any]:
    """Yield values of a field: junk, each allowed word, and both ends of each range."""
    yield from JUNK
    yield from _of_type(field)


def _of_type(field: dict[str, Any]) -> Iterator[Any]:
    for arm in field.get("anyOf") or field.get("oneOf") or ():
        yield from _of_type(arm)
    yield from field.get("enum", ())
    if "const" in field:
        yield field["const"]
    kind = field.get("type")
    if kind in ("integer", "number"):
        yield from NUMBERS
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            if name in field:
                yield from (field[name] - 1, field[name], field[name] + 1)
    elif kind == "string":
        yield from TEXTS
    elif kind == "boolean":
        yield from (True, False, 2, "yes")
    elif kind == "array":
        inner = list(itertools.islice(_of_type(field.get("items", {})), 40))
        yield from ([value] for value in inner)
        yield from ([value] * 2 for value in inner[:4])
        yield inner
        yield inner[:1] * 5000
    elif kind == "object":
        yield {"": ""}
        yield {"cpu": "ipc:///dev/null"}
        for name, part in field.get("properties", {}).items():
            yield from (plain(field) | {name: value} for value in itertools.islice(_of_type(part), 12))
        if isinstance(field.get("additionalProperties"), dict):
            yield from ({"cpu": value} for value in _of_type(field["additionalProperties"]))


def plain(schema: dict[str, Any]) -> Any:
    """Return the smallest value that a schema allows, with required fields only."""
    arms = schema.get("anyOf") or schema.get("oneOf")
    if arms:
        return plain(arms[0])
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        return {name: plain(schema["properties"][name]) for name in schema.get("required", ())}
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return {"string": "x", "boolean": False, "array": []}.get(str(kind))


def encode(body: Any) -> bytes:
    """Encode a body as JSON, even with values that UTF-8 refuses: lone surrogates."""
    return json.dumps(body).encode("utf-8", "surrogatepass")


def filled(base: Body, field: str, element: bytes, size: int) -> bytes:
    """Return a body of about `size` bytes whose field is a list that repeats `element`."""
    rest = {name: value for name, value in base.items() if name != field}
    head = b"{" + b"".join(encode(name) + b":" + encode(value) + b"," for name, value in rest.items())
    number = max(1, (size - len(head) - len(field) - 8) // (len(element) + 1))
    return head + encode(field) + b":[" + b",".join([element] * number) + b"]}"


def is_list(field: dict[str, Any]) -> bool:
    arms = field.get("anyOf") or field.get("oneOf") or [field]
    return any(arm.get("type") == "array" for arm in arms)
