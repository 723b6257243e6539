"""The FastAPI application over a `TokenizerManager`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from rollout.core.errors import BadRequest, LockstepError
from rollout.core.messages.adapters import (
    LoadLoraAdapterFromDistributedReqInput,
    LoadLoraAdapterFromTensorsReqInput,
    LoadLoraAdapterReqInput,
    RegisterLoraAdapterReqInput,
    UnloadLoraAdapterReqInput,
)
from rollout.core.messages.experts import DumpExpertDistributionReqInput
from rollout.core.messages.io_struct import FlushCacheReqInput, PauseGenerationReqInput
from rollout.core.messages.weight_parts import WeightPartsReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from rollout.core.version import VERSION
from rollout.dashboard.history import ServerHistory
from rollout.dashboard.routes import DashboardRoutes
from rollout.http.anthropic.routes import AnthropicRoutes
from rollout.http.api_page.routes import PageRoutes
from rollout.http.control.experts import ExpertRoutes
from rollout.http.control.routes import ControlRoutes
from rollout.http.control.verbs import VerbRoutes
from rollout.http.control.weights import WeightRoutes
from rollout.http.conversations import Conversations
from rollout.http.direct import DirectRoutes, direct_handlers
from rollout.http.gate import Access, Gate
from rollout.http.io import describe_query, error_response
from rollout.http.known_lists import KnownLists
from rollout.http.metrics.metrics import Metrics
from rollout.http.native.generate import GenerateRoutes
from rollout.http.native.info import InfoRoutes
from rollout.http.native.resumable import ResumableStreams
from rollout.http.native.short_generate import ShortGenerate
from rollout.http.native.tokenize import TokenizeRoutes
from rollout.http.openai.chats import Chats
from rollout.http.openai.routes import OpenAIRoutes
from rollout.http.responses.routes import ResponsesRoutes
from rollout.http.scores.routes import ScoreRoutes
from rollout.http.server_info import num_ranks
from rollout.http.sessions import SessionRoutes
from rollout.http.vllm.adapter_routes import AdapterRoutes
from rollout.http.vllm.areal_routes import ArealRoutes
from rollout.http.vllm.control_routes import VllmControlRoutes
from rollout.http.vllm.generate import VllmGenerateRoutes
from rollout.http.vllm.render import RenderRoutes
from rollout.http.vllm.rpc_routes import RpcRoutes
from rollout.http.vllm.weight_routes import VllmWeightRoutes
from rollout.tokenizer_manager.manager import TokenizerManager


class Application(FastAPI):
    """FastAPI's application with the gate in front, which does what FastAPI's own first middleware is for."""

    def build_middleware_stack(self) -> ASGIApp:
        stack: Any = super().build_middleware_stack()
        while not isinstance(stack, Gate):
            stack = stack.app
        return stack


def build_app(manager: TokenizerManager, metrics: Metrics, history: ServerHistory) -> FastAPI:
    """Build the application.  `metrics` should also be one of the manager's observers, and `history.run()` a task."""
    args = manager.server_args
    app = Application(title="Lockstep", version=VERSION, redirect_slashes=False, docs_url=None, redoc_url=None)
    pages = PageRoutes(shows_dashboard=args.enable_metrics)
    app.state.heavy_bodies = asyncio.Lock()
    app.state.known_lists = KnownLists()
    app.state.strict_requests = args.strict_requests
    verbs, sglang = VerbRoutes(manager, metrics), ControlRoutes(manager)
    weights, vllm_weights = WeightRoutes(verbs, args), VllmWeightRoutes(verbs)
    vllm_control, adapters = VllmControlRoutes(manager), AdapterRoutes(verbs, weights, vllm_weights, args)
    admin_verbs, api_verbs = verbs.routers(
        {
            PauseGenerationReqInput: sglang.pause_generation,
            BeginWeightUpdateReqInput: weights.begin,
            GetWeightsByNameReqInput: weights.get_weights,
            WeightPartsReqInput: weights.parts,
            WeightsCheckerReqInput: weights.check_weights,
            DumpExpertDistributionReqInput: ExpertRoutes(verbs, args).dump,
            LoadLoraAdapterReqInput: adapters.load,
            RegisterLoraAdapterReqInput: adapters.register,
            UnloadLoraAdapterReqInput: adapters.unload,
        },
        {
            FlushCacheReqInput: sglang.flush_cache,
            UpdateWeightsFromDistributedReqInput: weights.bucket,
            UpdateWeightsFromTensorReqInput: weights.from_tensor,
            LoadLoraAdapterFromTensorsReqInput: adapters.load_tensors,
            LoadLoraAdapterFromDistributedReqInput: adapters.load_broadcast,
        },
    )
    conversations = Conversations(manager, args.session_record_mb << 20)
    manager.observe(conversations)
    sessions, chats = SessionRoutes(manager, metrics.sessions, conversations), Chats(manager, conversations)
    control = [
        admin_verbs,
        sglang.router(),
        vllm_control.router(),
        vllm_weights.router(),
        adapters.router(),
        RpcRoutes(verbs, vllm_weights, vllm_control, num_ranks(args)).router(),
        ArealRoutes(verbs, weights, vllm_control, args).router(),
    ]
    streams = ResumableStreams()
    metrics.held.watch(
        kept_streams=lambda: len(streams.kept),
        kept_stream_bytes=lambda: streams.kept_bytes,
        hidden_state_bytes=lambda: manager.limits.hidden_memory.num_bytes,
    )
    open_to_clients = [
        GenerateRoutes(manager, streams).router(),
        TokenizeRoutes(manager).router(),
        OpenAIRoutes(manager, chats, streams).router(),
        AnthropicRoutes(manager, chats).router(),
        ResponsesRoutes(manager, chats, streams).router(),
        VllmGenerateRoutes(manager, streams).router(),
        RenderRoutes(manager, chats).router(),
        ScoreRoutes(manager).router(),
        InfoRoutes(manager, metrics).router(),
        sessions.router(),
        pages.router(),
        api_verbs,
    ]
    page_files: list[str] = []
    if args.enable_metrics:
        dashboard = DashboardRoutes(manager, history, sessions)
        page_files = dashboard.page_files
        open_to_clients.append(dashboard.page_router())
        control.append(dashboard.data_router())
    routers = [*open_to_clients, *control]
    for router in routers:
        app.include_router(router)
    control_paths = {route.path for router in control for route in router.routes if isinstance(route, APIRoute)}
    access = Access(args, control_paths, page_files)
    app.state.short_generate = ShortGenerate(manager, access, history.refusals.note_answer)
    app.add_middleware(DirectRoutes, handlers=direct_handlers(routers), on_error=error_response)
    app.add_middleware(  # the last one added is the first one that a request meets
        Gate,
        access=access,
        asking_pages={"/docs": pages.api_page},
        refused=history.refusals.note_answer,
    )
    app.add_exception_handler(RequestValidationError, _on_bad_query)
    for kind in (LockstepError, HTTPException):
        app.add_exception_handler(kind, _on_known_error)
    return app


async def _on_bad_query(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(BadRequest(describe_query(error)))


async def _on_known_error(_: Request, error: Exception) -> Response:
    return error_response(error)
