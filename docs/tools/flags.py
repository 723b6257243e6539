"""The flags of `lockstep serve`, from the groups of its help."""

from __future__ import annotations

from collections.abc import Callable

from docs.tools.tables import code, table
from rollout.core.args.flag_groups import Flag, flag_groups

HEAD = ("flag", "default", "meaning")


def parts() -> dict[str, Callable[[], str]]:
    return {"flags": flags}


def flags() -> str:
    """Return a table of flags with their defaults for each group."""
    found = [
        f"### {group.title[0].upper()}{group.title[1:]}\n\n{table(HEAD, map(_row, group.flags))}"
        for group in flag_groups()
    ]
    return "\n".join(found)


def _row(flag: Flag) -> tuple[str, str, str]:
    """Return flag, default and meaning."""
    choices = f"; one of {', '.join(map(code, flag.choices))}" if flag.choices else ""
    return code(flag.name), _default(flag.default, flag.is_required), f"{flag.help}{choices}"


def _default(value: object, is_required: bool) -> str:
    if is_required:
        return "required"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else code(value)
