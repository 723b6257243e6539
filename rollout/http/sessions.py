"""Sessions of agents: sums over their finished samples, as counters and as reports, and the KV that each keeps."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import prometheus_client
from fastapi import APIRouter, Query
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from rollout.core.errors import LockstepError, NotFound, TooLarge
from rollout.core.messages.sessions import GetSessionsReqInput, SessionReport
from rollout.http.conversations import Conversations
from rollout.http.io import json_response
from rollout.http.session_record import record_bytes, record_ends, session_record
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.response import RouteShape, encode_json
from rollout.tokenizer_manager.sample import SampleRecord

logger = logging.getLogger(__name__)

MAX_SESSIONS = 4096
"""Sessions in the book; beyond that the least recently used one is dropped."""
MAX_LABELS = 64
"""Sessions with series of their own: labels come from clients, and series live as long as a server."""
OTHER = "other"


@dataclass(slots=True)
class Session:
    """Sums over the finished samples of a session; `context_tokens` is the length of the last one."""

    num_finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    context_tokens: int = 0
    dp_rank: int = 0
    finished_at: float = 0.0


class SessionBook:
    """`sessions` by id, the least recently used one first, and the counters of them.

    The first `MAX_LABELS` sessions have series of their own; all others share `session_id="other"`.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self._model_name = model_name
        self._counters = [
            prometheus_client.Counter(f"lockstep:session_{name}", text, ["model_name", "session_id"], registry=registry)
            for name, text in (
                ("requests", "Samples of sessions that finished"),
                ("prompt_tokens", "Their prompt tokens"),
                ("cached_tokens", "Prompt tokens of them from the prefix cache"),
                ("generation_tokens", "Tokens generated for them"),
            )
        ]
        self._series: dict[str, list[prometheus_client.Counter]] = {}

    def on_finished(self, record: SampleRecord) -> None:
        """Add a sample that has ended to its session, if it has one."""
        finished = record.finished
        assert finished is not None
        if record.session_id is None:
            return
        prompt, output = len(record.prompt_ids), len(record.output_ids)
        logger.debug(
            "session %r: %s ended with %s, %d prompt tokens (%d cached), %d output tokens",
            record.session_id, record.rid, finished.reason.type, prompt, finished.cached_tokens, output,
        )  # fmt: skip
        session = self.sessions.setdefault(record.session_id, Session())
        self.sessions.move_to_end(record.session_id)
        session.num_finished += 1
        session.prompt_tokens += prompt
        session.cached_tokens += finished.cached_tokens
        session.completion_tokens += output
        session.context_tokens = prompt + output
        session.dp_rank = record.dp_rank
        session.finished_at = time.monotonic()
        if len(self.sessions) > MAX_SESSIONS:
            self.sessions.popitem(last=False)
        amounts = (1, prompt, finished.cached_tokens, output)
        for counter, amount in zip(self._series_of(record.session_id), amounts):
            counter.inc(amount)

    def _series_of(self, session_id: str) -> list[prometheus_client.Counter]:
        label = session_id if session_id in self._series or len(self._series) < MAX_LABELS else OTHER
        if label not in self._series:
            self._series[label] = [counter.labels(self._model_name, label) for counter in self._counters]
        return self._series[label]


class SessionRoutes:
    """Endpoints for routers that schedule sessions."""

    def __init__(self, manager: TokenizerManager, book: SessionBook, conversations: Conversations) -> None:
        self._manager = manager
        self._book = book
        self._conversations = conversations

    def router(self) -> APIRouter:
        router = APIRouter(tags=["sessions"])
        router.add_api_route("/sessions", self.sessions)
        router.add_api_route("/sessions/{session_id:path}/record", self.record)
        router.add_api_route("/sessions/{session_id:path}", self.session)
        return router

    async def sessions(self, limit: Annotated[int, Query(ge=1, le=MAX_SESSIONS)] = 100) -> Response:
        """List the sessions that keep KV, then the running ones, then the last used ones; at most `limit`."""
        found, pinned = await self._reports()
        return json_response(
            {"sessions": list(found.values())[:limit], "num_sessions": len(found), "num_pinned_tokens": pinned}
        )

    async def session(self, session_id: str) -> Response:
        """Return the report of one session; 404 if it is not known, or not any more."""
        found, _ = await self._reports()
        if session_id not in found:
            raise NotFound(f"no session {session_id[:80]!r} is known")
        return json_response(found[session_id])

    async def record(self, session_id: str, turn: str | None = None) -> Response:
        """Return the conversations of a session as sequences for a trainer; 404 if none of its turns is kept.

        `turn`: the id of a turn, for the one sequence that ends with it.  413 for more than a request may hold.
        """
        turns = self._conversations.turns(session_id)
        if not turns:
            raise NotFound(f"no turn of the session {session_id[:80]!r} is kept: it had no chat, or is too long ago")
        shape = RouteShape.of(self._manager.model_config)
        ends, limit = record_ends(turns, turn), self._manager.limits.budget.max_request_bytes
        if record_bytes(ends, shape) > limit:
            raise TooLarge(
                f"the record of {len(ends)} sequences would take {record_bytes(ends, shape) >> 20} MB; the limit is "
                f"{limit >> 20} MB. Ask for one sequence, with ?turn= and its last turn. The server's flag is "
                "--max-request-mb."
            )
        content = await asyncio.to_thread(lambda: encode_json(session_record(session_id, turns, ends, shape)))
        return Response(content, media_type="application/json")

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
        book = self._book.sessions
        running = Counter(self._manager.sessions_in_flight())
        return {
            session_id: {"session_id": session_id, "num_running": running[session_id]}
            | msgspec.structs.asdict(kept.get(session_id, SessionReport()))
            | _history(book.get(session_id))
            for session_id in dict.fromkeys([*kept, *running, *reversed(book)])
        }, reply.num_pinned_tokens


def _history(session: Session | None) -> dict[str, Any]:
    """Return the sums over a session's finished requests; `idle_s` is None before the first of them."""
    fields = dataclasses.asdict(session or Session())
    finished_at = fields.pop("finished_at")
    return fields | {"idle_s": None if session is None else time.monotonic() - finished_at}
