"""The particulars of pausing, flushing and aborting over HTTP."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import PlainTextResponse, Response

from rollout.core.messages.io_struct import (
    FlushCacheReqInput,
    GiveUpPauseReqInput,
    PauseGenerationReqInput,
    PauseMode,
    PauseReply,
)
from rollout.core.messages.message import ControlReqOutput
from rollout.http import protocol
from rollout.http.control.io import ControlRoute, add_route, failed_status, reply
from rollout.http.io import json_body, until_disconnect
from rollout.tokenizer_manager.manager import TokenizerManager

PAUSE_WAIT_S = 1800.0
"""Seconds that mode wait gives requests to end: as long as trainers wait for a weight update."""
FLUSH_POLL_S = 0.05

AbortBody = Annotated[protocol.AbortRequest, Depends(json_body(protocol.AbortRequest))]


async def pause(
    manager: TokenizerManager, mode: PauseMode, request: Request | None = None
) -> ControlReqOutput[PauseReply]:
    """Stop stepping.  `mode` decides what becomes of the running requests.

    A wait pauses no replica if its client goes away, or if it fails on one of them.
    """
    verb = PauseGenerationReqInput
    if mode != "wait":
        return await manager.control(verb, mode=mode)
    wait_id, is_paused = uuid.uuid4().hex, False
    timeout_s = PAUSE_WAIT_S + verb.endpoint.deadline_s(manager.server_args.weight_update_timeout)
    work = manager.control(verb, timeout_s=timeout_s, mode=mode, wait_s=PAUSE_WAIT_S, wait_id=wait_id)
    try:
        answer = await (work if request is None else until_disconnect(request.scope, request.receive, work))
        is_paused = answer.success
        return answer
    finally:
        if not is_paused:
            await manager.control(GiveUpPauseReqInput, wait_id=wait_id)


class ControlRoutes:
    """SGLang's endpoints that pause, flush and abort."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        """Return the route of aborts.  An abort is no control verb, because it has no answer."""
        router = APIRouter(route_class=ControlRoute, tags=["control"])
        add_route(router, "/abort_request", self.abort_request, protocol.AbortRequest)
        return router

    async def flush_cache(self, timeout: Annotated[float, Query(ge=0, le=600)] = 0.0) -> Response:
        deadline = time.monotonic() + timeout
        while True:
            answer = await self._manager.control(FlushCacheReqInput)
            if answer.success:
                return PlainTextResponse("Cache flushed.\n")
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(FLUSH_POLL_S)
        prefix = "Timed out waiting for idle state. " if timeout else ""
        return PlainTextResponse(f"{prefix}{answer.message or 'Flush cache failed.'}\n", failed_status(answer))

    async def abort_request(self, body: AbortBody) -> Response:
        """Abort by the exact id of a request, a sample, a batch or a group of n samples.  Answers with an empty 200."""
        if body.abort_all:
            self._manager.abort_all()
        else:
            self._manager.abort([body.rid] if isinstance(body.rid, str) else body.rid)
        return Response(status_code=200)

    async def pause_generation(self, request: Request, body: Any) -> Response:
        return reply(await pause(self._manager, body.mode, request), {"status": "ok"})
