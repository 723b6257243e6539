"""The flags of `lockstep serve`, from the fields of `ServerArgs`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from docs.tools.tables import code, table
from rollout.core.args.server_args import ServerArgs

GROUPS = "rollout.core.args.flag_groups"
HEAD = ("flag", "default", "meaning")


def parts() -> dict[str, Callable[[], str]]:
    return {"flags": flags}


def flags() -> str:
    """Return tables of all flags with their defaults: one for each group of the help, where it has groups."""
    if importlib.util.find_spec(GROUPS) is None:
        return table(HEAD, map(_row_of_field, dataclasses.fields(ServerArgs)))
    groups: Any = importlib.import_module(GROUPS).flag_groups()
    found = [
        f"### {group.title[0].upper()}{group.title[1:]}\n\n{table(HEAD, map(_row, group.flags))}" for group in groups
    ]
    return "\n".join(found)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _row(flag: Any) -> tuple[str, str, str]:
    """Return flag, default and meaning of a flag of a group."""
    choices = f"; one of {', '.join(map(code, flag.choices))}" if flag.choices else ""
    return code(flag.name), _default(flag.default, flag.is_required), f"{flag.help}{choices}"


def _row_of_field(field: dataclasses.Field[object]) -> tuple[str, str, str]:
    """Return flag, default and meaning of a setting."""
    default = _default(field.default, field.metadata.get("required", False))
    return code(_flag(field.name)), default, str(field.metadata["help"])


def _default(value: object, is_required: bool) -> str:
    if is_required:
        return "required"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else code(value)
