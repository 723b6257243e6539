"""`Parser`: argparse whose errors are two lines: what is wrong, and where the help is."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_HELP_COLUMN = 32
KINDS: dict[object, str] = {int: "is not a whole number", float: "is not a number"}
_OTHER_NAMES = re.compile(r"^argument (-[\w-]+)(?:/\S+)?: ")


def closest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that `word` was probably meant to be, at least `cutoff` alike; None where there is none."""
    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)), None)


def hint(word: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for the end of a message, or "" where no name is close."""
    found = closest(word, names)
    return "" if found is None else f"; did you mean {found}?"


class HelpFormatter(argparse.HelpFormatter):
    """Help with one placeholder for all names of a flag: `--tp-size N, --tp`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        first, *others = action.option_strings
        return ", ".join(
            [f"{first} {self._format_args(action, self._get_default_metavar_for_optional(action))}", *others]
        )


class Parser(argparse.ArgumentParser):
    """A parser of one command.  `source`: where its words come from, if not from the command line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter} | kwargs)
        self.source: str | None = None

    def error(self, message: str) -> NoReturn:
        """End the command with status 2 and two lines on stderr."""
        text = _OTHER_NAMES.sub(r"\1: ", message)
        where = "" if self.source is None else f"{self.source}: "
        self.exit(2, f"{self.prog}: error: {where}{text}\nHelp: {self.prog} --help\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, but report an unknown flag before anything that is missing."""
        for word in args or ():
            if word == "--":
                break
            if word.startswith("--") and " " not in word:
                self._require_flag(word.partition("=")[0])
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the namespace.  Any word that belongs to no flag is an error."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            kind = "unknown flag" if rest[0].startswith("-") else "unexpected word"
            self.error(f"{kind} {rest[0]}{hint(rest[0], self.flags())}")
        return found

    def flags(self) -> list[str]:
        """Return the long flags, in the order of the help."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def shown_flags(self) -> dict[str, list[str]]:
        """Return the long flags of the help, and the values that each may have, if these are few."""
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return {
            flag: [str(choice) for choice in action.choices or ()]
            for action in actions
            for flag in action.option_strings
            if flag.startswith("--")
        }

    def _require_flag(self, flag: str) -> None:
        if not any(known.startswith(flag) for known in self.flags()):
            self.error(f"unknown flag {flag}{hint(flag, self.flags())}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            wrong = f"{value} is not one of {', '.join(choices)}{hint(str(value), choices)}"
            raise argparse.ArgumentError(action if action.option_strings else None, wrong)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if action.type not in KINDS:
                raise
            raise argparse.ArgumentError(action, f"{arg_string} {KINDS[action.type]}") from error
