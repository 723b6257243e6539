"""The settings of a server from a command line, and from a call in Python.

The command line is derived from the fields: `--field-name` and the field's other names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rollout.core.errors import StartupError
from rollout.core.server_args import ServerArgs


def add_cli_args(parser: argparse.ArgumentParser, settings: type = ServerArgs) -> None:
    """One flag per field of a dataclass: `--field-name`, typed, with the field's help and default."""
    hints = typing.get_type_hints(settings)
    for item in dataclasses.fields(settings):
        flag = "--" + item.name.replace("_", "-")
        aliases = ["--" + alias.replace("_", "-") for alias in item.metadata.get("aliases", ())]
        kind, choices = _cli_type(hints[item.name])
        help_text = item.metadata["help"]
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default, help=help_text)
        else:
            parser.add_argument(
                flag,
                *aliases,
                dest=item.name,
                type=kind,
                choices=item.metadata.get("choices", choices),
                default=item.default,
                required=item.metadata.get("required", False),
                help=f"{help_text} (default: {item.default})" if item.default not in (None, "") else help_text,
            )


def args_of_call(settings: Mapping[str, Any]) -> ServerArgs:
    """The validated settings of a call in Python: fields or their aliases by name, objects instead of JSON.

    Raises `StartupError`.
    """
    given = dict(settings)
    for item in dataclasses.fields(ServerArgs):
        for alias in item.metadata.get("aliases", ()):
            if alias in given:
                if item.name in given:
                    raise StartupError(f"{alias} and {item.name} are one setting: give one of them")
                given[item.name] = given.pop(alias)
    given = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}
    args = ServerArgs(**given)
    args.validate()
    return args


def server_args_from_namespace(namespace: argparse.Namespace) -> ServerArgs:
    """The validated settings of a parsed command line.  Raises `StartupError`."""
    settings = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(ServerArgs)}
    secrets = {
        f.name: _secret(f.name, settings[f.name]) for f in dataclasses.fields(ServerArgs) if f.metadata.get("secret")
    }
    args = ServerArgs(**settings | secrets)
    args.validate()
    return args


def _secret(name: str, given: str | None) -> str | None:
    """A key from the command line, which others on the machine can read, from a file, or from the environment."""
    if given is None:
        return os.environ.get(f"LOCKSTEP_{name.upper()}")
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--{name.replace('_', '-')} {given}: {error}") from None


def _cli_type(hint: Any) -> tuple[type, tuple[str, ...] | None]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    return hint, None
