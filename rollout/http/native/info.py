"""Health, readiness, model and server facts, loads and metrics: endpoints that change nothing.

Every number comes from the scheduler's own answer, which has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Response
from starlette.responses import PlainTextResponse

from rollout.core.errors import LockstepError, Unavailable
from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.messages.message import START_ID_HEADER
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.version import VERSION
from rollout.http.direct import DirectRoute
from rollout.http.io import json_response
from rollout.http.metrics.metrics import Metrics
from rollout.http.server_info import (
    kv_events_facts,
    launch_command,
    resolved_args,
    running_facts,
    vllm_config,
)
from rollout.tokenizer_manager.communicator import SchedulerTimeout
from rollout.tokenizer_manager.handle import RefusedByScheduler
from rollout.tokenizer_manager.manager import Phase, TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput

HEALTH_STATE_S = 4.0
"""A rank that is stopped stops all of them; health checks give up after a few seconds."""
HEALTH_TIMEOUT_S = 20.0
LIVENESS_TIMEOUT_S = 30.0
"""Longer than any step: a failed liveness check ends the server."""


async def state_of(manager: TokenizerManager, timeout_s: float | None = None) -> SchedulerState:
    """Return the scheduler's state.  Raises `SchedulerTimeout`."""
    answer = await manager.control(GetStateReqInput, timeout_s=timeout_s)
    if not answer.success:
        raise LockstepError(answer.message)
    return answer.reply


