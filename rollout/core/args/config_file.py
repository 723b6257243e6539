"""The file of `lockstep serve --config`: one object in YAML, JSON or TOML, in which no key stands twice."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import yaml

from rollout.core.errors import StartupError


def read(path: Path) -> dict[Any, Any]:
    """Return the object in a file.  Raises `StartupError`, without any of the content."""
    if path.suffix.lower() not in _READERS:
        raise StartupError(f"--config {path}: the name must end with one of {', '.join(_READERS)}")
    try:
        text = path.read_text(encoding="utf-8")
        content = _READERS[path.suffix.lower()](text)
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise StartupError(f"--config {path} cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise StartupError(f"--config {path}: {line}{error.problem}") from None
    except yaml.YAMLError as error:
        raise StartupError(f"--config {path} cannot be read: {str(error).splitlines()[0]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"--config {path} must hold one setting a line, as `port: 30000`")
    return content


class _UniqueKeys(yaml.SafeLoader):
    """YAML without objects, in which no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping.  Raises `ConstructorError` for a key that is there already."""
        keys = [key.value for key, _ in node.value]
        if doubled := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {doubled} is given twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _from_yaml(text: str) -> Any:
    loader = _UniqueKeys(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if doubled := next((key for key in keys if keys.count(key) > 1), None):
        raise StartupError(f"--config: the key {doubled} is given twice")
    return dict(pairs)


_READERS = {".yaml": _from_yaml, ".yml": _from_yaml, ".json": _from_json, ".toml": tomllib.loads}
