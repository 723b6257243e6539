"""`/start_profile`, `/stop_profile`: a trace of torch's profiler over the steps between.  May demand the admin key.

Knows SGLang's and vLLM's fields.  Does not know the profiler.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response

from rollout.core.io_struct import MAX_PROFILED_STEPS, StartProfileReqInput, StopProfileReqInput
from rollout.entrypoints.control_io import ControlRoute, add_route, reply
from rollout.entrypoints.http_io import json_body
from rollout.entrypoints.protocol import Body, EmptyRequest
from rollout.tokenizer_manager.manager import TokenizerManager

START_TIMEOUT_S = 60.0
WRITE_TIMEOUT_S = 600.0

NumSteps = Annotated[int, Field(ge=1, le=MAX_PROFILED_STEPS)]


class StartProfileRequest(Body):
    """POST /start_profile.  `num_steps` and `max_iterations` are one setting, of SGLang's and of vLLM's clients."""

    unsupported = frozenset({"start_step", "delay_iterations", "profile_by_stage", "profile_stages", "merge_profiles"})

    output_dir: str | None = Field(default=None, pattern="^/+[^/]", max_length=4096)
    profile_prefix: str = Field(default="lockstep", pattern=r"^[\w.-]{1,64}$")
    num_steps: NumSteps | None = None
    max_iterations: NumSteps | None = None
    activities: list[Literal["CPU", "GPU"]] = ["CPU", "GPU"]
    with_stack: bool = False
    record_shapes: bool = False


StartBody = Annotated[StartProfileRequest, Depends(json_body(StartProfileRequest))]


class ProfileRoutes:
    """Both by GET and POST, as SGLang has them."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["profile"])
        add_route(router, "/start_profile", self.start, StartProfileRequest, "GET", "POST")
        add_route(router, "/stop_profile", self.stop, EmptyRequest, "GET", "POST")
        return router

    async def start(self, body: StartBody) -> Response:
        """Record every step from now on; `files` will be written at the stop, or after `num_steps`."""
        fields = body.model_dump(exclude={"profile_prefix", "max_iterations"})
        fields["num_steps"] = body.num_steps or body.max_iterations
        answer = await self._manager.control(
            StartProfileReqInput, START_TIMEOUT_S, prefix=body.profile_prefix, **fields
        )
        return reply(answer)

    async def stop(self) -> Response:
        """Write the trace; replies when it is there."""
        return reply(await self._manager.control(StopProfileReqInput, WRITE_TIMEOUT_S))
