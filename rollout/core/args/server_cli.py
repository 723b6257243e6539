"""The settings of a server from a command line, and from a call in Python.

The command line is derived from the fields: `--field-name` and the field's other names.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.core.args.checks import check_settings
from rollout.core.args.flag_groups import Flag, flag_groups, flags_of
from rollout.core.args.foreign_flags import settings_of_call
from rollout.core.args.parser import KINDS, Parser
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError

_PLACEHOLDERS: dict[type, str] = {int: "N", float: "X"}
EPILOG = (
    "Each flag is also a key of --config FILE, and a variable: LOCKSTEP_MAX_TOTAL_TOKENS is --max-total-tokens. "
    "The command line goes before variables, variables before the file. "
    "Flags of vLLM and SGLang that only tune kernels, processes or logs are accepted with a warning."
)


def serve_parser() -> Parser:
    """Return the parser of `lockstep serve`, with its flags in groups."""
    parser = Parser(
        prog="lockstep serve",
        usage="lockstep serve MODEL [flags]",
        description="Serve a checkpoint over HTTP. MODEL is its folder, as --model-path.",
        epilog=EPILOG,
    )
    parser.add_argument("--config", metavar="FILE", help="settings in YAML, JSON or TOML, by the names of the flags")
    for group in flag_groups():
        shown = parser.add_argument_group(group.title)
        for flag in group.flags:
            _add(shown, flag)
    return parser


def add_cli_args(parser: argparse.ArgumentParser, settings: type = ServerArgs) -> None:
    """Add one flag per field of a dataclass: `--field-name`, typed, with the field's help and default."""
    for flag in flags_of(settings):
        _add(parser, flag, required=flag.is_required)


def _add(parser: argparse._ActionsContainer, flag: Flag, *, required: bool = False) -> None:
    names = [flag.name, *flag.aliases]
    if flag.type is bool:
        _add_switch(parser, flag, names)
        return
    shown = _PLACEHOLDERS.get(flag.type, flag.setting.rpartition("_")[2].upper())
    parser.add_argument(
        *names,
        dest=flag.setting,
        type=flag.type,
        choices=flag.choices,
        metavar=None if flag.choices else shown,
        default=flag.default,
        required=required,
        help=f"{flag.help} (default: {flag.default})" if flag.default not in (None, "") else flag.help,
    )


def _add_switch(parser: argparse._ActionsContainer, flag: Flag, names: Sequence[str]) -> None:
    """Add a flag with its opposites; `--no-disable-x` and the like are taken, too, and not shown."""
    parser.add_argument(
        *names, *flag.opposites, dest=flag.setting, action=_Switch, off=flag.opposites, default=flag.default,
        help=f"{flag.help} (default: on)" if flag.default is True else flag.help,
    )  # fmt: skip
    for shown, is_on in ((names, False), (flag.opposites, True)):
        hidden = [name.replace("--", "--no-", 1) for name in shown]
        hidden = [name for name in hidden if name not in flag.opposites and not name.startswith("--no-no-")]
        if hidden:
            parser.add_argument(
                *hidden, dest=flag.setting, action="store_const", const=is_on, default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )  # fmt: skip


class _Switch(argparse.Action):
    """The flags of `off` turn the setting off, every other one turns it on."""

    def __init__(self, option_strings: Sequence[str], dest: str, off: Sequence[str] = (), **given: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **given)
        self._off = off

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, option_string not in self._off)

    def format_usage(self) -> str:
        return " | ".join(self.option_strings)


def args_of_call(settings: Mapping[str, Any]) -> ServerArgs:
    """Return the validated settings of a call in Python: fields or their aliases by name, objects instead of JSON.

    Raises `StartupError`.
    """
    given = settings_of_call(settings)
    for flag in flags_of(ServerArgs):
        _check_kind(flag, given.get(flag.setting))
    args = ServerArgs(**given)
    check_settings(args)
    return args


def _check_kind(flag: Flag, value: Any) -> None:
    """Raise `StartupError` for text in the place of a number or a switch, and for a choice that there is not."""
    if isinstance(value, str) and flag.type is bool:
        raise StartupError(f"{flag.setting} is {value}: it must be true or false")
    if isinstance(value, str) and flag.type in KINDS:
        raise StartupError(f"{flag.setting}: {value} {KINDS[flag.type]}")
    if flag.choices and value is not None and value not in flag.choices:
        raise StartupError(f"{flag.setting}: {value} is not one of {', '.join(flag.choices)}")


def server_args_from_namespace(namespace: argparse.Namespace) -> ServerArgs:
    """Return the validated settings of a parsed command line.  Raises `StartupError`."""
    settings = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(ServerArgs)}
    keys = [f.name for f in dataclasses.fields(ServerArgs) if f.metadata.get("secret") and settings[f.name]]
    secrets = {name: _secret(name, settings[name]) for name in keys}
    args = ServerArgs(**settings | secrets)
    check_settings(args)
    return args


def _secret(name: str, given: str) -> str:
    """Return a key as it was given, or from `@FILE`: other users of the machine can read the command line."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--{name.replace('_', '-')} {given}: {error}") from None
