"""Endpoints that concern weights: transactions, transports, versions, checks.  All may demand the admin key.

Knows their bodies and replies.  What a verb does is the scheduler's business.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from rollout.core.errors import LockstepError
from rollout.core.message import ControlReqInput
from rollout.core.weight_io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    GetWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    ManifestEntry,
    PullWeightsReqInput,
    RefusedBucketReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)
from rollout.entrypoints import protocol
from rollout.entrypoints.control_io import ControlRoute, add_route, reply
from rollout.entrypoints.http_io import json_body, json_response, parse_body, read_limited
from rollout.entrypoints.metrics import Metrics
from rollout.entrypoints.tensor_body import read_tensor_body
from rollout.tokenizer_manager.manager import TokenizerManager

WEIGHT_MARGIN_S = 30.0
"""Over `--weight-update-timeout`, so that the scheduler's own deadline is the one that speaks."""

InitGroupBody = Annotated[
    protocol.InitWeightsUpdateGroupRequest, Depends(json_body(protocol.InitWeightsUpdateGroupRequest))
]
DestroyGroupBody = Annotated[
    protocol.DestroyWeightsUpdateGroupRequest, Depends(json_body(protocol.DestroyWeightsUpdateGroupRequest))
]
BeginBody = Annotated[protocol.BeginWeightUpdateRequest, Depends(json_body(protocol.BeginWeightUpdateRequest))]
EndBody = Annotated[protocol.EndWeightUpdateRequest, Depends(json_body(protocol.EndWeightUpdateRequest))]
AbortBody = Annotated[protocol.AbortWeightUpdateRequest, Depends(json_body(protocol.AbortWeightUpdateRequest))]
IpcBody = Annotated[protocol.UpdateWeightsFromIPCRequest, Depends(json_body(protocol.UpdateWeightsFromIPCRequest))]
DiskBody = Annotated[protocol.UpdateWeightsFromDiskRequest, Depends(json_body(protocol.UpdateWeightsFromDiskRequest))]
PullBody = Annotated[protocol.PullWeightsRequest, Depends(json_body(protocol.PullWeightsRequest))]
VersionBody = Annotated[protocol.UpdateWeightVersionRequest, Depends(json_body(protocol.UpdateWeightVersionRequest))]
GetWeightsBody = Annotated[protocol.GetWeightsByNameRequest, Depends(json_body(protocol.GetWeightsByNameRequest))]
CheckerBody = Annotated[protocol.WeightsCheckerRequest, Depends(json_body(protocol.WeightsCheckerRequest))]


