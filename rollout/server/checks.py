"""The checks before a start that need no torch: the model's configuration, the address of machine 0, the port."""

from __future__ import annotations

import socket

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.layout import layout_of
from rollout.families.registry import served_model_config

LISTEN_BACKLOG = 2048
"""Connections that wait in the kernel."""


def checked_config(args: ServerArgs) -> ModelConfig:
    """Return the model's configuration.  Raises `StartupError` where it does not go with the settings."""
    config = served_model_config(args)
    if args.return_routed_experts_by_default and not config.is_moe:
        raise StartupError("--return-routed-experts-by-default: this model is dense and has no routed experts")
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
    """Return a listening socket, which is opened before anything expensive starts.  Raises `StartupError`."""
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
