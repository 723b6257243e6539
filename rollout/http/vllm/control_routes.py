"""vLLM's control endpoints: pause, abort, sleep, prefix cache.  All may demand the admin key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ContinueReply,
    FlushCacheReqInput,
    MemoryTag,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.message import ControlReqOutput
from rollout.http.control.io import ControlRoute, add_route, reply
from rollout.http.control.routes import pause
from rollout.http.io import json_body, json_response
from rollout.http.native.info import state_of
from rollout.http.protocol import EmptyRequest
from rollout.http.server_info import num_ranks
from rollout.http.vllm.control_protocol import (
    AbortRequestsRequest,
    ResetPrefixCacheRequest,
    SleepForWeightSync,
    SleepTag,
    WakeForWeightSync,
)
from rollout.tokenizer_manager.manager import TokenizerManager

VllmPauseMode = Literal["abort", "wait", "keep"]
_PAUSES: Mapping[VllmPauseMode, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}
_SLEEPS: tuple[SleepTag, ...] = ("weights", "kv_cache")

AbortBody = Annotated[AbortRequestsRequest, Depends(json_body(AbortRequestsRequest))]
ResetBody = Annotated[ResetPrefixCacheRequest, Depends(json_body(ResetPrefixCacheRequest))]


class VllmControlRoutes:
    """Routes of vLLM's control endpoints, and the steps that other dialects share with them."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["vLLM control"])
        add_route(router, "/pause", self.pause, EmptyRequest)
        add_route(router, "/resume", self.resume, EmptyRequest)
        add_route(router, "/is_paused", self.is_paused, EmptyRequest, "GET")
        add_route(router, "/abort_requests", self.abort_requests, AbortRequestsRequest)
        add_route(router, "/sleep", self.sleep, EmptyRequest)
        add_route(router, "/wake_up", self.wake_up, EmptyRequest)
        add_route(router, "/is_sleeping", self.is_sleeping, EmptyRequest, "GET")
        add_route(router, "/reset_prefix_cache", self.reset_prefix_cache, ResetPrefixCacheRequest)
        add_route(router, "/get_world_size", self.get_world_size, EmptyRequest, "GET")
        return router

    # --- pause ---------------------------------------------------------------------------------------------------

    async def pause(
        self,
        request: Request,
        mode: VllmPauseMode = "abort",
        clear_cache: bool = True,
        wait_for_inflight_requests: bool = False,
    ) -> Response:
        """Pause generation, and reply once the scheduler has stopped stepping.

        `clear_cache` empties the prefix cache, but not in mode keep.  `wait_for_inflight_requests` is the old name of
        mode wait.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        answer: ControlReqOutput[Any] = await pause(self._manager, _PAUSES[mode], request)
        if answer.success and clear_cache and mode != "keep":
            flushed = await self._manager.control(FlushCacheReqInput)
            answer = answer if flushed.success else flushed
        return reply(answer, {"status": "paused"})

    async def resume(self) -> Response:
        """Resume generation; also settle a weight update that was sent without start and finish."""
        return reply(await self._continue(), {"status": "resumed"})

    async def is_paused(self) -> Response:
        """Return whether generation is paused: true from the call of a pause on, also while it waits for requests."""
        return json_response({"is_paused": (await state_of(self._manager)).paused})

    async def abort_requests(self, body: AbortBody) -> Response:
        """End the listed requests with what they have, or all without a list; does not pause."""
        if body.request_ids is None:
            aborted = self._manager.num_in_flight
            self._manager.abort_all()
        else:
            aborted = len(body.request_ids)
            self._manager.abort(body.request_ids)
        return json_response({"status": "aborted", "aborted": aborted})

    # --- sleep ---------------------------------------------------------------------------------------------------

    async def sleep(
        self,
        request: Request,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: VllmPauseMode = "abort",
        tags: Annotated[list[SleepTag] | None, Query()] = None,
    ) -> Response:
        """Pause.  From level 1 on, also give back the memory of weights and KV, or of the ones that `tags` name.

        Level 1 keeps a copy of the weights.  With mode keep, requests give up their KV and compute it again.
        """
        if level == 0:
            return reply(await pause(self._manager, _PAUSES[mode], request), {"status": "sleeping", "level": level})
        wanted = list(_SLEEPS) if tags is None else tags
        self._require_sleep(level, wanted)
        answer = await self._release(wanted, "retract" if mode == "keep" else _PAUSES[mode], request)
        return reply(answer, {"status": "sleeping", "level": level})

    def _require_sleep(self, level: int, tags: list[SleepTag]) -> None:
        args = self._manager.server_args
        if not args.enable_memory_saver:
            raise UnsupportedFeature(f"level {level} gives memory back: start the server with --enable-memory-saver")
        if level == 1 and "weights" in tags and not args.enable_weights_cpu_backup:
            raise UnsupportedFeature(
                "level 1 keeps a copy of the weights: start the server with --enable-weights-cpu-backup, or use level 2"
            )

    async def sleep_for_sync(self, _: SleepForWeightSync) -> Response:
        """Sleep as with level 2 and mode keep."""
        self._require_sleep(2, list(_SLEEPS))
        return reply(await self._release(list(_SLEEPS), "retract"))

    async def _release(
        self, tags: list[SleepTag], mode: PauseMode, request: Request | None = None
    ) -> ControlReqOutput[Any]:
        """Pause, then release what is in use of `tags`.  A refused release leaves no pause behind."""
        state = await state_of(self._manager)
        in_use: list[MemoryTag] = [tag for tag in tags if state.memory[tag] != "released"]
        answer: ControlReqOutput[Any] = await pause(self._manager, mode, request)
        if not answer.success or not in_use:
            return answer
        answer = await self._manager.control(ReleaseMemoryOccupationReqInput, tags=in_use)
        if not answer.success and not state.paused:
            await self._continue()
        return answer

    async def wake_up(
        self, tags: Annotated[list[Literal["weights", "kv_cache", "scheduling"]] | None, Query()] = None
    ) -> Response:
        """Take memory again, and go on once nothing sleeps any more.  What is awake already stays so."""
        answer: ControlReqOutput[Any] | None
        answer, asleep = await self._resume_memory(tags)
        if answer is None or answer.success:
            answer = answer if asleep else await self._continue()
        status = {"status": "sleeping" if asleep else "awake", "tags": tags}
        return json_response(status) if answer is None else reply(answer, status)

    async def wake_for_sync(self, body: WakeForWeightSync) -> Response:
        """Take memory again; generation stays paused."""
        answer, _ = await self._resume_memory(body.tags)
        return json_response({"success": True}) if answer is None else reply(answer)

    async def _resume_memory(self, tags: list[Any] | None) -> tuple[ControlReqOutput[Any] | None, list[MemoryTag]]:
        """Take back the memory of `tags` that was released, or all of it without `tags`.

        Returns the answer, None if nothing was released, and the tags that sleep on.  Raises `BadRequest` for an empty
        list, which names nothing.
        """
        if tags is not None and not tags:
            raise BadRequest("tags is an empty list, which names nothing; leave it out for all")
        memory = (await state_of(self._manager)).memory
        asleep: list[MemoryTag] = [tag for tag in _SLEEPS if memory[tag] == "released"]
        wanted = [tag for tag in asleep if tags is None or tag in tags]
        if not wanted:
            return None, asleep
        answer = await self._manager.control(ResumeMemoryOccupationReqInput, tags=wanted)
        return answer, [tag for tag in asleep if tag not in wanted]

    async def is_sleeping(self) -> Response:
        return json_response({"is_sleeping": "released" in (await state_of(self._manager)).memory.values()})

    # --- the rest ------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(
        self, body: ResetBody, reset_running_requests: bool = False, reset_external: bool = False
    ) -> Response:
        """Clear the prefix cache; `success` is false while requests hold KV.

        With `reset_running_requests` they give it up and compute it again.  `reset_external`: there is no other cache.
        """
        retract = reset_running_requests or body.reset_running_requests
        answer = await self._manager.control(FlushCacheReqInput, retract=retract)
        if not answer.success and answer.status_code != 400:
            return reply(answer)
        return json_response({"success": answer.success, "message": answer.message})

    async def get_world_size(self, include_dp: bool = True) -> Response:
        """Return how many ranks join a weight update group; without `include_dp`, of one data-parallel replica."""
        args = self._manager.server_args
        return json_response({"world_size": num_ranks(args) if include_dp else args.tp_size})

    async def _continue(self) -> ControlReqOutput[ContinueReply]:
        return await self._manager.control(ContinueGenerationReqInput)
