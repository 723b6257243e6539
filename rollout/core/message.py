"""The base of every message between the main process and the scheduler."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Tagged with the name of its class, so that a union of messages can be decoded."""


class ControlReqInput(Message):
    """Base of the control verbs."""

    request_id: str
