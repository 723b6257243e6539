"""Bodies for weight endpoints, drawn from the schemas that the server itself publishes (/openapi.json).

Every endpoint with the tag "weights" is found, also one that is added later; each field is left out, null, nearly
right, or junk of any JSON type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

SIZES = [-(2**63), -1, 0, 1, 2, 3, 16, 48, 320, 2**31, 2**40, 2**48, 2**62, 2**63, 2**64, 10**30]
TEXTS = [
    "",
    "0",
    "v1",
    "full",
    "bfloat16",
    "float32",
    "torch.float32",
    "float31",
    "gloo",
    "mpi",
    "ipc://@nobody",
    "é\x00",
]
FORBIDDEN = {"reset_tensors", "reset"}  # these calls destroy the weights on purpose

Body = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """A weight endpoint; `schema` is of its body."""

    method: str
    path: str
    schema: dict[str, Any]


def weight_endpoints(openapi: dict[str, Any]) -> list[Endpoint]:
    """Return the endpoints with a body that are tagged, or named, after weights."""
    endpoints = []
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if content and ("weights" in operation.get("tags", ()) or "weight" in path):
                endpoints.append(Endpoint(method.upper(), path, content["application/json"]["schema"]))
    return endpoints


def junk() -> st.SearchStrategy[Any]:
    """Draw any small JSON value."""
    text = st.text(alphabet=st.characters(exclude_characters="/.", exclude_categories=["Cs"]), max_size=8)
    scalar = st.none() | st.booleans() | st.sampled_from(SIZES) | st.floats(allow_nan=False) | text
    return st.recursive(scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))


def bodies(schema: dict[str, Any], texts: list[str]) -> st.SearchStrategy[Body]:
    """Draw bodies of an endpoint; `texts` are names and paths that the server under test knows."""
    fields = {}
    for name, field in schema.get("properties", {}).items():
        fields[name] = st.one_of(_near(field, texts), _near(field, texts), _near(field, texts), st.none(), junk())
    required = set(schema.get("required", ()))
    most = {name: value for name, value in fields.items() if name in required}
    rest = {name: value for name, value in fields.items() if name not in required}
    return st.one_of(st.fixed_dictionaries(most, optional=rest), st.fixed_dictionaries({}, optional=fields))


def _near(field: dict[str, Any], texts: list[str]) -> st.SearchStrategy[Any]:
    """Draw values of about the right type."""
    arms = field.get("anyOf") or field.get("oneOf")
    if arms:
        return st.one_of([_near(arm, texts) for arm in arms])
    choices = [choice for choice in field.get("enum", [field.get("const")]) if choice not in (None, *FORBIDDEN)]
    if choices:
        return st.sampled_from([*choices, "other"])
    kind = field.get("type")
    if kind == "string":
        return st.sampled_from([*texts, *TEXTS])
    if kind in ("integer", "number"):
        return st.sampled_from(SIZES)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind == "array":
        return st.lists(_near(field.get("items", {}), texts), max_size=3)
    if kind == "object" and "properties" in field:
        return bodies(field, texts)
    if kind == "object":
        inner = field.get("additionalProperties")
        values = _near(inner, texts) if isinstance(inner, dict) else junk()
        return st.dictionaries(st.sampled_from(["cpu", "CPU-0", "", "x"]), values, max_size=2)
    return junk()
