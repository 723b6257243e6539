"""Commands `lockstep serve ...` in pages and scripts, and their parts for the server's own parser."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

from rollout.core.args.foreign_flags import own_words
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args, server_args_from_namespace

COMMAND = re.compile(r"^ *(?:exec )?lockstep serve ((?:.*\\\n)*.*)$", re.MULTILINE)


def serve_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; `$NAME` stays as it is."""
    for match in COMMAND.finditer(text):
        yield shlex.split(match[1].replace("\\\n", " "))


def settings_of(words: list[str]) -> ServerArgs:
    """Return the settings that the server reads from these words.  Raises `ValueError` for a flag that it lacks.

    A variable of the shell stands for a number.
    """
    found = own_words([re.sub(r"^\$PORT$", "1", word) for word in words])
    if lost := {kind: flags for kind, flags in vars(found).items() if kind != "words" and flags}:
        raise ValueError(f"not settings of this server: {lost}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_cli_args(parser)
    return server_args_from_namespace(parser.parse_args(found.words))
