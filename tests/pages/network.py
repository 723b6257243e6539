"""A network of one's own for a process: its loopback, on which every port is free."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 0x1


def enter() -> bool:
    """Put this process and its children into a new network; False where the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_NETWORK) != 0:
        if libc.unshare(NEW_NETWORK | NEW_USER) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, GET_FLAGS, request))[1]
        fcntl.ioctl(control, SET_FLAGS, struct.pack("16sH14x", b"lo", flags | UP))
    return True
