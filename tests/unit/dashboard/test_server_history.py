"""`ServerHistory`: rates, updates, rebalances and balance over time, its bounds, and a scheduler that is silent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rollout.core.messages.experts import EplbState, ExpertLoadState, ExpertLoadWindow
from rollout.core.messages.io_struct import ControlReqOutput, GetStateReqInput
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.messages.update_state import EndedUpdateState
from rollout.dashboard import history as kept
from rollout.dashboard.history import ServerHistory
from rollout.dashboard.samples import MERGED, MERGED_KEPT, RECENT_KEPT
from rollout.http.metrics.metrics import Metrics
from tests.dashboard_harness import HOSTILE, a_state, data_of, in_loop, samples_of
from tests.http_harness import Live


@pytest.fixture
def history(shared: Live) -> ServerHistory:
    """An empty history."""
    return ServerHistory(shared.manager, Metrics("kept"))


def an_update(number: int, **changes: Any) -> EndedUpdateState:
    update = EndedUpdateState(
        update_id=f"u{number}",
        kind="committed",
        weight_version=f"v{number}",
        weight_epoch=number,
        reason=None,
        num_tensors=3,
        num_bytes=12,
        staging_s=1.5,
        stall_s=0.01,
        steps_held=False,
        ended_at=1000.0 + number,
    )
    return msgspec.structs.replace(update, **changes)


def balancer(*numbers: int) -> EplbState:
    """Return the state of a balancer that ended rebalance number n `5 - n` seconds ago, for each of `numbers`."""
    numbers_of_moves = ("num_experts_moved", "num_bytes", "num_chunks", "chunks_done", "seconds", "longest_chunk_s")
    facts: dict[str, Any] = dict.fromkeys(numbers_of_moves, 1)
    facts |= {"reason": "asked for", "algorithm": "min_move", "dropped": None}
    facts |= {"balancedness_before": {"mean": 0.8, "least": 0.7}, "balancedness_after": None}
    return EplbState(
        stage="idle",
        stuck=None,
        num_evaluations=1,
        last_evaluation_age_s=0.0,
        stage_age_s=0.0,
        chunks_left=0,
        decision=None,
        outcome=None,
        rebalances=[facts | {"number": number, "age_s": 5.0 - number} for number in numbers],
        choices_per_expert=0.0,
        drift=None,
        counts_loads=True,
    )


def record(rank_loads: list[list[int]], *, recording: bool = True, num_passes: int = 4) -> ExpertLoadState:
    windows = [
        ExpertLoadWindow(
            window=window,
            num_passes=4,
            rank_loads=rank_loads,
            rank_balancedness=[0.75] * len(rank_loads),
            slot_balancedness=[None] * len(rank_loads),
        )
        for window in (10, 100, 1000)
    ]
    return ExpertLoadState(
        mode="stat",
        recording=recording,
        num_passes=num_passes,
        num_tokens=9,
        moe_layer_ids=[1],
        windows=windows,
        drift=None,
    )


def test_rates_are_of_the_time_between_two_samples(history: ServerHistory) -> None:
    history.enter(a_state(num_generated_tokens=1000, num_prompt_tokens=500, num_prompt_tokens_reused=100), 100.0)
    later = a_state(
        num_generated_tokens=1300, num_prompt_tokens=800, num_prompt_tokens_reused=300, num_retracted_reqs=4
    )
    history.enter(later, 102.0)
    first, second = samples_of(history)
    assert (first["generated_per_s"], first["prefilled_per_s"]) == (0.0, 0.0)
    assert (second["generated_per_s"], second["prefilled_per_s"]) == (150.0, 50.0)
    assert (second["reused_per_s"], second["retracted_per_s"]) == (100.0, 2.0)
    history.enter(a_state(num_generated_tokens=1300), 101.0)  # the clock was set back
    assert samples_of(history)[-1]["generated_per_s"] == 0.0


def test_the_history_is_bounded(history: ServerHistory) -> None:
    for number in range(1, 4700):
        history.enter(a_state(ended_updates=[an_update(number)], eplb=balancer(number)), float(number))
    found = history.since(0)
    samples = samples_of(history)
    assert len(samples) < RECENT_KEPT + MERGED + MERGED_KEPT + 1 and samples[-1]["at"] == 4699.0
    assert 3550 < samples[-1]["at"] - samples[0]["at"] < 3700, "an hour"
    assert len(found["updates"]) == kept.UPDATES_KEPT and found["updates"][-1]["weight_version"] == "v4699"
    assert len(found["rebalances"]) == kept.REBALANCES_KEPT and found["rebalances"][-1]["number"] == 4699


def test_each_event_is_told_once(history: ServerHistory) -> None:
    """The scheduler repeats its last events in every state."""
    history.enter(a_state(ended_updates=[an_update(1), an_update(2)], eplb=balancer(1)), 10.0)
    history.enter(a_state(ended_updates=[an_update(1), an_update(2)], eplb=balancer(1)), 11.0)
    before = history.since(0)
    assert [one["weight_version"] for one in before["updates"]] == ["v1", "v2"] and len(before["rebalances"]) == 1
    lost = an_update(3, kind="lost", weight_epoch=None, reason=HOSTILE)
    history.enter(a_state(ended_updates=[an_update(2), lost], eplb=balancer(1, 2)), 12.0)
    news = history.since(before["count"])
    assert [one["reason"] for one in news["updates"]] == [HOSTILE] and len(news["samples"]) == 1
    assert [(one["number"], one["ended_at"]) for one in news["rebalances"]] == [(2, 9.0)]
    assert history.since(news["count"])["samples"] == history.since(10**9)["updates"] == []


def test_what_a_rebalance_came_to_is_told_once_it_is_measured_n30(history: ServerHistory) -> None:
    """N30: only the prediction was shown."""
    history.enter(a_state(eplb=balancer(1, 2)), 10.0)
    before = history.since(0)
    assert [one["balancedness_measured"] for one in before["rebalances"]] == [None, None]
    later = balancer(1, 2, 3)
    later.rebalances[1]["balancedness_measured"] = {"mean": 0.93, "least": 0.9}
    history.enter(a_state(eplb=later), 11.0)
    news = history.since(before["count"])["rebalances"]
    assert [(one["number"], one["balancedness_measured"]) for one in news] == [(2, 0.93), (3, None)]
    assert news[0]["ended_at"] == before["rebalances"][1]["ended_at"]
    assert [one["number"] for one in history.since(0)["rebalances"]] == [1, 2, 3]


def test_an_id_that_is_used_again_is_another_update(history: ServerHistory) -> None:
    """After the scheduler has forgotten it."""
    history.enter(a_state(ended_updates=[an_update(1)]), 1.0)
    history.enter(a_state(ended_updates=[an_update(1, ended_at=9000.0)]), 2.0)
    assert len(history.since(0)["updates"]) == 2


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        (record([[3, 1]]), [0.75]),
        (record([[4]]), [None]),  # one rank: of slots
        (record([[3, 1]], recording=False), None),
        (None, None),
    ],
    ids=["ranks", "slots", "stopped", "never"],
)
def test_balance_is_of_ranks_or_of_slots(
    history: ServerHistory, loads: ExpertLoadState | None, expected: list[float | None] | None
) -> None:
    history.enter(a_state(expert_distribution=loads), 1.0)
    assert samples_of(history)[0]["balance"] == expected


def test_an_idle_engine_has_no_balance(history: ServerHistory) -> None:
    """The balance of the last passes is not shown as the current one."""
    for num_passes in (4, 4, 5):
        history.enter(a_state(expert_distribution=record([[3, 1]], num_passes=num_passes)), 1.0)
    assert [one["balance"] for one in samples_of(history)] == [[0.75], None, [0.75]]


def test_a_sample_is_what_the_scheduler_says(hostile: Live) -> None:
    in_loop(hostile, hostile.history.sample())
    found = data_of(hostile)
    assert found["state"]["weight_version"] == HOSTILE and found["unanswered"] is None
    assert found["server"]["phase"] == "serving" and found["server"]["model"] == "tiny"
    assert found["answered_at"] == pytest.approx(found["now"], abs=60)
    assert len(found["samples"]) == 1 and data_of(hostile, found["count"])["samples"] == []


def test_before_the_first_answer_there_is_no_state(live: Live) -> None:
    found = data_of(live)
    assert found["state"] is None and found["answered_at"] is None and found["samples"] == []


def test_a_scheduler_that_does_not_answer_is_told_with_the_reason(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop(live, live.history.sample())
    monkeypatch.setattr(kept, "ANSWER_S", 0.2)
    live.scheduler.answers[GetStateReqInput] = lambda verb: None
    in_loop(live, live.history.sample())
    found = data_of(live)
    assert "did not answer GetState within 0.2 s" in found["unanswered"] and found["state"] is not None
    live.scheduler.answers[GetStateReqInput] = lambda verb: ControlReqOutput(
        request_id=verb.request_id, success=False, message=HOSTILE
    )
    in_loop(live, live.history.sample())
    assert data_of(live)["unanswered"] == HOSTILE
    live.scheduler.answers.clear()
    in_loop(live, live.history.sample())
    assert data_of(live)["unanswered"] is None


def test_an_error_costs_one_sample(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    history, seconds = ServerHistory(live.manager, Metrics("kept")), iter(range(100))
    enter = history.enter

    def broken_at_first(state: SchedulerState, now: float) -> None:
        assert next(seconds), "broken"
        enter(state, now)

    async def work() -> None:
        task = asyncio.create_task(history.run())
        while len(samples_of(history)) < 2:
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(kept, "SAMPLE_EVERY_S", 0.01)
    monkeypatch.setattr(history, "enter", broken_at_first)
    in_loop(live, work())
    (line,) = [line for line in caplog.records if line.name == kept.__name__]
    assert line.exc_text or line.exc_info


def test_the_end_of_the_scheduler_is_told(live: Live) -> None:
    in_loop(live, live.history.sample())
    live.call_in_loop(lambda: live.manager.fail("rank 1 was killed"))
    in_loop(live, live.history.sample())
    found = data_of(live)
    assert found["server"]["phase"] == "failed" and len(found["samples"]) == 1
