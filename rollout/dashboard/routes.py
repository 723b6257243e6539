"""`/dashboard`: the page, which anybody may load, and its data, which take the admin key where there is one."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import HTMLResponse, Response

from rollout.core.errors import BadRequest
from rollout.core.messages.experts import GetExpertLoadsReqInput
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.version import VERSION
from rollout.dashboard.history import WINDOW, ServerHistory
from rollout.http.control.io import ControlRoute, add_route, failed_status, refusal
from rollout.http.io import json_body, json_response
from rollout.http.protocol import RouteProbeRequest, TrainerMetricsRequest
from rollout.http.sessions import SessionRoutes
from rollout.http.web_page import FilesPage
from rollout.tokenizer_manager.manager import TokenizerManager

ProbeBody = Annotated[RouteProbeRequest, Depends(json_body(RouteProbeRequest))]
TrainerBody = Annotated[TrainerMetricsRequest, Depends(json_body(TrainerMetricsRequest))]
FOLDERS = ("page", "vendor")
MAX_SESSIONS = 50


class DashboardRoutes:
    """The routes of the dashboard.  `history` keeps the data to show; its `run()` must be running."""

    def __init__(self, manager: TokenizerManager, history: ServerHistory, sessions: SessionRoutes) -> None:
        self._manager = manager
        self._history = history
        self._sessions = sessions
        self._page = FilesPage("rollout.dashboard", FOLDERS, "dashboard.html")

    @property
    def page_files(self) -> list[str]:
        """The paths of the files that the page loads."""
        return [f"/dashboard/files/{name}" for name in self._page.names]

    def page_router(self) -> APIRouter:
        """Return the page's routes, without data and without a key: a browser cannot send one to open a page."""
        router = APIRouter(tags=["info"])
        router.add_api_route("/dashboard", self.page, response_class=HTMLResponse)
        router.add_api_route("/dashboard/files/{name}", self.file, include_in_schema=False)
        return router

    def data_router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["dashboard"])
        router.add_api_route("/dashboard/data", self.data)
        router.add_api_route("/dashboard/samples", self.samples)
        router.add_api_route("/dashboard/sessions", self.sessions)
        router.add_api_route("/dashboard/experts", self.experts)
        add_route(router, "/dashboard/route_probe", self.route_probe, RouteProbeRequest)
        add_route(router, "/dashboard/trainer_metrics", self.trainer_metrics, TrainerMetricsRequest)
        return router

    async def page(self) -> Response:
        """Return the page, which asks /dashboard/data once a second."""
        return self._page.response()

    async def file(self, name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
        """Return a script, a style or a licence of the page."""
        return self._page.file(name, if_none_match)

    async def data(self, since: Annotated[int, Query(ge=0, lt=2**53)] = 0) -> Response:
        """Return the state of the server, and the entries of its history after number `since`: 0 asks for all."""
        manager, history = self._manager, self._history
        state = history.state
        content = {
            "now": time.time(),
            "server": {
                "model": manager.server_args.name,
                "version": VERSION,
                "started_at": manager.started_at,
                "phase": manager.phase.value,
                "failure": manager.failure_message,
                "moe_layer_ids": list(manager.model_config.moe_layer_ids),
                "num_experts": manager.model_config.num_experts,
                "can_release_memory": manager.server_args.enable_memory_saver,
            },
            "answered_at": history.answered_at,
            "unanswered": history.unanswered,
            "probe_tokens": history.probe.num_tokens,
            "answers": history.answers.shown(),
            "state": None if state is None else _shown(state),
            **history.since(since),
        }
        return json_response(content)

    async def samples(self) -> Response:
        """Return the last samples that ended, newest first, with the text of each token where there is a tokenizer."""
        vocabulary = self._manager.vocabulary
        text = None if vocabulary is None else self._manager.tokenizer.token_text
        shown = [
            msgspec.structs.asdict(sample)
            | {
                "prompt": None if text is None else [text(token_id) for token_id in sample.prompt_ids],
                "output": None if text is None else [text(token_id) for token_id in sample.output_ids],
            }
            for sample in self._history.answers.samples()
        ]
        return json_response({"keeps_samples": self._history.answers.keeps_samples, "samples": shown})

    async def sessions(self) -> Response:
        """Return the sessions of `GET /sessions`, at most 50, under the key of the dashboard."""
        return await self._sessions.sessions(MAX_SESSIONS)

    async def experts(self) -> Response:
        """Return the recorded load of each expert in the last 100 forward passes, [L, E]."""
        answer = await self._manager.control(GetExpertLoadsReqInput, window=WINDOW)
        if not answer.success:
            return refusal(answer.error_type, answer.message, failed_status(answer))
        reply = answer.reply
        return json_response({"num_passes": reply.num_passes, "expert_loads": reply.expert_loads})

    async def trainer_metrics(self, body: TrainerBody) -> Response:
        """Keep numbers of a trainer, by name, to show them over time."""
        report = self._history.note_training(body.values, body.step)
        return json_response({"weight_version": report.weight_version, "success": True, "message": ""})

    async def route_probe(self, body: ProbeBody) -> Response:
        """Score a text under each weight version from now on, for the share of routes that a refresh flips.

        A body with neither `text` nor `input_ids` ends this.
        """
        probe = self._history.probe
        if body.text is not None and body.input_ids is not None:
            raise BadRequest("give text or input_ids, not both")
        input_ids = body.input_ids
        if body.text is not None:
            (input_ids,) = await self._manager.tokenizer.encode([body.text])
        if input_ids is None:
            probe.stop()
        else:
            await probe.start(input_ids)
        return json_response({"num_tokens": probe.num_tokens, "success": True, "message": ""})


def _shown(state: SchedulerState) -> dict[str, Any]:
    """Return the part of the scheduler's state that the page shows."""
    names = (
        *("num_running_reqs", "num_waiting_reqs", "max_running_requests"),
        *("num_used_tokens", "max_total_num_tokens", "num_used_state_rows", "num_state_rows"),
        *("paused", "withheld", "poisoned", "memory"),
        *("weight_version", "weight_epoch", "placement_epoch", "device", "dtype", "model_bytes", "kv_bytes"),
        *("num_running_sessions", "num_pinned_tokens", "num_cached_tokens"),
    )
    experts, eplb = state.expert_distribution, state.eplb
    shown: dict[str, Any] = {name: getattr(state, name) for name in names}
    shown["versions"] = [(one.weight_epoch, one.weight_version) for one in state.weight_versions]
    shown["weight_update"] = msgspec.to_builtins(state.weight_update)
    shown["experts"] = None
    if experts is not None:
        (window,) = [one for one in experts.windows if one.window == WINDOW]
        shown["experts"] = {
            "recording": experts.recording,
            "num_passes": window.num_passes,
            "window": window.window,
            "rank_loads": window.rank_loads,
            "drift": experts.drift,
        }
    shown["eplb"] = None
    if eplb is not None:
        shown["eplb"] = {
            "stage": eplb.stage,
            "stuck": eplb.stuck,
            "num_evaluations": eplb.num_evaluations,
            "reason": (eplb.decision or {}).get("reason"),
        }
    return shown
