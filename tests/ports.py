"""Ports of this machine."""

import contextlib
import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)  # Linux gives the local ends of connections ports from 32768 on


def free_ports_in_a_row(count: int, address: str = "127.0.0.1") -> int:
    """Find `count` adjacent free TCP ports and return the first; no connection that opens meanwhile can take one."""
    while True:
        first = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind((address, port))
            return first
