"""Endpoints that change the server: cache, aborts, pause, weights.  All may demand the admin key.

Knows their bodies and replies.  What a verb does is the scheduler's business.  A refusal is
`{"success": false, "message", "error": {"type", "message"}}` with its status; none can end the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse, Response

from rollout.core.errors import status_of
from rollout.core.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    ControlReqInput,
    ControlReqOutput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    ManifestEntry,
    PauseGenerationReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)
from rollout.entrypoints import protocol
from rollout.entrypoints.http_io import body_schema, describe_query, error_content, json_body, json_response, logger
from rollout.entrypoints.metrics import Metrics
from rollout.tokenizer_manager.manager import TokenizerManager

PAUSE_TIMEOUT_S = 60.0
FLUSH_TIMEOUT_S = 30.0
FLUSH_POLL_S = 0.05
WEIGHT_MARGIN_S = 30.0
"""Over `--weight-update-timeout`, so that the scheduler's own deadline is the one that speaks."""

EmptyBody = Annotated[protocol.EmptyRequest, Depends(json_body(protocol.EmptyRequest))]
AbortBody = Annotated[protocol.AbortRequest, Depends(json_body(protocol.AbortRequest))]
PauseBody = Annotated[protocol.PauseGenerationRequest, Depends(json_body(protocol.PauseGenerationRequest))]
InitGroupBody = Annotated[
    protocol.InitWeightsUpdateGroupRequest, Depends(json_body(protocol.InitWeightsUpdateGroupRequest))
]
DestroyGroupBody = Annotated[
    protocol.DestroyWeightsUpdateGroupRequest, Depends(json_body(protocol.DestroyWeightsUpdateGroupRequest))
]
BeginBody = Annotated[protocol.BeginWeightUpdateRequest, Depends(json_body(protocol.BeginWeightUpdateRequest))]
BucketBody = Annotated[
    protocol.UpdateWeightsFromDistributedRequest, Depends(json_body(protocol.UpdateWeightsFromDistributedRequest))
]
VersionBody = Annotated[protocol.UpdateWeightVersionRequest, Depends(json_body(protocol.UpdateWeightVersionRequest))]
GetWeightsBody = Annotated[protocol.GetWeightsByNameRequest, Depends(json_body(protocol.GetWeightsByNameRequest))]
CheckerBody = Annotated[protocol.WeightsCheckerRequest, Depends(json_body(protocol.WeightsCheckerRequest))]


