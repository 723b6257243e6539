"""Thinned samples of the dashboard, percentiles, ages, log-probabilities, samples, a trainer's numbers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.core.errors import BadRequest
from rollout.core.messages.experts import GetExpertLoadsReqInput
from rollout.core.messages.io_struct import ControlReqOutput, TokenizedGenerateReqInput
from rollout.core.messages.req_output import Alternatives, FinishedRecord, FinishReason, VersionSpan
from rollout.core.sampling_params import SamplingParams
from rollout.dashboard import machine as usage
from rollout.dashboard import routes, trainer_log
from rollout.dashboard.answer_log import (
    ALTERNATIVES_READ,
    OUTPUT_TOKENS_KEPT,
    PROMPT_TOKENS_KEPT,
    SAMPLES_KEPT,
    AnswerLog,
    entropy_of,
    length_edges,
)
from rollout.dashboard.history import ServerHistory
from rollout.dashboard.latencies import LatencyWindow, quantile
from rollout.dashboard.machine import Machine
from rollout.dashboard.samples import MERGED, RECENT_KEPT, Sample, SampleTiers, merged
from rollout.dashboard.trainer_log import TrainerLog
from rollout.http.metrics.metrics import Metrics
from rollout.tokenizer_manager.sample import SampleRecord
from tests.dashboard_harness import a_state, in_loop, samples_of
from tests.http_harness import Live, live_server

INF = float("inf")


# --- thinning ---------------------------------------------------------------------------------------------------------


def a_sample(at: float, **changes: Any) -> Sample:
    zeros = dict.fromkeys(("generated_per_s", "prefilled_per_s", "reused_per_s"), 0.0)
    counts = dict.fromkeys(("running", "waiting", "used_tokens", "used_state_rows", "weight_epoch"), 0)
    return Sample(**{"at": at, **zeros, **counts, "paused": False, **changes})


def test_samples_that_grow_old_become_means() -> None:
    tiers = SampleTiers()
    for number in range(1, RECENT_KEPT + 2 * MERGED + 1):
        tiers.append(number, a_sample(float(number), running=number, paused=number == 3))
    found = tiers.newer(0)
    assert [one.at for one in found[:3]] == [10.0, 20.0, 21.0] and len(found) == RECENT_KEPT + 2
    assert (found[0].running, found[1].running) == (5.5, 15.5)
    assert found[0].paused is True and found[1].paused is False
    assert [one.at for one in tiers.newer(RECENT_KEPT + 18)] == [619.0, 620.0]
    assert len(tiers.newer(15)) == RECENT_KEPT + 1, "a mean has the number of its last sample"


def test_a_mean_leaves_out_what_is_missing() -> None:
    one = merged(
        [
            a_sample(1.0, logprob=-1.0, balance=[0.5, None], first_token_s=(1.0, 2.0, 3.0), weight_epoch=1),
            a_sample(2.0, balance=[1.0, None], weight_epoch=2),
            a_sample(3.0, logprob=-2.0, first_token_s=(3.0, 4.0, 5.0), weight_epoch=3),
        ]
    )
    assert (one.logprob, one.balance, one.first_token_s) == (-1.5, [0.75, None], (2.0, 3.0, 4.0))
    assert (one.entropy, one.weight_epoch, one.at) == (None, 3, 3.0)


# --- percentiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("within", "share", "expected"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([4, 4, 4, 4], 0.5, 0.5),
        ([0, 10, 10, 10], 0.5, 1.5),
        ([2, 6, 10, 10], 0.95, 3.75),
        ([0, 0, 0, 3], 0.5, 4.0),  # beyond the last bound
        ([0, 0, 5, 5], 0.99, 3.98),
    ],
)
def test_a_quantile_is_the_one_of_prometheus(within: list[float], share: float, expected: float | None) -> None:
    found = quantile([1.0, 2.0, 4.0, INF], within, share)
    assert found == (None if expected is None else pytest.approx(expected))


def test_percentiles_are_of_the_last_minute() -> None:
    metrics = Metrics("m", dp_size=2)
    window = LatencyWindow(metrics)
    assert window.percentiles(0.0)["latency_s"] is None

    def ended(rank: int, seconds: float) -> None:
        metrics._seconds["latency"].labels(*metrics._labels[rank]).observe(seconds)

    for rank in (0, 1):
        ended(rank, 0.2)
    first = window.percentiles(1.0)["latency_s"]
    assert first is not None and 0.1 < first[0] <= first[2] <= 0.25
    ended(0, 7.0)
    assert 5.0 < (window.percentiles(50.0)["latency_s"] or (0, 0, 0))[2] <= 10.0
    later = window.percentiles(65.0)["latency_s"]
    assert later is not None and later[0] > 5.0, "the two quick ones ended over a minute ago"
    assert window.percentiles(200.0)["latency_s"] is None
    assert window.percentiles(100.0)["latency_s"] is None, "the clock was set back"


# --- answers ----------------------------------------------------------------------------------------------------------


def ended(*spans: tuple[int, int, int], num_tokens: int = 4, reason: Any = "length", **source: Any) -> SampleRecord:
    """Return the record of a sample with these spans (start, end, epoch) that ended after 2 s."""
    params = source.pop("sampling_params", SamplingParams())
    message = TokenizedGenerateReqInput(
        rid=source.pop("rid", "r"),
        input_ids=source.pop("input_ids", [1, 2, 3]),
        sampling_params=params,
        return_logprob=True,
        **source,
    )
    record = SampleRecord(message, created_at=10.0, weight_version="v")
    record.output_ids = list(range(num_tokens))
    record.output_logprobs = [-0.5] * num_tokens
    record.finished_at = 12.0
    found = [VersionSpan(f"v{epoch}", start, end, epoch) for start, end, epoch in spans]
    record.finished = FinishedRecord(reason=FinishReason(type=reason), weight_versions=found)
    return record


def test_the_age_of_tokens_is_counted_in_versions() -> None:
    log = AnswerLog(keeps_samples=True, weight_epoch=5)
    log.on_finished(ended((0, 3, 3), (3, 4, 5)))
    sums = log.taken()
    assert (sums.age_sum, sums.aged_tokens, sums.max_age) == (6, 4, 2)
    log.on_finished(ended((0, 4, 7)))  # the state of a second ago knew of version 5 only
    assert log.taken().max_age == 0 and log.weight_epoch == 7
    assert log.taken().num_finished == 0
    log.on_finished(ended((0, 4, 7), reason="abort"))
    sums = log.taken()
    assert (sums.num_finished, sums.num_aborted) == (1, 1)


def test_log_probabilities_and_entropy_are_of_tokens() -> None:
    log = AnswerLog(keeps_samples=False)
    log.on_finished(ended((0, 4, 0)))
    for params in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 2}, {"temperature": 0.5}):
        log.on_finished(ended((0, 2, 0), num_tokens=2, sampling_params=SamplingParams(**params)))
    sums = log.taken()
    assert (sums.logprob_sum, sums.logprob_tokens) == (-6.0, 12)
    assert (sums.entropy_sum, sums.entropy_tokens) == (2.0, 4), "tokens of other distributions tell nothing of it"


def test_the_entropy_is_read_of_the_first_alternatives() -> None:
    log, num_tokens = AnswerLog(keeps_samples=False), ALTERNATIVES_READ + 44
    record = ended((0, num_tokens, 0), num_tokens=num_tokens, top_logprobs_num=2)
    pairs = np.log(np.array([[0.5, 0.25]] * num_tokens, dtype="<f4"))
    record.output_alternatives.append(Alternatives(top_logprobs=pairs.tobytes(), top_ids=bytes(8 * num_tokens)))
    log.on_finished(record)
    sums = log.taken()
    exact = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert sums.entropy_tokens == ALTERNATIVES_READ
    assert sums.entropy_sum == pytest.approx(ALTERNATIVES_READ * exact, rel=1e-5)


def test_a_log_probability_that_is_not_finite_is_in_no_mean() -> None:
    log, record = AnswerLog(keeps_samples=False), ended((0, 4, 0))
    record.output_logprobs[1] = -INF
    log.on_finished(record)
    sums = log.taken()
    assert (sums.num_finished, sums.logprob_tokens, sums.entropy_tokens) == (1, 0, 0)


def test_an_entropy_of_certain_tokens_is_zero() -> None:
    assert entropy_of(np.array([[0.0, -np.inf]])) == pytest.approx(0.0, abs=1e-9)


def test_samples_are_kept_cut_and_bounded() -> None:
    log = AnswerLog(keeps_samples=True)
    for number in range(SAMPLES_KEPT + 5):
        log.on_finished(ended((0, 5000, 0), num_tokens=5000, rid=f"r{number}" + "-" * 100, input_ids=list(range(100))))
    found = log.samples()
    assert len(found) == SAMPLES_KEPT and found[0].rid.startswith(f"r{SAMPLES_KEPT + 4}-")
    assert len(found[0].rid) == 80 and found[0].prompt_ids == list(range(100 - PROMPT_TOKENS_KEPT, 100))
    assert len(found[0].output_ids) == len(found[0].logprobs) == OUTPUT_TOKENS_KEPT
    assert (found[0].num_output_tokens, found[0].seconds) == (5000, 2.0)
    assert log.shown()["last_sample"] == SAMPLES_KEPT + 5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"host": "0.0.0.0", "api_key": "k"}, True),
        ({"host": "0.0.0.0", "allow_unauthenticated": True}, False),
    ],
    ids=["this machine", "key", "open to all"],
)
def test_tokens_are_kept_where_strangers_cannot_read_them(
    folder: Path, settings: dict[str, Any], expected: bool
) -> None:
    with live_server(folder, **settings) as live:
        headers = {"authorization": "Bearer k"}
        live.client.post(
            "/generate", json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}, headers=headers
        )
        shown = live.client.get("/dashboard/samples", headers=headers).json()
        assert (shown["keeps_samples"], len(shown["samples"])) == (expected, int(expected))


def test_edges_of_lengths_are_round_and_few() -> None:
    for longest in (0, 1, 24, 25, 700, 16384):
        edges = length_edges(longest)
        assert edges[-1] > longest and len(edges) <= 26 and edges[0] == 0
    assert length_edges(700)[:3] == [0, 50, 100]


def test_the_last_samples_come_with_their_texts(live: Live) -> None:
    live.generate(text="ab", sampling_params={"max_new_tokens": 3}, return_logprob=True, session_id="agent")
    live.refused(input_ids=[1], sampling_params={"max_new_tokens": -1})
    (sample,) = live.client.get("/dashboard/samples").json()["samples"]
    assert "".join(sample["prompt"]) == "ab" and len(sample["output"]) == len(sample["logprobs"]) == 3
    assert sample["spans"] == [["v0", 0, 3, 0]] and sample["session_id"] == "agent" and sample["reason"] == "length"
    answers = live.client.get("/dashboard/data").json()["answers"]
    assert (answers["num_samples"], answers["reasons"], answers["last_sample"]) == (1, {"length": 1}, 1)
    sessions = live.client.get("/dashboard/sessions").json()
    assert [one["session_id"] for one in sessions["sessions"]] == ["agent"]


def test_the_page_gets_the_first_sessions_and_their_number(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_SESSIONS", 2)
    for number in range(3):
        live.generate(text="ab", sampling_params={"max_new_tokens": 1}, session_id=f"agent-{number}")
    found = live.client.get("/dashboard/sessions").json()
    assert len(found["sessions"]) == 2 and found["num_sessions"] == 3


def test_a_sample_shows_what_has_ended_since_the_one_before(live: Live) -> None:
    in_loop(live, live.history.sample())
    live.generate(text="ab", sampling_params={"max_new_tokens": 3}, return_logprob=True)
    in_loop(live, live.history.sample())
    in_loop(live, live.history.sample())
    _, second, third = live.client.get("/dashboard/data").json()["samples"]
    assert second["finished_per_s"] > 0 and second["age_returned"] == [0.0, 0] and second["logprob"] < 0
    assert second["latency_s"][0] > 0 and second["memory_bytes"][0] > 10**7
    assert second["aborted_per_s"] == 0
    assert (third["finished_per_s"], third["age_returned"], third["logprob"]) == (0.0, None, None)


def test_the_age_of_what_runs_counts_refreshes_since_it_arrived(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    history = ServerHistory(live.manager, Metrics("m"))
    arrivals: list[float] = []
    monkeypatch.setattr(live.manager, "arrivals_in_flight", lambda: arrivals)
    history.enter(a_state(weight_epoch=3), 1.0)
    arrivals.append(time.monotonic())
    history.enter(a_state(weight_epoch=3), 2.0)
    history.enter(a_state(weight_epoch=5), 3.0)
    arrivals.append(time.monotonic())
    history.enter(a_state(weight_epoch=6), 4.0)
    assert [one["age_running"] for one in samples_of(history)] == [None, (0, 0), (2, 2), (2, 3)]


# --- experts ----------------------------------------------------------------------------------------------------------


def test_loads_by_expert_are_asked_for_on_demand(live: Live) -> None:
    live.scheduler.answers[GetExpertLoadsReqInput] = lambda verb: ControlReqOutput(
        request_id=verb.request_id, success=True, data={"num_passes": verb.window, "expert_loads": [[3, 1]]}
    )
    assert live.client.get("/dashboard/experts").json() == {"num_passes": 100, "expert_loads": [[3, 1]]}
    live.scheduler.answers[GetExpertLoadsReqInput] = lambda verb: ControlReqOutput(
        request_id=verb.request_id,
        success=False,
        message="nothing was recorded",
        status_code=409,
        error_type="Conflict",
    )
    refused = live.client.get("/dashboard/experts")
    assert refused.status_code == 409 and refused.json()["error"]["message"] == "nothing was recorded"


# --- the trainer's numbers --------------------------------------------------------------------------------------------


def test_numbers_of_a_trainer_are_shown_with_the_version(live: Live) -> None:
    live.scheduler.version = "step-7"
    live.client.get("/server_info")  # the manager hears of it with each state
    body = {"values": {"kl": 0.002, "reward": 1}, "step": 7}
    answer = live.client.post("/dashboard/trainer_metrics", json=body).json()
    assert answer["success"] and answer["weight_version"] == "step-7"
    found = live.client.get("/dashboard/data").json()
    (report,) = found["trainer"]
    assert report["values"] == {"kl": 0.002, "reward": 1.0}
    assert (report["step"], report["weight_version"]) == (7, "step-7")
    assert live.client.get("/dashboard/data", params={"since": found["count"]}).json()["trainer"] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "values"),
        ('{"values": {}}', "at least one number"),
        ('{"values": {"kl": "x"}}', "values.kl"),
        ('{"values": {"kl": NaN}}', ""),
        ('{"values": {"": 1}}', "1 to 40 printable characters"),
        ('{"values": {"\\u0000": 1}}', "printable"),
        (msgspec.json.encode({"values": {"x" * 41: 1}}).decode(), "1 to 40"),
        (msgspec.json.encode({"values": {str(n): 1 for n in range(17)}}).decode(), "at most 16 names"),
    ],
    ids=["none", "empty", "text", "nan", "nameless", "control", "long", "many"],
)
def test_numbers_that_cannot_be_shown_are_refused(live: Live, content: str, words: str) -> None:
    answer = live.client.post("/dashboard/trainer_metrics", content=content)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_the_log_of_a_trainer_is_bounded() -> None:
    log = TrainerLog()
    for number in range(trainer_log.REPORTS_KEPT + 10):
        log.add(number, {"kl": 1.0}, number, "v")
    assert len(log.newer(-1)) == trainer_log.REPORTS_KEPT
    for number in range(trainer_log.MAX_NAMES - 1):
        log.add(0, {f"name {number}": 1.0}, None, "v")
    with pytest.raises(BadRequest, match="at most 16 names"):
        log.add(0, {"one more": 1.0}, None, "v")
    with pytest.raises(BadRequest, match="must be finite"):
        log.add(0, {"kl": INF}, None, "v")


# --- memory and processor ---------------------------------------------------------------------------------------------


def test_memory_and_cores_of_a_process_and_its_children_are_read() -> None:
    work = "import time; block = b'x' * 60_000_000\nwhile True: pass"
    parent = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", parent, work], start_new_session=True)
    try:
        machine = Machine(process.pid)
        first = machine.look(0.0)
        assert first is not None and first.cpus is None
        until = time.monotonic() + 30
        while (found := machine.look(time.monotonic())) is None or found.engine_bytes < 60e6 or not found.cpus:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert 2e6 < found.own_bytes < 60e6 and found.cpus < 2
    finally:
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        process.wait()


def test_a_process_that_has_ended_has_no_usage() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert Machine(process.pid).look(1.0) is None


def test_children_are_searched_for_in_few_of_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search reads a file for each thread of each rank, in the event loop of the HTTP process."""
    searches: list[int] = []
    monkeypatch.setattr(usage, "_descendants", lambda pid: searches.append(pid) or [])
    machine = Machine(os.getpid())
    for second in range(usage.LOOKS_PER_SEARCH + 1):
        assert machine.look(float(second)) is not None
    assert searches == [os.getpid()] * 2


def test_a_thread_that_has_just_ended_does_not_hide_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with os.scandir(f"/proc/{os.getpid()}/task") as found_threads:
            threads = [SimpleNamespace(name="0"), *found_threads]
        monkeypatch.setattr(os, "scandir", lambda path: threads)
        found = Machine(os.getpid()).look(0.0)
        assert found is not None and found.engine_bytes > 0
    finally:
        child.kill()
        child.wait()
