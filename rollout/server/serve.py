"""`lockstep serve` until the server is loaded: what can be refused without torch is refused before it.

check settings -> find the model's configuration -> bind the port -> `launch`
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import serve_parser, server_args_from_namespace
from rollout.core.args.sources import parse_words
from rollout.core.console import LOG_FORMAT, TIME_FORMAT, fail, say
from rollout.core.errors import LockstepError
from rollout.server.checks import bind, checked_config, remote_host


def main(argv: Sequence[str]) -> int:
    """Run a server until it stops, and return the exit status.

    A startup error is one line on stderr and status 1; a wrong word is two lines and status 2.
    """
    parser = serve_parser()
    namespace, notes = parse_words(parser, argv, os.environ)
    logging.basicConfig(level=namespace.log_level.upper(), format=LOG_FORMAT, datefmt=TIME_FORMAT, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for note in notes:
        say(note, "WARNING")
    try:
        return _serve(server_args_from_namespace(namespace))
    except LockstepError as error:
        return fail(str(error))


def _serve(args: ServerArgs) -> int:
    checked_config(args)
    remote_host(args)
    if args.node_rank > 0:
        return int(_launch().run_server(args))
    with contextlib.closing(bind(args)) as listener:
        return int(_launch().run_server(args, listener=listener))


def _launch() -> ModuleType:
    """Import the server, which takes seconds of CPU."""
    return importlib.import_module("rollout.server.launch")
