"""vLLM's `/collective_rpc`, with a closed list of methods.

A method of vLLM's workers is any Python there; here each name in the list is a verb that has an endpoint of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends
from starlette.responses import Response

from rollout.core.errors import BadRequest, LockstepError
from rollout.core.messages.weights import UpdateWeightsFromIPCReqInput
from rollout.http import protocol
from rollout.http.control.body import body_of
from rollout.http.control.io import ControlRoute, add_route
from rollout.http.control.verbs import VerbRoutes
from rollout.http.io import json_body, json_response, validated
from rollout.http.vllm import control_protocol as bodies
from rollout.http.vllm.control_routes import VllmControlRoutes
from rollout.http.vllm.weight_routes import VllmWeightRoutes

RpcBody = Annotated[bodies.CollectiveRpcRequest, Depends(json_body(bodies.CollectiveRpcRequest))]


class _Method(NamedTuple):
    """The body and handler of a method; `first`: the argument that may come without its name."""

    first: str
    body: type[protocol.Body]
    call: Callable[[Any], Awaitable[Response]]


class RpcRoutes:
    """The routes of workers' methods.  `num_ranks`: how many workers answer a call."""

    def __init__(
        self, verbs: VerbRoutes, vllm_weights: VllmWeightRoutes, control: VllmControlRoutes, num_ranks: int
    ) -> None:
        self._vllm_weights = vllm_weights
        self._num_ranks = num_ranks
        self._methods = {
            # checkpoint-engine's
            "update_weights_from_ipc": _Method(
                "zmq_handles",
                body_of(UpdateWeightsFromIPCReqInput),
                functools.partial(verbs.respond, UpdateWeightsFromIPCReqInput),
            ),
            # SkyRL's
            "skyrl_start_weight_update": _Method(
                "is_checkpoint_format", bodies.StartWeightUpdateRequest, vllm_weights.start_update
            ),
            "start_draft_weight_update": _Method(
                "is_checkpoint_format", bodies.StartWeightUpdateRequest, vllm_weights.start_draft_update
            ),
            "update_weights_nccl": _Method("update_info", bodies.UpdateWeightsRequest, vllm_weights.update),
            "skyrl_finish_weight_update": _Method(
                "weight_version", bodies.FinishWeightUpdateRequest, vllm_weights.finish_update
            ),
            "skyrl_set_lora_receive_target": _Method(
                "receive_target", bodies.SetLoraReceiveTarget, vllm_weights.set_lora_target
            ),
            "skyrl_discard_in_memory_lora": _Method("lora_name", bodies.DiscardInMemoryLora, vllm_weights.discard_lora),
            "skyrl_sleep_for_weight_sync": _Method("offload_kv", bodies.SleepForWeightSync, control.sleep_for_sync),
            "skyrl_wake_for_weight_sync": _Method("tags", bodies.WakeForWeightSync, control.wake_for_sync),
        }

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["vLLM workers"])
        add_route(router, "/collective_rpc", self.collective_rpc, bodies.CollectiveRpcRequest)
        return router

    async def collective_rpc(self, body: RpcBody) -> Response:
        """Call one of the listed methods on all ranks.  The reply is null for each of them, or the refusal."""
        method = self._methods.get(body.method)
        if method is None:
            raise BadRequest(f"method {body.method[:64]!r} is not admitted; known: {', '.join(self._methods)}")
        try:
            arguments = _arguments(method, body)
        except LockstepError as error:
            if method.body is bodies.UpdateWeightsRequest:
                await self._vllm_weights.refuse(error)
            raise
        response = await method.call(arguments)
        return json_response({"results": [None] * self._num_ranks}) if response.status_code == 200 else response


def _arguments(method: _Method, body: bodies.CollectiveRpcRequest) -> Any:
    if len(body.args) > 1:
        raise BadRequest(f"{body.method} takes one argument without a name, {method.first}; got {len(body.args)}")
    given = dict(zip([method.first], body.args)) | body.kwargs
    unknown = sorted(given.keys() - method.body.model_fields.keys())
    if unknown:
        raise BadRequest(f"{body.method} does not take {unknown[0][:64]!r}")
    arguments = validated(method.body, given)
    arguments.lists = body.lists
    return arguments
