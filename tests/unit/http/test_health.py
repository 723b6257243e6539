"""/health, /health_generate and /ready: they follow the state of the scheduler."""

from __future__ import annotations

from typing import Any

from rollout.core.messages.io_struct import ContinueGenerationReqInput, ControlReqOutput, GetStateReqInput
from rollout.core.messages.req_output import FinishReason
from tests.http_harness import Live

ONE_TOKEN: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


def test_engine_11_ready_asks_the_scheduler_whether_it_is_paused(live: Live) -> None:
    live.client.post("/pause_generation")
    assert live.client.get("/ready").status_code == 503
    live.scheduler.paused = False  # as when --pause-timeout ended it
    assert live.client.get("/ready").status_code == 200
    live.scheduler.paused = True  # as when the answer to a pause came too late
    assert live.client.get("/ready").status_code == 503
    live.client.post("/continue_generation")
    assert live.client.get("/ready").status_code == 200
    assert live.sent(ContinueGenerationReqInput)


def test_engine_13_a_refusal_by_the_scheduler_is_a_sign_of_life(live: Live) -> None:
    live.scheduler.refusal = FinishReason(type="abort", message="8192 requests wait already", status_code=503)
    assert live.client.post("/generate", json=ONE_TOKEN).status_code == 503
    assert live.client.get("/health_generate").status_code == 200


def test_engine_13_poisoned_weights_are_not_healthy(live: Live) -> None:
    def poisoned(verb: GetStateReqInput) -> ControlReqOutput:
        data = live.scheduler._state() | {"poisoned": "half written"}
        return ControlReqOutput(request_id=verb.request_id, success=True, data=data)

    live.scheduler.answers[GetStateReqInput] = poisoned
    for path in ("/health", "/health_generate", "/ready"):
        assert live.client.get(path).status_code == 503, path
