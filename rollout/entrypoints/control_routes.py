"""Endpoints that change the server: cache, aborts, pause, memory.  All may demand the admin key.

Knows their bodies and replies.  What a verb does is the scheduler's business.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive

from rollout.core.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    FlushCacheReqInput,
    GiveUpPauseReqInput,
    PauseGenerationReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.entrypoints import protocol
from rollout.entrypoints.control_io import ControlRoute, add_route, failed_status, reply, status_reply
from rollout.entrypoints.http_io import json_body, until_disconnect
from rollout.entrypoints.weight_routes import WEIGHT_MARGIN_S
from rollout.tokenizer_manager.manager import TokenizerManager

PAUSE_TIMEOUT_S = 60.0
PAUSE_WAIT_S = 1800.0
"""Mode wait gives requests so long to end: as long as trainers wait for a weight update."""
FLUSH_TIMEOUT_S = 30.0
FLUSH_POLL_S = 0.05

AbortBody = Annotated[protocol.AbortRequest, Depends(json_body(protocol.AbortRequest))]
ContinueBody = Annotated[protocol.ContinueGenerationRequest, Depends(json_body(protocol.ContinueGenerationRequest))]
MemoryBody = Annotated[protocol.MemoryOccupationRequest, Depends(json_body(protocol.MemoryOccupationRequest))]
PauseBody = Annotated[protocol.PauseGenerationRequest, Depends(json_body(protocol.PauseGenerationRequest))]


async def pause(manager: TokenizerManager, mode: PauseMode, receive: Receive | None = None) -> ControlReqOutput:
    """Stop stepping; what becomes of the requests that run is `mode`'s.

    A wait whose client goes away, or which fails on one replica, pauses none.
    """
    if mode != "wait":
        return await manager.control(PauseGenerationReqInput, PAUSE_TIMEOUT_S, mode=mode)
    wait_id, is_paused = uuid.uuid4().hex, False
    fields = {"mode": mode, "wait_s": PAUSE_WAIT_S, "wait_id": wait_id}
    work = manager.control(PauseGenerationReqInput, PAUSE_TIMEOUT_S + PAUSE_WAIT_S, **fields)
    try:
        answer = await (work if receive is None else until_disconnect(receive, work))
        is_paused = answer.success
        return answer
    finally:
        if not is_paused:
            await manager.control(GiveUpPauseReqInput, PAUSE_TIMEOUT_S, wait_id=wait_id)


class ControlRoutes:
    """SGLang's control endpoints."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._weight_timeout_s = manager.server_args.weight_update_timeout + WEIGHT_MARGIN_S

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["control"])
        add_route(router, "/flush_cache", self.flush_cache, protocol.EmptyRequest, "GET", "POST")
        add_route(router, "/abort_request", self.abort_request, protocol.AbortRequest)
        add_route(router, "/pause_generation", self.pause_generation, protocol.PauseGenerationRequest)
        add_route(router, "/continue_generation", self.continue_generation, protocol.ContinueGenerationRequest)
        memory = protocol.MemoryOccupationRequest
        add_route(router, "/release_memory_occupation", self.release_memory, memory, "GET", "POST")
        add_route(router, "/resume_memory_occupation", self.resume_memory, memory, "GET", "POST")
        return router

    async def flush_cache(self, timeout: Annotated[float, Query(ge=0, le=600)] = 0.0) -> Response:
        """Empty the prefix cache.  Text; 400 unless idle or paused within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            answer = await self._manager.control(FlushCacheReqInput, FLUSH_TIMEOUT_S)
            if answer.success:
                return PlainTextResponse("Cache flushed.\n")
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(FLUSH_POLL_S)
        prefix = "Timed out waiting for idle state. " if timeout else ""
        return PlainTextResponse(f"{prefix}{answer.message or 'Flush cache failed.'}\n", failed_status(answer))

    async def abort_request(self, body: AbortBody) -> Response:
        """Abort by the exact id of a request, a sample, a batch or a group of n samples.  Always 200, empty."""
        if body.abort_all:
            self._manager.abort_all()
        else:
            self._manager.abort([body.rid] if isinstance(body.rid, str) else body.rid)
        return Response(status_code=200)

    async def pause_generation(self, request: Request, body: PauseBody) -> Response:
        """Replies once the scheduler has stopped stepping."""
        return status_reply(await pause(self._manager, body.mode, request.receive), "Generation paused successfully.")

    async def continue_generation(self, body: ContinueBody) -> Response:
        """Also settles a weight update that was sent without begin and end."""
        fields = body.model_dump()
        answer = await self._manager.control(ContinueGenerationReqInput, self._weight_timeout_s, **fields)
        return status_reply(answer, "Generation continued successfully.")

    async def release_memory(self, body: MemoryBody) -> Response:
        """Give memory back to the system; 409 while requests run or if it was released already."""
        answer = await self._manager.control(ReleaseMemoryOccupationReqInput, self._weight_timeout_s, tags=body.tags)
        return reply(answer)

    async def resume_memory(self, body: MemoryBody) -> Response:
        """Take released memory again; 409 if it is not released."""
        answer = await self._manager.control(ResumeMemoryOccupationReqInput, self._weight_timeout_s, tags=body.tags)
        return reply(answer)