class WeightRoutes:
    """SGLang's weight endpoints, and our own."""

    def __init__(self, manager: TokenizerManager, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics
        self._weight_timeout_s = manager.server_args.weight_update_timeout + WEIGHT_MARGIN_S

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["weights"])
        add_route(router, "/init_weights_update_group", self.init_group, protocol.InitWeightsUpdateGroupRequest)
        add_route(
            router, "/destroy_weights_update_group", self.destroy_group, protocol.DestroyWeightsUpdateGroupRequest
        )
        router.add_api_route("/weight_update", self.update_state, methods=["GET"])
        add_route(router, "/begin_weight_update", self.begin, protocol.BeginWeightUpdateRequest)
        add_route(router, "/end_weight_update", self.end, protocol.EndWeightUpdateRequest)
        add_route(router, "/abort_weight_update", self.abort_update, protocol.AbortWeightUpdateRequest)
        add_route(router, "/update_weights_from_distributed", self.bucket, protocol.UpdateWeightsFromDistributedRequest)
        add_route(router, "/update_weights_from_ipc", self.from_ipc, protocol.UpdateWeightsFromIPCRequest)
        add_route(router, "/update_weights_from_disk", self.from_disk, protocol.UpdateWeightsFromDiskRequest)
        add_route(router, "/pull_weights", self.pull, protocol.PullWeightsRequest)
        add_route(router, "/update_weights_from_tensor", self.from_tensor, protocol.UpdateWeightsFromTensorRequest)
        add_route(router, "/update_weight_version", self.update_version, protocol.UpdateWeightVersionRequest)
        add_route(router, "/get_weights_by_name", self.get_weights, protocol.GetWeightsByNameRequest)
        router.add_api_route("/get_weights_by_name", self.get_weights_by_query, methods=["GET"])
        add_route(router, "/weights_checker", self.check_weights, protocol.WeightsCheckerRequest, "GET", "POST")
        return router

    async def _weights(self, verb: type[ControlReqInput], **fields: Any) -> Response:
        return reply(await self._manager.control(verb, self._weight_timeout_s, **fields))

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
            update_id=body.update_id,
            weight_version=body.weight_version,
            coverage=body.coverage,
            manifest=manifest,
            base_version=body.base_version,
            base_digest=body.base_digest,
            lease_s=body.lease_s,
            placement_epoch=body.placement_epoch,
            adopt_placement=body.adopt_placement,
        )

    async def update_state(
        self, update_id: Annotated[str | None, Query(min_length=1, max_length=64)] = None
    ) -> Response:
        """The open weight update: what came, what is missing, its lease; and why the last one failed.

        With an `update_id`: what became of that one.
        """
        answer = await self._manager.control(GetWeightUpdateReqInput, self._weight_timeout_s, update_id=update_id)
        return json_response(answer.data) if answer.success else reply(answer)

    async def bucket(self, request: Request) -> Response:
        """Receive tensors by broadcast from rank 0 of the group."""
        return await self.receive_bucket(await self.read_bucket(request))

    async def read_bucket(self, request: Request) -> protocol.UpdateWeightsFromDistributedRequest:
        """The body.  One that cannot be read is told to the engine, as its broadcast may come all the same."""
        data = b"unread"
        try:
            data = await read_limited(request)
            return await asyncio.to_thread(parse_body, protocol.UpdateWeightsFromDistributedRequest, data)
        except LockstepError as error:
            await self._refuse_bucket(data, error)
            raise

    async def receive_bucket(self, body: protocol.UpdateWeightsFromDistributedRequest) -> Response:
        fields = body.model_dump(exclude={"selector"})
        started = time.monotonic()
        answer = await self._manager.control(UpdateWeightsFromDistributedReqInput, self._weight_timeout_s, **fields)
        self._metrics.on_weight_load("distributed", time.monotonic() - started)
        return reply(answer)

    async def _refuse_bucket(self, data: bytes, error: LockstepError) -> None:
        """Its sender broadcasts all the same, and the next bucket would be taken for what comes: the engine leaves the
        group that the body names, or all if it names none that can be read.
        """
        address: dict[str, Any] = {"group_name": None}
        with suppress(LockstepError):
            address = (await asyncio.to_thread(parse_body, protocol.BucketAddress, data)).model_dump()
        with suppress(LockstepError):
            await self._manager.control(RefusedBucketReqInput, self._weight_timeout_s, reason=str(error), **address)

    async def from_ipc(self, body: IpcBody) -> Response:
        """Receive tensors from a parameter server on this machine, as a worker of checkpoint-engine does."""
        fields = body.model_dump(exclude={"selector"})
        started = time.monotonic()
        answer = await self._manager.control(UpdateWeightsFromIPCReqInput, self._weight_timeout_s, **fields)
        self._metrics.on_weight_load("ipc", time.monotonic() - started)
        return reply(answer)

    async def from_disk(self, body: DiskBody) -> Response:
        """Load a checkpoint folder, all or nothing; `model_path` in /model_info changes only on success."""
        verb = UpdateWeightsFromDiskReqInput
        fields = body.model_dump(include=set(verb.__struct_fields__))
        started = time.monotonic()
        answer = await self._manager.control(verb, self._weight_timeout_s, **fields)
        self._metrics.on_weight_load("disk", time.monotonic() - started)
        return reply(answer)

    async def pull(self, body: PullBody) -> Response:
        """Bring a local checkpoint folder to a published version and, if asked, the weights that serve."""
        return await self._weights(PullWeightsReqInput, **body.model_dump())

    async def from_tensor(self, request: Request) -> Response:
        """Receive tensors that are in the body, or in shared memory of this machine."""
        args = self._manager.server_args
        replicas = 1 if args.enable_dp_attention else args.dp_size
        fields = await read_tensor_body(request, args.max_payload_bytes, args.tp_size, replicas)
        started = time.monotonic()
        answer = await self._manager.control(UpdateWeightsFromTensorReqInput, self._weight_timeout_s, **fields)
        self._metrics.on_weight_load("tensor", time.monotonic() - started)
        return reply(answer)

    async def end(self, body: EndBody) -> Response:
        """Verify what came and put it in force, all or nothing; with a `phase`, only one of the two."""
        return await self._weights(EndWeightUpdateReqInput, **body.model_dump())

    async def abort_update(self, body: AbortBody) -> Response:
        """Drop the open weight update: the previous weights serve."""
        return await self._weights(AbortWeightUpdateReqInput, **body.model_dump())

    async def update_version(self, body: VersionBody) -> Response:
        """Rename the version in force, or the one being received."""
        fields = body.model_dump()
        answer = await self._manager.control(UpdateWeightVersionReqInput, self._weight_timeout_s, **fields)
        return reply(answer, {"new_version": body.new_version})

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
        if not answer.success:
            return reply(answer)
        return await asyncio.to_thread(json_response, answer.data["parameter"])

    async def check_weights(self, body: CheckerBody) -> Response:
        """Fingerprints of all logical tensors and their digest; a snapshot of them, or a comparison with it."""
        fields = body.model_dump(exclude={"allow_quant_error", "selector"})
        answer = await self._manager.control(WeightsCheckerReqInput, self._weight_timeout_s, **fields)
        if not answer.success:
            return reply(answer)
        if body.action == "compare" and not answer.data["equal"]:
            error = {"type": "WeightsDiffer", "message": answer.message}
            return json_response(answer.data | {"success": False, "message": answer.message, "error": error}, 409)
        if body.action != "checksum":
            return reply(answer)
        checksums, digest = answer.data["checksums"], answer.data["digest"]
        rank = {"checksums": checksums, "per_gpu_checksum": digest, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}
        return reply(answer, {"ranks": [rank], "per_engine_checksum": digest})
