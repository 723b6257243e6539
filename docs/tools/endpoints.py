"""The endpoints of a server, from the schema that it serves at /openapi.json."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from docs.tools.tables import code, table
from rollout.core.args.server_args import ServerArgs
from rollout.dashboard.history import ServerHistory
from rollout.families.registry import load_model_config
from rollout.http.gate import OPEN_PATHS, Access
from rollout.http.metrics.metrics import Metrics
from rollout.server.app import build_app
from rollout.tokenizer_manager.channel import SchedulerChannel
from rollout.tokenizer_manager.manager import TokenizerManager

DIALECTS = {
    "native": ("generate", "SGLang"),
    "openai": ("openai", "OpenAI"),
    "agents": ("agents", "Anthropic, OpenAI"),
    "scores": ("scores", "OpenAI, vLLM, SGLang"),
    "tokens": ("vllm", "vLLM, SkyRL"),
    "info": ("information", "SGLang, vLLM"),
    "sessions": ("sessions", "Lockstep"),
    "control": ("control", "SGLang"),
    "adapters": ("control", "SGLang"),
    "profile": ("control", "SGLang"),
    "experts": ("experts", "SGLang"),
    "weights": ("weights", "SGLang"),
    "vLLM control": ("vllm_control", "vLLM"),
    "vLLM weights": ("vllm_weights", "vLLM"),
    "vLLM workers": ("vllm_weights", "vLLM, AReaL, SkyRL"),
    "dashboard": ("information", "Lockstep"),
}
"""By the tag of an endpoint: the page that lists it, and whose clients call it."""
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str
    tag: str
    key: str
    """The key that it asks for: none, API or admin."""
    description: str
    fields: tuple[tuple[str, str, str, str], ...]
    """Name, place (body, query or path), type and default."""

    @property
    def page(self) -> str:
        return DIALECTS[self.tag][0]


def parts() -> dict[str, Callable[[], str]]:
    by_page = {f"endpoints of {page}": partial(endpoints_of, page) for page, _ in DIALECTS.values()}
    return {"endpoints": endpoints, **by_page}


def endpoints() -> str:
    """Return a table of all endpoints."""
    rows = [
        (code(one.method), f"[{code(one.path)}]({one.page}.md#{_anchor(one)})", DIALECTS[one.tag][1], one.key)
        for one in sorted(all_endpoints(), key=lambda one: one.path)
    ]
    return table(("method", "path", "clients", "key"), rows)


def endpoints_of(page: str) -> str:
    """Return what each endpoint of a page does, and its fields."""
    written: list[str] = []
    for path, found in _by_path(page).items():
        first = found[0]
        methods = ", ".join(one.method for one in found)
        written += [f"## {path}", f"{code(methods)} · clients: {DIALECTS[first.tag][1]} · key: {first.key}"]
        written += [_escaped(first.description)] if first.description else []
        fields = dict.fromkeys(field for one in found for field in one.fields)
        if fields:
            rows = [(code(name), place, kind, default) for name, place, kind, default in fields]
            written.append(table(("field", "in", "type", "default"), rows).rstrip("\n"))
    return "\n\n".join([*written, ""])


def _by_path(page: str) -> dict[str, list[Endpoint]]:
    """Group the endpoints of a page by path."""
    found: dict[str, list[Endpoint]] = {}
    for one in all_endpoints():
        if one.page == page:
            found.setdefault(one.path, []).append(one)
    return found


def _anchor(one: Endpoint) -> str:
    return "".join(letter for letter in one.path if letter.isalnum() or letter in "_-").lower()


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


@cache
def all_endpoints() -> tuple[Endpoint, ...]:
    """Return the endpoints of a server, in the order of its schema."""
    schema, control_paths = asyncio.run(_schema())
    return tuple(
        Endpoint(
            method.upper(),
            path,
            operation["tags"][0],
            "none" if path in OPEN_PATHS else "admin" if path in control_paths else "API",
            operation.get("description", ""),
            tuple(_fields(operation)),
        )
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    )


async def _schema() -> tuple[dict[str, Any], frozenset[str]]:
    """Return the schema of a server, and the paths that take the admin key where there is one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        args = ServerArgs(model_path=folder, skip_tokenizer_init=True, served_model_name="model")
        channel = SchedulerChannel(folder)
        try:
            manager = TokenizerManager(args, load_model_config(Path(folder)), channel, [])
            metrics = Metrics("docs")
            app = build_app(manager, metrics, ServerHistory(manager, metrics))
        finally:
            channel.close()
        (access,) = (middleware.kwargs["access"] for middleware in app.user_middleware if "access" in middleware.kwargs)
        assert isinstance(access, Access)
        return app.openapi(), access.control_paths


def _fields(operation: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for parameter in operation.get("parameters", []):
        default = "required" if parameter.get("required") else _default(parameter["schema"])
        yield parameter["name"], parameter["in"], _type(parameter["schema"]), default
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield from _body_fields("", content["schema"])


def _body_fields(prefix: str, schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the fields of a body; the fields of an object in it have its name before theirs."""
    required = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        yield prefix + name, "body", _type(inner), "required" if name in required else _default(inner)
        yield from _body_fields(f"{prefix}{name}.", _object_in(inner))


def _object_in(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the object that a field holds, or nothing."""
    for one in (schema, *schema.get("anyOf", ())):
        if one.get("properties"):
            return dict(one)
    return {}


def _default(schema: dict[str, Any]) -> str:
    return code(json.dumps(schema["default"])) if "default" in schema else "-"


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    if "anyOf" in schema:
        kinds = dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(kind)
