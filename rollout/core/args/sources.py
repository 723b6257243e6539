"""The words of `lockstep serve` from three places: a file, variables of the environment, the command line.

A later place wins.  Each is checked alone first, so that an error names the place of the wrong word.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.core.args.flag_groups import flag_name
from rollout.core.args.foreign_flags import (
    EXPERT_PARALLEL,
    OwnWords,
    is_known,
    names_of_settings,
    own_words,
    takes_no_value,
)
from rollout.core.args.parser import Parser, closest, hint
from rollout.core.errors import StartupError

ENVIRONMENT_PREFIX = "LOCKSTEP_"
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_LIKENESS = 0.75  # from which a variable is taken for a misspelled setting
_OF_KUBERNETES = "tcp://"


def parse_words(
    parser: Parser, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the settings of all places, and lines to print: flags and variables without effect.

    Ends the command, as argparse does, for a word that is wrong.
    """
    path = _checked(parser, own_words(argv), None).config or environment.get(CONFIG_VARIABLE)
    try:
        variables, notes = words_of_environment(environment)
        from_file = [] if path is None else words_of_file(Path(path))
    except StartupError as error:
        parser.error(str(error))
    for words, source in ((from_file, path), (variables, "environment")):
        _checked(parser, own_words(words), source)
    given = own_words(argv, [*from_file, *variables])
    namespace = parser.parse_args(given.words)
    if not namespace.model_path:
        parser.error("give the folder of a checkpoint: lockstep serve MODEL")
    if given.unused:
        notes.append(f"these flags of vLLM or SGLang have no effect: {', '.join(given.unused)}")
    return namespace, notes


def _checked(parser: Parser, given: OwnWords, source: str | None) -> argparse.Namespace:
    """Return the settings of one place."""
    parser.source = source
    for flag, reason in given.refused.items():
        parser.error(f"{flag} of vLLM or SGLang is not taken: {reason}")
    namespace: argparse.Namespace = parser.parse_args(given.words)
    parser.source = None
    return namespace


def words_of_file(path: Path) -> list[str]:
    """Return the settings of a file as flags.  Raises `StartupError`."""
    reader = importlib.import_module("rollout.core.args.config_file")  # most servers have no file
    content: dict[Any, Any] = reader.read(path)
    words: list[str] = []
    seen: dict[str, str] = {}
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("-", "_")
        setting = names_of_settings().get(name, name)
        if setting in seen:
            raise StartupError(f"{path}: {seen[setting]} and {key} are the same setting; give only one")
        seen[setting] = str(key)
        if not is_known(name):
            raise StartupError(f"{path}: unknown key {key}{hint(name, names_of_settings())}")
        if name == "config":
            raise StartupError(f"{path}: a file cannot name another one with config")
        words += _words(f"{path}: {key}", name, value)
    return words


def words_of_environment(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the settings of variables `LOCKSTEP_...` as flags, and lines about others that are like one.

    An empty one is left out, but an empty key is not: the server refuses it.  Raises `StartupError`.
    """
    settings = names_of_settings()
    variables = {f"{ENVIRONMENT_PREFIX}{name.upper()}": name for name in (*settings, EXPERT_PARALLEL)}
    words: list[str] = []
    notes: list[str] = []
    seen: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        name = variables.get(variable)
        is_key = name is not None and _is_key(name)
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE or not (text or is_key):
            continue
        if name is None:
            meant = closest(variable.removeprefix(ENVIRONMENT_PREFIX).lower(), settings, _LIKENESS)
            if meant is not None:
                notes.append(f"${variable} is not a setting; did you mean {ENVIRONMENT_PREFIX}{meant.upper()}?")
        elif text.startswith(_OF_KUBERNETES) and name == "port":
            notes.append(f"${variable} is left out: Kubernetes sets it for a Service named lockstep")
        elif is_key:
            words.append(f"{flag_name(name)}={text}")
        else:
            setting = settings.get(name, name)
            if setting in seen:
                raise StartupError(f"${seen[setting]} and ${variable} are the same setting; give only one")
            seen[setting] = variable
            words += _words(f"${variable}", name, _switch(text) if takes_no_value(name) else text)
    return words, notes


def _is_key(name: str) -> bool:
    return name.endswith("api_key")


def _switch(text: str) -> bool | str:
    lower = text.lower()
    return True if lower in _TRUE else False if lower in _FALSE else text


def _words(where: str, name: str, value: Any) -> list[str]:
    """Return a setting as words.  Raises `StartupError` for a value of a wrong kind, without the value of a key."""
    flag = flag_name(name)
    if value is None:
        return []
    if takes_no_value(name) and not isinstance(value, bool):
        raise StartupError(f"{where} is {value}: it must be true or false")
    is_own = name in names_of_settings()
    if isinstance(value, bool) and (takes_no_value(name) or not is_own):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if _is_key(name) and not isinstance(value, str):
        raise StartupError(f"{where} must be text: put it in quotes")
    if isinstance(value, bool | list) and is_own:
        raise StartupError(f"{where} must be one text or number")
    return [f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"]
