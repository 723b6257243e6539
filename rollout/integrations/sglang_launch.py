"""SGLang's launch call and its flags, answered by this server.

    python -m rollout.integrations.sglang_launch --model-path ... --tp-size 2      as sglang.launch_server
    launch_server(server_args)                                                     as sglang.srt.entrypoints.http_server

With `rollout/integrations/sglang_redirect` on PYTHONPATH, a program that imports or runs SGLang's gets this one, in its
child processes too.  Flags in LOCKSTEP_FLAGS are added to the program's.

Flags that this server has mean what they mean there.  Flags that only tune SGLang are named in a warning and left out;
any other is refused, by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rollout.core.args.foreign_flags import own_words
from rollout.core.console import fail, say
from rollout.core.errors import LockstepError, StartupError
from rollout.http.server_info import flag_words
from rollout.server import serve


def main(argv: Sequence[str]) -> int:
    """Serve with SGLang's flags, and return the exit status.  A refusal is one line on stderr and status 1."""
    try:
        words = serve_words([*argv, *shlex.split(os.environ.get("LOCKSTEP_FLAGS", ""))])
    except LockstepError as error:
        return fail(str(error))
    return serve.main(words)


def launch_server(server_args: Any, *_: Any, **__: Any) -> None:
    """Serve with SGLang's `ServerArgs`; the other arguments of SGLang's function concern its own processes.

    Raises `SystemExit` if the server ends with an error.
    """
    if status := main(words_of(server_args)):
        raise SystemExit(status)


def serve_words(argv: Sequence[str]) -> list[str]:
    """Return SGLang's flags as flags of `lockstep serve`.  Raises `StartupError` naming the flags it lacks."""
    given = own_words(argv)
    lacking = [*(f"{flag} ({reason})" for flag, reason in given.refused.items()), *given.unknown]
    if lacking:
        raise StartupError(f"this server does not have these flags of SGLang: {', '.join(lacking)}")
    if given.unused:
        say(f"without effect here: {', '.join(given.unused)}", "WARNING")
    words, device = given.words, _value_of("--device", given.words) or os.environ.get("LOCKSTEP_DEVICE")
    if device is not None and not device.startswith("cuda"):
        words = _without("--base-gpu-id", words)  # frameworks give it whatever the device is
    return words


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the value of the last such flag; None where there is none."""
    return next((value for word, value in reversed(list(itertools.pairwise(words))) if word == flag), None)


def _without(flag: str, words: Sequence[str]) -> list[str]:
    """Return the words without such flags and their values."""
    before = [None, *words]
    return [word for previous, word in zip(before, words, strict=False) if flag not in (previous, word)]


def words_of(server_args: Any) -> list[str]:
    """Return the flags for the settings of SGLang's `ServerArgs` that differ from their defaults."""
    kind = type(server_args)
    names = getattr(kind, "__struct_fields__", None) or [item.name for item in dataclasses.fields(kind)]
    plain = kind(model_path=server_args.model_path)
    given = {name: getattr(server_args, name) for name in names if not name.startswith("_")}
    given = {name: value for name, value in given.items() if value != getattr(plain, name)}
    return flag_words({"model_path": server_args.model_path} | given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
