"""The settings of a server from a command line, and from a call in Python.

The command line is derived from the fields: `--field-name` and the field's other names.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rollout.core.args.foreign_flags import ALIASES, OPPOSITES, settings_of_call
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError


def add_cli_args(parser: argparse.ArgumentParser, settings: type = ServerArgs) -> None:
    """Add one flag per field of a dataclass: `--field-name`, typed, with the field's help and default."""
    hints = typing.get_type_hints(settings)
    for item in dataclasses.fields(settings):
        flag = _flag(item.name)
        aliases = [_flag(alias) for alias in ALIASES.get(item.name, ())]
        kind, choices = _cli_type(hints[item.name])
        help_text = item.metadata["help"]
        if kind is bool and item.name.startswith("disable_"):
            _add_disabling(parser, item, aliases)
        elif kind is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, *aliases, dest=item.name, action=action, default=item.default, help=help_text)
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


def _add_disabling(parser: argparse.ArgumentParser, item: dataclasses.Field[Any], aliases: Sequence[str]) -> None:
    """Add `--disable-x` with its opposite `--enable-x`; `--no-disable-x` is taken, too, and not shown."""
    plain = item.name.removeprefix("disable_")
    opposites = [f"enable_{plain}", *(other for other, setting in OPPOSITES.items() if setting == item.name)]
    disabling, enabling = [_flag(item.name), *aliases], [_flag(other) for other in opposites]
    hidden = [flag.replace("--", "--no-", 1) for flag in disabling]
    parser.add_argument(
        *disabling, *enabling, dest=item.name, action=_Switch, default=item.default, help=item.metadata["help"]
    )
    off: dict[str, Any] = {"action": "store_const", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument(*hidden, dest=item.name, const=False, **off)
    parser.add_argument(*[flag.replace("--", "--no-", 1) for flag in enabling], dest=item.name, const=True, **off)


class _Switch(argparse.Action):
    """`--enable-...` turns the setting off, every other of its flags turns it on."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = None, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=default, help=help)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--enable-"))

    def format_usage(self) -> str:
        return " | ".join(self.option_strings)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def args_of_call(settings: Mapping[str, Any]) -> ServerArgs:
    """Return the validated settings of a call in Python: fields or their aliases by name, objects instead of JSON.

    Raises `StartupError`.
    """
    args = ServerArgs(**settings_of_call(settings))
    args.validate()
    return args


def server_args_from_namespace(namespace: argparse.Namespace) -> ServerArgs:
    """Return the validated settings of a parsed command line.  Raises `StartupError`."""
    settings = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(ServerArgs)}
    secrets = {
        f.name: _secret(f.name, settings[f.name]) for f in dataclasses.fields(ServerArgs) if f.metadata.get("secret")
    }
    args = ServerArgs(**settings | secrets)
    args.validate()
    return args


def _secret(name: str, given: str | None) -> str | None:
    """Return a key from the command line, from a file, or from the environment.

    Other users of the machine can read the command line.
    """
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
