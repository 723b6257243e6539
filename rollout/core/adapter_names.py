"""Names of adapters: NAME is the newest version of an adapter, NAME@3 its version 3."""

from __future__ import annotations

import re
from typing import NamedTuple

from rollout.core.known_fields import shown

_MAX_CHARS = 128
_SIGN = "@"
_OF_ADAPTER, _KEY_PARTS = "lora", 5
_PINNED = re.compile(rf"(?P<name>[^{_SIGN}]+){_SIGN}(?P<version>\d{{1,9}})")


class AdapterRef(NamedTuple):
    """An adapter by its name, and one version of it; None: the newest one."""

    name: str
    version: int | None


def adapter_ref(text: str) -> AdapterRef:
    """Return the adapter that a request names.  What no adapter can be called is a name that none has."""
    match = _PINNED.fullmatch(text)
    return AdapterRef(text, None) if match is None else AdapterRef(match["name"], int(match["version"]))


def fault_of_name(name: str) -> str | None:
    """Return the reason why no adapter can have this name; None for a name that one can have."""
    if not (name and name.isprintable() and len(name) <= _MAX_CHARS):
        return f"the name of an adapter is printable text of 1 to {_MAX_CHARS} characters, got {shown(repr(name))}"
    if _SIGN in name:
        return f"the name of an adapter holds no {_SIGN!r}, which stands before a version: {shown(repr(name))}"
    return None


def awaited_adapter(name: str) -> str:
    """Return the message on the name of a registered adapter whose first weights have not come."""
    return (
        f"the adapter {shown(name)!r} is registered, and its first weights have not come: it can be named once a "
        "weight update that brought them has ended"
    )


def key_of_kv(extra_key: str | None, name: str, version: int, content_digest: str) -> str:
    """Return the key of the KV that a version of an adapter makes.

    An `extra_key` of a client never holds the character 0, so that no client can name another adapter's KV.
    """
    return "\0".join((extra_key or "", _OF_ADAPTER, name, str(version), content_digest))


def adapter_of_key(key: str | None) -> str | None:
    """Return the name of the adapter whose KV has this key; None for KV of the model alone."""
    parts = [] if key is None else key.split("\0")
    return parts[2] if len(parts) == _KEY_PARTS and parts[1] == _OF_ADAPTER else None
