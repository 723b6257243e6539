"""`lockstep serve` until the server is loaded: what can be refused without torch is refused before it.

check settings -> find the model's configuration -> bind the port -> `launch`
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import socket
import sys
from collections.abc import Sequence
from types import ModuleType

from rollout.core.args.foreign_flags import own_words
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args, server_args_from_namespace
from rollout.core.console import fail, say
from rollout.core.errors import LockstepError, StartupError
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.layout import layout_of
from rollout.families.registry import served_model_config
from rollout.server.connections import LISTEN_BACKLOG


def main(argv: Sequence[str]) -> int:
    """Run a server until a signal stops it; the exit status.  A startup error is one line on stderr and status 1."""
    parser = argparse.ArgumentParser(
        prog="lockstep serve",
        description="Serve a checkpoint over HTTP.",
        epilog="Flags of vLLM and SGLang that only tune kernels, processes or logs are taken, with a warning.",
    )
    add_cli_args(parser)
    given = own_words(argv)
    namespace = parser.parse_args(given.words)
    logging.basicConfig(
        level=namespace.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if given.unused:
        say(f"flags of vLLM or SGLang without effect here: {', '.join(given.unused)}")
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


def checked_config(args: ServerArgs) -> ModelConfig:
    """Return the model's configuration.  Raises `StartupError` where it does not go with the settings."""
    config = served_model_config(args)
    if args.return_routed_experts_by_default and not config.is_moe:
        raise StartupError("--return-routed-experts-by-default: this model is dense, it has no experts to route to")
    layout_of(args)
    return config


def remote_host(args: ServerArgs) -> str | None:
    """Return the address of machine 0 that ranks on others know.  Raises `StartupError`."""
    if args.nnodes == 1 or args.dist_init_addr is None:
        return None
    try:
        return socket.gethostbyname(args.dist_init_addr.rpartition(":")[0].strip("[]"))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(f"--dist-init-addr {args.dist_init_addr}: {reason}") from None


def bind(args: ServerArgs) -> socket.socket:
    """A listening socket, taken before anything expensive starts.  Raises `StartupError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"--host {args.host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise StartupError(f"cannot listen on {args.host}:{args.port}: {reason}; choose another --port") from None
    listener.setblocking(False)
    return listener