class InfoRoutes:
    """Read-only endpoints."""

    def __init__(self, manager: TokenizerManager, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics

    def router(self) -> APIRouter:
        router = APIRouter(route_class=DirectRoute, tags=["info"])
        add = router.add_api_route
        add("/health", self.health)
        add("/health_generate", self.health_generate)
        add("/ready", self.ready)
        add("/liveness", self.liveness)
        add("/ping", self.ping)
        for path in ("/model_info", "/get_model_info"):
            add(path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            add(path, self.server_info)
        for path in ("/weight_version", "/get_weight_version"):
            add(path, self.weight_version)
        add("/weight_info", self.weight_info)
        add("/version", self.version)
        add("/load", self.load)
        add("/tokenizer_info", self.tokenizer_info)
        add("/get_load", self.get_load)
        add("/v1/loads", self.loads)
        if self._manager.server_args.enable_metrics:
            add("/metrics", self.metrics, response_class=PlainTextResponse)
        return router

    async def _state(self, timeout_s: float | None = None) -> SchedulerState:
        return await state_of(self._manager, timeout_s)

    # --- health --------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """Answer 200 with an empty body while the scheduler answers, also when paused; else 503.

        The header `x-start-id` has another value after each start of the server.
        """
        await self._healthy_state()
        return Response(status_code=200, headers={START_ID_HEADER: self._manager.start_id})

    async def _healthy_state(self) -> SchedulerState:
        try:
            state = await self._state(HEALTH_STATE_S)
        except SchedulerTimeout:
            reason = "a rank is stopped or lost, or a step takes that long"
            raise Unavailable(f"the scheduler has not answered for {HEALTH_STATE_S:g} s: {reason}") from None
        if state.poisoned is not None:
            raise Unavailable(f"the weights are poisoned: {state.poisoned}; only a complete refresh heals them")
        return state

    async def health_generate(self) -> Response:
        """Answer like /health, but generate a token unless paused.  A stuck rebalance is a failure."""
        state = await self._healthy_state()
        if state.eplb is not None and state.eplb.stuck:
            raise Unavailable(state.eplb.stuck)
        if not state.paused:
            await self._generate_one()
        return Response(status_code=200)

    async def _generate_one(self) -> None:
        """Generate one token.  Raises `Unavailable` if the scheduler sends nothing in time.

        Any message counts, also a refusal: a full queue is not a failure.
        """
        before = self._manager.num_messages
        handle = await self._manager.submit(
            GenerateReqInput(
                rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
                input_ids=[0],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                return_routed_experts=False,
            )
        )
        try:
            with contextlib.suppress(RefusedByScheduler):
                await asyncio.wait_for(handle.results(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            if self._manager.num_messages == before:
                raise Unavailable(f"the scheduler made no token within {HEALTH_TIMEOUT_S:g} s") from None

    async def ready(self) -> Response:
        """Answer 200 if a request would be worked on now; 503 while starting, stopping, paused or without memory."""
        state = await self._healthy_state()
        if state.paused:
            raise Unavailable("generation is paused")
        if state.withheld is not None:
            raise Unavailable(state.withheld)
        return Response(status_code=200)

    async def liveness(self, timeout: Annotated[float, Query(gt=0, le=600)] = LIVENESS_TIMEOUT_S) -> Response:
        """Answer 503 if only a restart helps: the scheduler has ended, or does not answer within `timeout` seconds.

        The answer is 200 while starting, paused, draining and poisoned.
        """
        if self._manager.phase is Phase.FAILED:
            raise Unavailable("the server has failed")
        if self._manager.phase is not Phase.STARTING:
            try:
                await self._manager.communicator.call(GetStateReqInput, timeout)
            except SchedulerTimeout:
                raise Unavailable(f"the scheduler has not answered for {timeout:g} s") from None
        return Response(status_code=200)

    async def ping(self) -> Response:
        """Answer 200 as soon as the process listens, unless it has failed."""
        if self._manager.phase is Phase.FAILED:
            raise Unavailable("the server has failed")
        return Response(status_code=200)

    # --- facts ---------------------------------------------------------------------------------------------------

    async def model_info(self) -> Response:
        args, config = self._manager.server_args, self._manager.model_config
        state = await self._state()
        return json_response(
            {
                "model_path": state.weights_path or args.model_path,
                "served_model_name": args.name,
                "tokenizer_path": args.tokenizer_path or args.model_path,
                "is_generation": config.head == "vocabulary",
                "preferred_sampling_params": None,
                "weight_version": state.weight_version,
                "content_digest": state.content_digest,
                "held_digest": state.held_digest,
                "weight_versions": msgspec.to_builtins(state.weight_versions),
                "load_format": "auto",
                "reasoning_parser": args.reasoning_parser,
                "tool_call_parser": args.tool_call_parser,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": [config.architecture],
                "config_digest": config.digest,
                "num_hidden_layers": config.num_hidden_layers,
                "num_experts": config.num_experts,
                "num_experts_per_tok": config.num_experts_per_tok,
                "moe_layer_ids": list(config.moe_layer_ids),
                "vocab_size": config.vocab_size,
            }
        )

    async def server_info(self, config_format: Literal["text", "json"] | None = None) -> Response:
        """Return the launch arguments, flat at the top where external-engine clients look, and the scheduler's state.

        A `config_format`, as vLLM's clients send it, adds `vllm_config`.
        """
        manager = self._manager
        args, state = manager.server_args, await self._state()
        resolved = resolved_args(args) | {"is_embedding": manager.model_config.head != "vocabulary"}
        internal = resolved | msgspec.to_builtins(state)
        internal |= {
            "world_size": 1,
            "effective_max_running_requests_per_dp": state.max_running_requests,
            "last_gen_throughput": state.gen_throughput,
            "memory_usage": {
                "weight": state.model_bytes / 2**30,
                "kvcache": state.kv_bytes / 2**30,
                "token_capacity": state.max_total_num_tokens,
                "graph": 0.0,
            },
        }
        scheduler_info = {
            "status": "ready",
            "max_total_num_tokens": state.max_total_num_tokens,
            "max_req_input_len": manager.limits.context_length - 1,
            "startup_time": manager.started_at,
        }
        asked_for: dict[str, Any] = {}
        if config_format is not None:
            config = vllm_config(args, state, manager.limits.context_length)
            asked_for = {"vllm_config": config if config_format == "json" else str(config)}
        return json_response(
            resolved
            | running_facts(state)
            | asked_for
            | {
                "launch_command": launch_command(args),
                "scheduler_info": scheduler_info,
                "startup_time": manager.started_at,
                "start_id": manager.start_id,
                "internal_states": [internal],
                "kv_events": kv_events_facts(args, state.of_ranks),
                "frontend": "python",
                "version": VERSION,
            }
        )

    async def weight_version(self) -> Response:
        """Return the version in force and, where they were computed, the digests of its content as sent and as held.

        Of a draft with weights of its own its version, too.
        """
        state = await self._state()
        facts: dict[str, Any] = {"weight_version": state.weight_version, "weight_epoch": state.weight_epoch}
        if state.draft is not None:
            facts["draft"] = state.draft
        return json_response(facts | {"content_digest": state.content_digest, "held_digest": state.held_digest})

    async def weight_info(self) -> Response:
        """Return the version in force, and nothing else, as vLLM does."""
        return json_response({"weight_version": (await self._state()).weight_version})

    async def version(self) -> Response:
        """Return the version of this server in vLLM's form."""
        return json_response({"version": VERSION})

    async def load(self) -> Response:
        """Return how many requests the server has not answered yet, in vLLM's form."""
        return json_response({"server_load": self._manager.num_in_flight})

    async def tokenizer_info(self) -> Response:
        """Return vLLM's facts of the tokenizer: tokens with a role, the chat template, and the longest sequence."""
        facts = self._manager.tokenizer.facts()
        return json_response(facts | {"model_max_length": self._manager.limits.context_length})

    async def get_load(self) -> Response:
        """Return the load of each data-parallel rank."""
        loads = [
            {
                "dp_rank": dp_rank,
                "num_reqs": state.num_running_reqs + state.num_waiting_reqs,
                "num_running_reqs": state.num_running_reqs,
                "num_waiting_reqs": state.num_waiting_reqs,
                "num_tokens": state.num_total_tokens,
            }
            for dp_rank, state in enumerate((await self._state()).of_ranks)
        ]
        return json_response(loads)

    async def loads(self) -> Response:
        """Return the load of each data-parallel rank as SGLang's /v1/loads does, always with all sections."""
        state, now = await self._state(), time.time()
        loads = [_load_of(dp_rank, part, now) for dp_rank, part in enumerate(state.of_ranks)]
        return json_response(
            {
                "timestamp": now,
                "version": VERSION,
                "accelerator": state.device,
                "num_accelerators": self._manager.server_args.tp_size,
                "loads": loads,
            }
        )

    async def metrics(self) -> Response:
        """Return Prometheus text.  While the scheduler does not answer, the gauges keep their values, and get older."""
        if self._manager.phase is Phase.SERVING:
            try:
                self._metrics.update(await self._state())
            except LockstepError as error:
                self._metrics.note_scrape_failure(error)
        return Response(self._metrics.render(), media_type=self._metrics.content_type)


def _load_of(dp_rank: int, state: SchedulerState, now: float) -> dict[str, Any]:
    running, waiting = state.num_running_reqs, state.num_waiting_reqs
    same = (
        "num_used_tokens", "num_total_tokens", "max_total_num_tokens", "max_running_requests", "token_usage",
        "gen_throughput", "cache_hit_rate",
    )  # fmt: skip
    return {
        "timestamp": now,
        "dp_rank": dp_rank,
        "num_reqs": running + waiting,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        **{name: getattr(state, name) for name in same},
        "num_active_tokens": state.num_used_tokens,
        "utilization": running / max(1, state.max_running_requests),
    }
