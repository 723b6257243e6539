"""The control verbs that concern sessions of agents."""

from __future__ import annotations

import msgspec

from rollout.core.messages.message import ControlReqInput, Endpoint, Name, Reply, Total


class SessionReport(msgspec.Struct, kw_only=True):
    """KV that a session keeps, in tokens: by its requests and its pin; of that by the pin, and for how long yet."""

    kv_tokens: int = 0
    pinned_tokens: int = 0
    expires_in_s: float | None = None


class SessionsReply(Reply, kw_only=True):
    sessions: dict[str, SessionReport]
    num_pinned_tokens: Total


class GetSessionsReqInput(ControlReqInput[SessionsReply]):
    """List the KV that each session keeps."""

    endpoint = Endpoint(timeout_s=10.0)


class FinishSessionReply(Reply, kw_only=True):
    num_released_tokens: Total


class FinishSessionReqInput(ControlReqInput[FinishSessionReply]):
    """Keep nothing for this session any more.  One that is not known is no mistake."""

    endpoint = Endpoint(path="/finish_session", query=("POST",), tag="sessions", key="api", timeout_s=10.0)

    session_id: Name


VERBS = (GetSessionsReqInput, FinishSessionReqInput)
