"""AReaL's additions to a vLLM server: other names of pause, resume and weight calls, and adapters by broadcast.

    /areal_set_update_weight_meta        announces the tensors that the next call brings
    /areal_update_weights_xccl           brings them
    /areal_set_update_weight_meta_lora   announces tensors of an adapter
    /areal_update_weights_lora_xccl      brings them, with the same body

An adapter's tensors come in one call, or in one for each group of the trainer and for each of its buckets.  The adapter
is in force once all are there.  A continue with some missing is refused.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest, Conflict, LockstepError
from rollout.core.messages.adapters import UnloadLoraAdapterReqInput
from rollout.core.messages.message import ControlReqOutput, Name, Size
from rollout.core.messages.update_state import TargetOfUpdate, UpdateStateReply
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    RefusedBucketReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from rollout.http.control.body import body_of
from rollout.http.control.io import ControlRoute, add_route, reply
from rollout.http.control.verbs import VerbRoutes
from rollout.http.control.weights import WeightRoutes
from rollout.http.io import json_response
from rollout.http.protocol import Body, EmptyRequest
from rollout.http.vllm.control_routes import VllmControlRoutes


class ArealLoraBucket(Body):
    """Tensors of an adapter, and its configuration.  The name that it replaces has the same `lora_int_id`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    group_name: Name
    lora_name: Name
    lora_int_id: int
    lora_target_modules: list[str] | str
    lora_rank: int
    lora_alpha: int | float
    lora_bias: str
    base_model_name: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of PEFT's `adapter_config.json`."""
        settings = {"r": self.lora_rank, "lora_alpha": self.lora_alpha, "bias": self.lora_bias}
        return {"peft_type": "LORA", "target_modules": self.lora_target_modules} | settings


@dataclass(frozen=True)
class _OpenUpdate:
    """An update of an adapter of which some tensors came."""

    update_id: str
    name: str


