"""Sessions of agents: whose request it is, what KV each session keeps, and when one is over."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.datastructures import Headers
from starlette.responses import Response

from rollout.core.errors import BadRequest, LockstepError, NotFound
from rollout.core.messages.sessions import GetSessionsReqInput, SessionReport
from rollout.http.io import json_response
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput
from rollout.tokenizer_manager.session_book import MAX_SESSIONS, Session

SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
RANK_HEADER = "x-data-parallel-rank"


def addressed(wanted: GenerateReqInput, headers: Headers) -> GenerateReqInput:
    """`wanted` with the session and the data-parallel rank that the headers name, where its body names none.

    Raises `BadRequest`.
    """
    if wanted.session_id is None:
        wanted.session_id = next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)
    rank = headers.get(RANK_HEADER)
    if wanted.routed_dp_rank is None and rank:
        if not rank.isdecimal() or len(rank) > 9:
            raise BadRequest(f"{RANK_HEADER} must be a number, got {rank[:80]!r}")
        wanted.routed_dp_rank = int(rank)
    return wanted


class SessionRoutes:
    """Endpoints for routers that schedule sessions."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(tags=["sessions"])
        router.add_api_route("/sessions", self.sessions)
        router.add_api_route("/sessions/{session_id:path}", self.session)
        return router

    async def sessions(self, limit: Annotated[int, Query(ge=1, le=MAX_SESSIONS)] = 100) -> Response:
        """List the sessions that keep KV, then the sessions heard of last; at most `limit`."""
        found, pinned = await self._reports()
        return json_response(
            {"sessions": list(found.values())[:limit], "num_sessions": len(found), "num_pinned_tokens": pinned}
        )

    async def session(self, session_id: str) -> Response:
        """One session; 404 if it is not known, or not any more."""
        found, _ = await self._reports()
        if session_id not in found:
            raise NotFound(f"no session {session_id[:80]!r} is known")
        return json_response(found[session_id])

    async def _reports(self) -> tuple[dict[str, dict[str, Any]], int]:
        """Return the report of each known session, and the tokens that are pinned for all of them."""
        answer = await self._manager.control(GetSessionsReqInput)
        if not answer.success:
            raise LockstepError(answer.message)
        reply = answer.reply
        kept: dict[str, SessionReport] = {}
        for rank in reply.of_ranks:
            for session_id, report in rank.sessions.items():
                other = kept.get(session_id, SessionReport())
                ends = [end for end in (other.expires_in_s, report.expires_in_s) if end is not None]
                kept[session_id] = SessionReport(
                    kv_tokens=other.kv_tokens + report.kv_tokens,
                    pinned_tokens=other.pinned_tokens + report.pinned_tokens,
                    expires_in_s=max(ends, default=None),
                )
        book = self._manager.sessions.sessions
        running = Counter(self._manager.sessions_in_flight())
        return {
            session_id: {"session_id": session_id, "num_running": running[session_id]}
            | msgspec.structs.asdict(kept.get(session_id, SessionReport()))
            | _history(book.get(session_id))
            for session_id in dict.fromkeys([*kept, *running, *reversed(book)])
        }, reply.num_pinned_tokens


def _history(session: Session | None) -> dict[str, Any]:
    """Sums over finished requests; `idle_s` is None before the first."""
    fields = dataclasses.asdict(session or Session())
    finished_at = fields.pop("finished_at")
    return fields | {"idle_s": None if session is None else time.monotonic() - finished_at}
