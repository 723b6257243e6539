"""The file of `lockstep serve --config`: one object in YAML, JSON or TOML, in which no key stands twice."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rollout.core.errors import StartupError

# A word that PyYAML repeats, such as an alias: `api_key: *secret` would print the key.  Names of tokens are harmless.
_REPEATED = re.compile(r"""\s*['"](?!<)[^'"]{2,}['"].*""")


class _GivenTwiceError(Exception):
    """The error for a key that stands twice."""


def read(path: Path) -> dict[Any, Any]:
    """Return the object in a file.  Raises `StartupError`, without any of the content."""
    if path.suffix.lower() not in _READERS:
        raise StartupError(f"--config {path}: the name must end with one of {', '.join(_READERS)}")
    try:
        text = path.read_text(encoding="utf-8")
        content = _READERS[path.suffix.lower()](text)
    except _GivenTwiceError as error:
        raise StartupError(f"--config {path}: the key {error} is given twice") from None
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise StartupError(f"--config {path} cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise StartupError(f"--config {path}: {line}{_REPEATED.sub('', str(error.problem))}") from None
    except yaml.YAMLError as error:
        raise StartupError(f"--config {path} cannot be read: {str(error).splitlines()[0]}") from None
    except ValueError:  # its message may repeat the value
        raise StartupError(f"--config {path} has a value that is not of its kind: a date or a number") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"--config {path} must hold one setting a line, as `port: 30000`")
    return content


def _from_yaml(text: str) -> Any:
    node = yaml.compose(text, yaml.SafeLoader)
    if isinstance(node, yaml.MappingNode):
        _require_unique([key.value for key, _ in node.value])
    return yaml.safe_load(text)


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require_unique([key for key, _ in pairs])
    return dict(pairs)


def _require_unique(keys: list[str]) -> None:
    if doubled := next((key for key in keys if keys.count(key) > 1), None):
        raise _GivenTwiceError(doubled)


_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _from_yaml,
    ".yml": _from_yaml,
    ".json": _from_json,
    ".toml": tomllib.loads,
}
