"""The Python API, from signatures and docstrings of its public names."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lockstep_rl
from docs.tools.tables import code, first_sentence, table

PUBLIC: dict[str, tuple[str, ...]] = {
    "clients": ("Client", "AsyncClient"),
    "fleets": ("Fleet", "AsyncFleet", "FleetPolicy"),
    "outputs": (
        *("GenerateOptions", "Timeouts", "GenerationOutput", "FinishReason", "VersionSpan", "TokenLogprob"),
        *("RouteLayout", "ScoredSequence", "Classes", "RoutedExperts", "SamplingMask", "TokenLogprobs"),
        "HiddenStates",
    ),
    "errors": (
        *("LockstepError", "BadRequest", "StartupError", "ClientError", "ServerError", "ServerUnreachable"),
        *("ServerTimeout", "ResponseFormatError", "FleetError", "JoinError", "CaptureError", "WeightSyncError"),
        *("MissingPackage", "PackageClash"),
    ),
    "sender": ("WeightSender", "WeightUpdate", "RefreshReport", "EngineReport", "split_fused_experts"),
    "replay": ("force_routes", "record_routes", "pad_routes", "masked_logprobs"),
    "numerics": ("use_engine_numerics", "EngineNumerics", "engine_logprobs"),
    "engine": ("Engine",),
}
"""The public names of `lockstep_rl`, by the part of the reference that describes them."""
STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
SAME_AS = {"AsyncClient": "Client", "AsyncFleet": "Fleet"}
"""Classes whose methods are another one's, as coroutines."""
OBJECT = set(dir(Exception))


def parts() -> dict[str, Callable[[], str]]:
    return {"python": overview, **{f"python {name}": partial(part, name) for name in PUBLIC}}


def overview() -> str:
    """Return a table of all public names."""
    rows = [
        (f"[{code(name)}]({place}.md#{name.lower()})", first_sentence(inspect.getdoc(value) or ""))
        for place, names in PUBLIC.items()
        for name, value in members(names)
    ]
    return table(("name", "what"), rows)


def part(name: str) -> str:
    """Return the reference of the names of a part."""
    return "\n\n".join(_described(public, value) for public, value in members(PUBLIC[name])) + "\n"


def members(names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return public names with their values."""
    return [(name, getattr(lockstep_rl, name)) for name in names]


def _described(name: str, value: Any) -> str:
    if not inspect.isclass(value):
        return "\n\n".join([f"## {name}", _signature(name, value), docstring(value)])
    if name in SAME_AS:
        same = f"Its methods are [{SAME_AS[name]}](#{SAME_AS[name].lower()})'s, to be awaited."
        return "\n\n".join([f"## {name}", _signature(name, value), docstring(value), same])
    text = [f"## {name}"]
    text += [_signature(name, value)] if _has_own_constructor(value) else []
    text += [docstring(value)]
    fields = list(_fields(value))
    text += [table(("field", "type", "default"), fields).rstrip("\n")] if fields else []
    for method, function in methods(value):
        text += [f"### {method}", _signature(method, function), docstring(function)]
    return "\n\n".join(part for part in text if part)


def _has_own_constructor(kind: type) -> bool:
    return "__init__" in vars(kind) and not dataclasses.is_dataclass(kind)


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of a dataclass or of a typed dictionary."""
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            default = "required"
            if field.default is not dataclasses.MISSING:
                default = code(repr(field.default))
            elif field.default_factory is not dataclasses.MISSING:
                default = "a new one"
            if not field.name.startswith("_"):
                yield code(field.name), code(_type(field.type)), default
    elif hasattr(kind, "__total__"):
        for name, hint in kind.__annotations__.items():
            yield code(name), code(_type(getattr(hint, "__forward_arg__", hint))), "-"


def methods(kind: type) -> list[tuple[str, Any]]:
    """Return the public methods of a class, its bases' too, in the order of the code."""
    found = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        function: Any = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        bare: Any = function.fget if isinstance(function, property) else function
        bare = inspect.unwrap(bare) if callable(bare) else None
        if name.startswith("_") or name in OBJECT or not inspect.isfunction(bare):
            continue
        if not bare.__module__.startswith(("rollout", "weight_sync", "capture", "eplb")):
            continue
        if issubclass(kind, Exception) and name not in vars(kind):
            continue
        found[name] = value if isinstance(value, property) else function
    return sorted(found.items(), key=lambda item: _place(item[1]))


def _place(function: Any) -> tuple[str, int]:
    bare: Any = inspect.unwrap(function.fget if isinstance(function, property) else function)  # type: ignore[arg-type]
    return bare.__module__, bare.__code__.co_firstlineno


def _signature(name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"```python\n{name}: {_type(value.fget.__annotations__.get('return', ''))}\n```"
    signature = inspect.signature(value)
    bound = [_parameter(parameter) for key, parameter in signature.parameters.items() if key != "self"]
    plain = _marked(signature, bound)
    result = "" if inspect.isclass(value) else _result(signature.return_annotation)
    line = f"{name}({', '.join(plain)}){result}"
    if len(line) > 100:
        line = f"{name}(\n    " + ",\n    ".join(plain) + f",\n){result}"
    return f"```python\n{line}\n```"


def _marked(signature: inspect.Signature, bound: list[str]) -> list[str]:
    """Put `*` before the first parameter that is given by name alone."""
    kinds = [parameter.kind for key, parameter in signature.parameters.items() if key != "self"]
    by_name = inspect.Parameter.KEYWORD_ONLY
    if by_name in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        first = kinds.index(by_name)
        return [*bound[:first], "*", *bound[first:]]
    return bound


def _parameter(parameter: inspect.Parameter) -> str:
    stars = STARS.get(parameter.kind, "")
    hint = "" if parameter.annotation is inspect.Parameter.empty else f": {_type(parameter.annotation)}"
    default = "" if parameter.default is inspect.Parameter.empty else f" = {_value(parameter.default)}"
    return f"{stars}{parameter.name}{hint}{default}"


def _value(value: Any) -> str:
    shown = repr(value)
    return "..." if " at 0x" in shown else shown


def _result(hint: Any) -> str:
    return "" if hint is inspect.Signature.empty else f" -> {_type(hint)}"


def _type(hint: Any) -> str:
    """Return a type as a reader of the API sees it: a `Call[X]` returns an X."""
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    text = re.sub(r"^(?:Call|Steps)\[(.*)\]$", r"\1", text.strip("'\""))
    return text.replace("JsonObject", "dict[str, Any]")


def docstring(value: Any) -> str:
    """Return a docstring as a page shows it."""
    return _escaped(inspect.getdoc(value) or "")


def _escaped(text: str) -> str:
    """Write `<` as HTML outside code; a code block of a docstring is indented."""
    lines = [
        line if line.startswith("    ") else re.sub(r"<(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", "&lt;", line)
        for line in text.splitlines()
    ]
    return "\n".join(lines)
