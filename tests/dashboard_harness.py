"""Parts of the tests of the dashboard: calls in the server's loop, states of a scheduler, samples."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rollout.core.messages.scheduler_state import SchedulerState
from rollout.dashboard.history import ServerHistory
from tests.http_harness import Live

HOSTILE = "<img src=x onerror=alert(1)>"


def in_loop(live: Live, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, live.loop).result(10)


def data_of(live: Live, since: int = 0, **headers: str) -> dict[str, Any]:
    response = live.client.get("/dashboard/data", params={"since": since}, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def a_state(**changes: Any) -> SchedulerState:
    """Return the state of an idle engine with these changes."""
    blank: dict[Any, Any] = {int: 0, float: 0.0, str: "", bool: False}
    fields: dict[str, Any] = {}
    for item in msgspec.structs.fields(SchedulerState):
        if item.required:
            kind = getattr(item.type, "__origin__", item.type)
            fields[item.name] = blank.get(kind, [] if kind is list else {} if kind is dict else None)
    return SchedulerState(**(fields | {"max_total_num_tokens": 100} | changes))


def samples_of(history: ServerHistory, count: int = 0) -> list[dict[str, Any]]:
    """Return the samples after this number as the page gets them."""
    found: list[dict[str, Any]] = msgspec.to_builtins(history.since(count)["samples"])
    return found
