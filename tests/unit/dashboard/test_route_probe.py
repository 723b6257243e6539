"""The share of routes that a refresh flips, measured on one text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.core.messages.io_struct import ControlReqOutput, GetStateReqInput
from rollout.dashboard.route_probe import MAX_TOKENS, flips
from tests.dashboard_harness import HOSTILE, data_of, in_loop
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import NUM_EXPERTS, route_rows


def test_flips_are_of_sets_not_of_orders() -> None:
    before = np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]]], dtype=np.uint8)
    after = np.array([[[2, 1], [3, 5]], [[1, 2], [4, 3]]], dtype=np.uint8)
    assert flips(before, after).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"text": "a", "input_ids": [1]}, 400, "not both"),
        ({"input_ids": [1]}, 400, "2 to 4096 tokens, got 1"),
        ({"input_ids": []}, 400, "got 0"),
        ({"input_ids": [1] * (MAX_TOKENS + 1)}, 400, f"got {MAX_TOKENS + 1}"),
        ({"input_ids": [1, 10**6]}, 400, "10"),
        ({"input_ids": "x"}, 400, "input_ids"),
        ({"text": "\ud800"}, 400, ""),
        ({"text": ["a", "b"]}, 400, "text"),
    ],
    ids=["both", "one", "none", "many", "vocabulary", "type", "surrogate", "batch"],
)
def test_a_probe_that_cannot_be_is_refused(shared: Live, body: dict[str, Any], status: int, words: str) -> None:
    response = shared.client.post("/dashboard/route_probe", content=json.dumps(body))
    assert response.status_code == status and words in response.json()["error"]["message"], response.text
    assert data_of(shared)["probe_tokens"] is None


def test_a_probe_needs_recorded_routes(folder: Path) -> None:
    with live_server(folder, captures=False) as live:
        assert live.refused("/dashboard/route_probe", input_ids=[1, 2])[0] == 400


def test_a_probe_does_not_wait_for_a_pause(live: Live) -> None:
    live.client.post("/pause_generation")
    assert live.refused("/dashboard/route_probe", input_ids=[1, 2])[0] == 409
    live.client.post("/continue_generation")
    assert live.client.post("/dashboard/route_probe", json={"input_ids": [1, 2]}).status_code == 200


def test_a_refresh_is_measured_once(hostile: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version v1 takes other experts for three of the nine rows."""
    assert hostile.client.post("/dashboard/route_probe", json={"input_ids": list(range(10))}).json()["num_tokens"] == 10
    probed(hostile)
    assert data_of(hostile)["flips"] == []

    def rows(start: int, end: int) -> bytes:
        same = route_rows(start, end)
        return same[:-6] + bytes((expert + 1) % NUM_EXPERTS for expert in same[-6:])

    monkeypatch.setattr("tests.stand_in_scheduler.route_rows", rows)
    in_force(hostile, "v1", 1)
    probed(hostile)
    probed(hostile)
    (flip,) = data_of(hostile)["flips"]
    assert (flip["from_version"], flip["to_version"], flip["num_tokens"]) == (HOSTILE, "v1", 9)
    assert flip["share"] == pytest.approx(3 / 9) and flip["by_layer"] == [pytest.approx(3 / 9, abs=1e-4)]
    assert hostile.client.post("/dashboard/route_probe", json={}).json()["num_tokens"] is None
    in_force(hostile, "v2", 2)
    probed(hostile)
    assert len(data_of(hostile)["flips"]) == 1


@pytest.mark.parametrize("gate", [{"paused": True}, {"withheld": "why"}, {"poisoned": "why"}])
def test_nothing_is_scored_while_no_request_can_run(live: Live, gate: dict[str, Any]) -> None:
    live.client.post("/dashboard/route_probe", json={"input_ids": [1, 2, 3]})
    in_force(live, "v1", 1, **gate)
    probed(live)
    assert data_of(live)["flips"] == []
    in_force(live, "v1", 1)
    probed(live)
    assert len(data_of(live)["flips"]) == 1


def test_a_refresh_during_the_probe_gives_no_number(hostile: Live) -> None:
    """Its rows may be of two versions; the next sample tries again."""
    hostile.client.post("/dashboard/route_probe", json={"input_ids": [1, 2, 3]})
    epochs = iter([1, 1, 2])
    in_force(hostile, "v1", lambda: next(epochs))
    probed(hostile)
    assert data_of(hostile)["flips"] == []
    in_force(hostile, "v2", 2)
    probed(hostile)
    (flip,) = data_of(hostile)["flips"]
    assert (flip["from_version"], flip["to_version"], flip["to_epoch"]) == (HOSTILE, "v2", 2)


def in_force(live: Live, version: str, epoch: int | Callable[[], int], **changes: Any) -> None:
    """Make the stand-in report this version and epoch, and these changes, from now on."""
    scheduler = live.scheduler
    scheduler.version = version

    def answer(verb: GetStateReqInput) -> ControlReqOutput:
        number = epoch if isinstance(epoch, int) else epoch()
        facts = scheduler._state() | {"weight_epoch": number} | changes
        return ControlReqOutput(request_id=verb.request_id, success=True, data=facts)

    scheduler.answers[GetStateReqInput] = answer


def probed(live: Live) -> None:
    """Take a sample, and see the probe that follows it through."""

    async def work() -> None:
        await live.history.sample()
        assert live.history._probing is not None
        await live.history._probing

    in_loop(live, work())
