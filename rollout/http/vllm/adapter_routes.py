"""Loads and unloads of adapters over HTTP, in the forms of vLLM, SGLang and SkyRL.  May demand the admin key.

SGLang   /load_lora_adapter and its two forms for tensors, /register_lora_adapter, /unload_lora_adapter
                                                           the verbs' own routes; a refusal has `error_message`
vLLM     /v1/load_lora_adapter, /v1/unload_lora_adapter    a name that is served is refused without load_inplace
SkyRL    /skyrl/v1/load_lora_adapter                       a name that is served gets its next version
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import PlainTextResponse, Response

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest
from rollout.core.messages.adapters import (
    LoadLoraAdapterFromDistributedReqInput,
    LoadLoraAdapterFromTensorsReqInput,
    LoadLoraAdapterReqInput,
    RegisterLoraAdapterReqInput,
    UnloadLoraAdapterReqInput,
)
from rollout.core.messages.message import ControlReqOutput, Name
from rollout.http.control.body import body_of, fields_of
from rollout.http.control.io import ControlRoute, add_route, failed_status, refusal_content, reply
from rollout.http.control.tensor_body import read_adapter_body
from rollout.http.control.verbs import VerbRoutes
from rollout.http.control.weights import WeightRoutes, raw_lists
from rollout.http.io import json_body, json_response
from rollout.http.protocol import Body
from rollout.http.vllm.weight_routes import VllmWeightRoutes


class VllmLoadRequest(Body):
    """POST /v1/load_lora_adapter.  `base_model_name` only labels the adapter, whose parent is the served model."""

    unsupported = frozenset({"is_3d_lora_weight"})

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False
    base_model_name: str | None = None


class VllmUnloadRequest(Body):
    """POST /v1/unload_lora_adapter.  `lora_int_id` has no meaning here: adapters are found by name."""

    lora_name: Name
    lora_int_id: int | None = None


class SkyrlLoadRequest(Body):
    """POST /skyrl/v1/load_lora_adapter: a folder that the server can read, or what a weight update has brought."""

    unsupported = frozenset({"upload_id"})

    lora_name: Name
    lora_path: Name | None = None
    in_memory: bool = False


VllmLoadBody = Annotated[VllmLoadRequest, Depends(json_body(VllmLoadRequest))]
VllmUnloadBody = Annotated[VllmUnloadRequest, Depends(json_body(VllmUnloadRequest))]
SkyrlLoadBody = Annotated[SkyrlLoadRequest, Depends(json_body(SkyrlLoadRequest))]


class AdapterRoutes:
    """Sends the same verbs for all forms, so that an adapter reaches every rank of every engine or none."""

    def __init__(self, verbs: VerbRoutes, buckets: WeightRoutes, weights: VllmWeightRoutes, args: ServerArgs) -> None:
        self._verbs, self._buckets, self._weights, self._args = verbs, buckets, weights, args

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["vLLM control"])
        add_route(router, "/v1/load_lora_adapter", self.vllm_load, VllmLoadRequest)
        add_route(router, "/v1/unload_lora_adapter", self.vllm_unload, VllmUnloadRequest)
        add_route(router, "/skyrl/v1/load_lora_adapter", self.skyrl_load, SkyrlLoadRequest)
        return router

    async def load(self, _: Request, body: Any) -> Response:
        return _with_error_message(
            await self._verbs.ask(LoadLoraAdapterReqInput, **fields_of(LoadLoraAdapterReqInput, body))
        )

    async def load_tensors(self, request: Request) -> Response:
        args = self._args
        replicas = 1 if args.enable_dp_attention else args.dp_size
        fields = await read_adapter_body(request, args.max_payload_bytes, args.tp_size, replicas)
        return _with_error_message(await self._verbs.ask(LoadLoraAdapterFromTensorsReqInput, **fields))

    async def load_broadcast(self, request: Request) -> Response:
        verb = LoadLoraAdapterFromDistributedReqInput
        body = await self._buckets.read_bucket(request, body_of(verb))
        return _with_error_message(await self._verbs.ask(verb, **fields_of(verb, body), **raw_lists(body)))

    async def register(self, _: Request, body: Any) -> Response:
        return _with_error_message(
            await self._verbs.ask(RegisterLoraAdapterReqInput, **fields_of(RegisterLoraAdapterReqInput, body))
        )

    async def unload(self, _: Request, body: Any) -> Response:
        return _with_error_message(
            await self._verbs.ask(UnloadLoraAdapterReqInput, **fields_of(UnloadLoraAdapterReqInput, body))
        )

    async def vllm_load(self, body: VllmLoadBody) -> Response:
        """Load an adapter from a folder of PEFT; with `load_inplace` as the next version of a name that is served."""
        return await self._add(body.lora_name, body.lora_path, load_inplace=body.load_inplace)

    async def skyrl_load(self, body: SkyrlLoadBody) -> Response:
        """Load an adapter from a folder of PEFT, as the next version of its name.

        With `in_memory` confirm what the last weight update has put in force.
        """
        if body.in_memory == (body.lora_path is not None):
            raise BadRequest("give either lora_path, or in_memory after a weight update that brought the adapter")
        if body.lora_path is not None:
            return await self._add(body.lora_name, body.lora_path, load_inplace=True)
        self._weights.take_lora(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def vllm_unload(self, body: VllmUnloadBody) -> Response:
        """Take the name of an adapter away.  Requests that use it go on, and then its slots are free.

        A name that is not served is no mistake.
        """
        answer = await self._verbs.ask(UnloadLoraAdapterReqInput, lora_name=body.lora_name, missing_ok=True)
        return _in_words(answer, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _add(self, name: str, path: str, *, load_inplace: bool) -> Response:
        answer = await self._verbs.ask(
            LoadLoraAdapterReqInput, lora_name=name, lora_path=path, load_inplace=load_inplace
        )
        return _in_words(answer, f"Success: LoRA adapter '{name}' added successfully.")


def _in_words(answer: ControlReqOutput[Any], success: str) -> Response:
    return PlainTextResponse(success) if answer.success else reply(answer)


def _with_error_message(answer: ControlReqOutput[Any]) -> Response:
    """Return the reply with the field that SGLang's clients read, null after a success."""
    if answer.success:
        return reply(answer, {"error_message": None})
    content = refusal_content(answer.error_type, answer.message)
    return json_response(content | {"error_message": answer.message}, failed_status(answer))