class ControlRoute(APIRoute):
    """A route whose errors take the control endpoints' shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return _refusal("BadRequest", describe_query(error), 400)
            except Exception as error:
                if status_of(error) == 500:
                    logger.exception("%s failed", request.url.path)
                content = error_content(error)
                return _refusal(content["type"], content["message"], status_of(error))

        return guarded


class ControlRoutes:
    """SGLang's control endpoints."""

    def __init__(self, manager: TokenizerManager, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics
        self._weight_timeout_s = manager.server_args.weight_update_timeout + WEIGHT_MARGIN_S

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["control"])

        def add(path: str, handler: Callable[..., Any], body: type[protocol.Body], *methods: str) -> None:
            for method in methods or ("POST",):
                # One route per method, so that each has an operation id of its own.
                extra = body_schema(body) if method == "POST" else None
                router.add_api_route(path, handler, methods=[method], openapi_extra=extra)

        add("/flush_cache", self.flush_cache, protocol.EmptyRequest, "GET", "POST")
        add("/abort_request", self.abort_request, protocol.AbortRequest)
        add("/pause_generation", self.pause_generation, protocol.PauseGenerationRequest)
        add("/continue_generation", self.continue_generation, protocol.EmptyRequest)
        add("/init_weights_update_group", self.init_group, protocol.InitWeightsUpdateGroupRequest)
        add("/destroy_weights_update_group", self.destroy_group, protocol.DestroyWeightsUpdateGroupRequest)
        add("/begin_weight_update", self.begin, protocol.BeginWeightUpdateRequest)
        add("/end_weight_update", self.end, protocol.EmptyRequest)
        add("/abort_weight_update", self.abort_update, protocol.EmptyRequest)
        add("/update_weights_from_distributed", self.bucket, protocol.UpdateWeightsFromDistributedRequest)
        add("/update_weight_version", self.update_version, protocol.UpdateWeightVersionRequest)
        add("/get_weights_by_name", self.get_weights, protocol.GetWeightsByNameRequest)
        router.add_api_route("/get_weights_by_name", self.get_weights_by_query, methods=["GET"])
        add("/weights_checker", self.check_weights, protocol.WeightsCheckerRequest, "GET", "POST")
        return router

    # --- cache, aborts, pause ------------------------------------------------------------------------------------

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
        return PlainTextResponse(f"{prefix}{answer.message or 'Flush cache failed.'}\n", _failed_status(answer))

    async def abort_request(self, body: AbortBody) -> Response:
        """Abort by the exact id of a request, a sample, a batch or a group of n samples.  Always 200, empty."""
        if body.abort_all:
            self._manager.abort_all()
        else:
            self._manager.abort([body.rid] if isinstance(body.rid, str) else body.rid)
        return Response(status_code=200)

    async def pause_generation(self, body: PauseBody) -> Response:
        """Replies once the scheduler has stopped stepping."""
        answer = await self._manager.control(PauseGenerationReqInput, PAUSE_TIMEOUT_S, mode=body.mode)
        return _status_reply(answer, "Generation paused successfully.", self._manager.paused)

    async def continue_generation(self, _: EmptyBody) -> Response:
        """Also settles a weight update that was sent without begin and end."""
        answer = await self._manager.control(ContinueGenerationReqInput, self._weight_timeout_s)
        return _status_reply(answer, "Generation continued successfully.", self._manager.paused)

    # --- weights -------------------------------------------------------------------------------------------------

    async def _weights(self, verb: type[ControlReqInput], **fields: Any) -> Response:
        return _reply(await self._manager.control(verb, self._weight_timeout_s, **fields))

    async def init_group(self, body: InitGroupBody) -> Response:
        """Join a process group with the trainer; replies when all members are there."""
        return await self._weights(InitWeightsUpdateGroupReqInput, **body.model_dump())

    async def destroy_group(self, body: DestroyGroupBody) -> Response:
        return await self._weights(DestroyWeightsUpdateGroupReqInput, group_name=body.group_name)

    async def begin(self, body: BeginBody) -> Response:
        """Open a weight update.  Nothing changes for requests until it ends."""
        manifest = None
        if body.manifest is not None:
            manifest = [ManifestEntry(**entry.model_dump()) for entry in body.manifest]
        return await self._weights(
            BeginWeightUpdateReqInput,
            weight_version=body.weight_version,
            coverage=body.coverage,
            manifest=manifest,
        )

    async def bucket(self, body: BucketBody) -> Response:
        """Receive tensors by broadcast from rank 0 of the group."""
        fields = body.model_dump(exclude={"selector"})
        started = time.monotonic()
        answer = await self._manager.control(UpdateWeightsFromDistributedReqInput, self._weight_timeout_s, **fields)
        self._metrics.on_weight_load("distributed", time.monotonic() - started)
        return _reply(answer)

    async def end(self, _: EmptyBody) -> Response:
        """Verify what came and put it in force, all or nothing."""
        return await self._weights(EndWeightUpdateReqInput)

    async def abort_update(self, _: EmptyBody) -> Response:
        return await self._weights(AbortWeightUpdateReqInput)

    async def update_version(self, body: VersionBody) -> Response:
        """Rename the version in force, or the one being received."""
        fields = body.model_dump()
        answer = await self._manager.control(UpdateWeightVersionReqInput, self._weight_timeout_s, **fields)
        return _reply(answer, {"new_version": body.new_version})

    async def get_weights(self, body: GetWeightsBody) -> Response:
        """The first `truncate_size` rows of a tensor as nested lists."""
        return await self._get_weights(body.name, body.truncate_size)

    async def get_weights_by_query(
        self, name: str, truncate_size: Annotated[int, Query(ge=0, lt=2**31)] = 100
    ) -> Response:
        return await self._get_weights(name, truncate_size)

    async def _get_weights(self, name: str, truncate_size: int) -> Response:
        answer = await self._manager.control(
            GetWeightsByNameReqInput, self._weight_timeout_s, name=name, truncate_size=truncate_size
        )
        return json_response(answer.data["parameter"]) if answer.success else _reply(answer)

    async def check_weights(self, _: CheckerBody) -> Response:
        """Fingerprints of all logical tensors, and their digest."""
        answer = await self._manager.control(WeightsCheckerReqInput, self._weight_timeout_s)
        if not answer.success:
            return _reply(answer)
        checksums, digest = answer.data["checksums"], answer.data["digest"]
        rank = {"checksums": checksums, "per_gpu_checksum": digest, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}
        return _reply(answer, {"ranks": [rank], "per_engine_checksum": digest})


def _reply(answer: ControlReqOutput, extra: dict[str, Any] | None = None) -> Response:
    """The common reply; what the scheduler adds is at the top level."""
    if answer.success:
        return json_response(answer.data | (extra or {}) | {"success": True, "message": answer.message})
    kind = str(answer.data.get("error_type", "ControlError"))
    return _refusal(kind, answer.message, _failed_status(answer))


def _status_reply(answer: ControlReqOutput, message: str, paused: bool) -> Response:
    if not answer.success:
        return _reply(answer)
    status = {"message": answer.message or message, "status": "ok", "success": True, "paused": paused}
    return json_response(answer.data | status)


def _refusal(kind: str, message: str, status_code: int) -> Response:
    content = {"success": False, "message": message, "error": {"type": kind, "message": message}}
    return json_response(content, status_code)


def _failed_status(answer: ControlReqOutput) -> int:
    return answer.status_code if answer.status_code >= 400 else 400
