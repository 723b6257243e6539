"""`lockstep serve` until the server is loaded: what can be refused without torch is refused before it.

check settings -> find the model's configuration -> bind the port -> `launch`
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

from rollout.core.args.foreign_flags import own_words
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args, server_args_from_namespace
from rollout.core.console import fail, say
from rollout.core.errors import LockstepError
from rollout.server.checks import bind, checked_config, remote_host


def main(argv: Sequence[str]) -> int:
    """Run a server until it stops, and return the exit status.  A startup error is one line on stderr and status 1."""
    parser = argparse.ArgumentParser(
        prog="lockstep serve",
        description="Serve a checkpoint over HTTP.",
        epilog="Flags of vLLM and SGLang that only tune kernels, processes or logs are accepted with a warning.",
    )
    add_cli_args(parser)
    given = own_words(argv)
    namespace = parser.parse_args(given.words)
    logging.basicConfig(
        level=namespace.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if given.unused:
        say(f"these flags of vLLM or SGLang have no effect: {', '.join(given.unused)}")
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