class ArealRoutes:
    """One for a server.  It holds what was announced, the adapter that is on its way, and names by AReaL's numbers."""

    def __init__(self, verbs: VerbRoutes, weights: WeightRoutes, control: VllmControlRoutes, args: ServerArgs) -> None:
        self._ask, self._weights, self._control = verbs.ask, weights, control
        self._announced: Body | None = None
        self._open: _OpenUpdate | None = None
        self._turn = asyncio.Lock()  # of calls for adapters
        self._names = dict(enumerate(args.adapter_folders, 1))  # vLLM numbers the adapters of the start from 1

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["vLLM workers"])
        bucket = body_of(UpdateWeightsFromDistributedReqInput)
        add_route(router, "/areal_pause_generation", self._control.pause, EmptyRequest)
        add_route(router, "/areal_continue_generation", self.resume, EmptyRequest)
        add_route(router, "/areal_set_update_weight_meta", self.announce, bucket)
        add_route(router, "/areal_update_weights_xccl", self.receive_announced, EmptyRequest)
        add_route(router, "/areal_set_update_weight_meta_lora", self.announce_adapter, ArealLoraBucket)
        add_route(router, "/areal_update_weights_lora_xccl", self.receive_adapter, ArealLoraBucket)
        return router

    async def resume(self) -> Response:
        """Resume generation; also settle a weight update that was sent without start and finish.

        Refused, once, where tensors of an adapter are missing, which is dropped then.
        """
        async with self._turn:
            left, self._open = self._open, None
            state = None if left is None else await self._state_of(left)
            if left is not None:
                await self._drop(left)
            if left is not None and state is not None:
                raise Conflict(f"the adapter {left.name!r} was dropped: {_missing(state)}")
        return await self._control.resume()

    # --- the model -----------------------------------------------------------------------------------------------

    async def announce(self, request: Request) -> Response:
        """Announce the tensors that the next /areal_update_weights_xccl brings."""
        body: Any = await self._weights.read_bucket(request)
        self._announced = body
        return _announced(len(body.names) if body.lists is None else body.lists.num_names)

    async def receive_announced(self) -> Response:
        """Receive the tensors that were announced, by broadcast from rank 0 of the group."""
        announced, self._announced = self._announced, None
        if announced is None:
            raise Conflict("no tensors were announced: POST /areal_set_update_weight_meta")
        return await self._weights.receive_bucket(announced)

    # --- adapters ------------------------------------------------------------------------------------------------

    async def announce_adapter(self, request: Request) -> Response:
        """Announce tensors of an adapter.  The call that brings them has the same body, so nothing is kept."""
        body: Any = await self._weights.read_bucket(request, ArealLoraBucket)
        return _announced(len(body.names))

    async def receive_adapter(self, request: Request) -> Response:
        """Receive tensors of an adapter, by broadcast from rank 0 of the group.

        With the last of them it comes into force.  The name that had its number before is taken away: requests that
        hold it go on.
        """
        body: Any = await self._weights.read_bucket(request, ArealLoraBucket)
        async with self._turn:
            try:
                opened = self._open = await self._join(body)
            except LockstepError as error:
                await self._ask(RefusedBucketReqInput, reason=str(error), group_name=body.group_name)
                raise
            answer: ControlReqOutput[Any] = await self._ask(
                UpdateWeightsFromDistributedReqInput,
                names=body.names,
                dtypes=body.dtypes,
                shapes=body.shapes,
                group_name=body.group_name,
                update_id=opened.update_id,
            )
            state = await self._state_of(opened) if answer.success else None
            if state is not None and state.missing:
                return json_response({"success": True, "message": f"{len(body.names)} tensors came; {_missing(state)}"})
            self._open = None
            if answer.success:
                answer = await self._ask(EndWeightUpdateReqInput, update_id=opened.update_id)
            if answer.success:
                await self._replace(body)
            else:
                await self._drop(opened)
        return reply(answer)

    async def _join(self, body: ArealLoraBucket) -> _OpenUpdate:
        """Return the update that these tensors belong to.  Raises the refusal of its begin."""
        left = self._open
        if left is not None:
            if left.name == body.lora_name and await self._state_of(left) is not None:
                return left
            self._open = None
            await self._drop(left)
        opened = _OpenUpdate(f"areal-{uuid.uuid4().hex}", body.lora_name)
        target = TargetOfUpdate(adapter=body.lora_name, config=body.config)
        answer = await self._ask(
            BeginWeightUpdateReqInput, update_id=opened.update_id, target=target, **self._manifest(body)
        )
        if not answer.success:
            raise (Conflict if answer.status_code == Conflict.status_code else BadRequest)(answer.message)
        return opened

    def _manifest(self, body: ArealLoraBucket) -> dict[str, bytes]:
        """Return the manifest that a begin needs where the modules are no list."""
        if isinstance(body.lora_target_modules, list):
            return {}
        if body.lora_name in self._names.values():
            raise Conflict(
                f"the adapter {body.lora_name!r} came already: with target_modules {body.lora_target_modules[:64]!r} "
                "all tensors come in one call; list the modules"
            )
        entries = zip(body.names, body.dtypes, body.shapes, strict=False)  # lists of other lengths: the bucket's fault
        stated = [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in entries]
        return {"manifest_entries": msgspec.json.encode(stated)}

    async def _replace(self, body: ArealLoraBucket) -> None:
        """Take the name away that had this adapter's number."""
        before = self._names.get(body.lora_int_id, body.lora_name)
        self._names[body.lora_int_id] = body.lora_name
        if before != body.lora_name:
            await self._ask(UnloadLoraAdapterReqInput, lora_name=before, missing_ok=True)

    async def _drop(self, opened: _OpenUpdate) -> None:
        """Drop this update.  It may be over already, which is refused then."""
        await self._ask(AbortWeightUpdateReqInput, update_id=opened.update_id)

    async def _state_of(self, opened: _OpenUpdate) -> UpdateStateReply | None:
        """Return the state of this update, or None where it is not open, or has failed."""
        found = (await self._ask(GetWeightUpdateReqInput)).data
        is_open = found is not None and found.update_id == opened.update_id and not isinstance(found.failed, str)
        return found if is_open else None


def _announced(count: int) -> Response:
    return json_response({"success": True, "message": f"{count} tensors announced."})


def _missing(state: UpdateStateReply) -> str:
    names = state.missing_names if isinstance(state.missing_names, list) else []
    return f"{state.missing} of its tensors are missing: {', '.join(names[:3])}"
