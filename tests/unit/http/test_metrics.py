"""The metrics that dashboards and controllers evaluate on /metrics, on a loaded engine; and /liveness."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import metric_readers
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.promql import Scrapes
from tests.tiny_tokenizer import write_model_folder

GREEDY = {"temperature": 0.0, "ignore_eos": True}
TARGET = {"instance": "127.0.0.1:30000", "job": "engines", "endpoint": "service-port"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "dense", context_length=16_384)
    settings = {"max_total_tokens": 40_000, "max_running_requests": 2, "dtype": "float32"}
    with live_server(folder, engine=EngineThread, **settings) as server:
        yield server
        assert server.scheduler.error is None


@pytest.fixture(scope="module")
def loaded(live: Live) -> Scrapes:
    """Two scrapes: between them requests end, and at the second two run and one waits."""
    before = live.client.get("/metrics").text
    for prompt in ([5, 9, 2, 6, 5, 3, 5], [5, 9, 2, 6, 5, 3, 8]):
        live.generate(input_ids=prompt, sampling_params=GREEDY | {"max_new_tokens": 40})
    body = {"input_ids": [7, 8, 9], "rid": "long", "sampling_params": GREEDY | {"max_new_tokens": 9000, "n": 3}}
    running = threading.Thread(target=lambda: httpx.post(f"{live.url}/generate", json=body, timeout=60))
    running.start()
    time.sleep(1.3)  # a throughput is measured over a second
    after = live.client.get("/metrics").text
    live.client.post("/abort_request", json={"rid": "long"})
    running.join(60)
    return Scrapes(before, after, 60.0, TARGET)


def numbers(scrapes: Scrapes, expression: str) -> list[float]:
    text = expression.replace("$model_name", "tiny").replace("$__rate_interval", "1m")
    return list(scrapes.evaluate(text).values())


@pytest.mark.parametrize("expression", metric_readers.SGLANG_DASHBOARD + metric_readers.PRODUCTION_STACK_DASHBOARDS)
def test_every_panel_shows_a_number(loaded: Scrapes, expression: str) -> None:
    values = numbers(loaded, expression)
    assert values and all(math.isfinite(value) and value >= 0 for value in values)


@pytest.mark.parametrize(
    ("expressions", "labels"),
    [
        (metric_readers.PRIME_RL_CONTROLLER, {"engine": "0"}),
        (metric_readers.MILES_DASHBOARD, {"dp_rank": "0", "engine_type": "unified"}),
        (metric_readers.LLM_D, {"model_name": "tiny"}),
    ],
    ids=["prime-rl", "miles", "llm-d"],
)
def test_every_name_has_a_number_under_its_labels(
    loaded: Scrapes, expressions: list[str], labels: dict[str, str]
) -> None:
    for expression in expressions:
        series = loaded.evaluate(expression)
        assert series, expression
        for found, value in series.items():
            assert labels.items() <= dict(found).items() and math.isfinite(value), expression


def test_the_size_of_the_kv_pool_is_in_labels(loaded: Scrapes) -> None:
    for name, sizes in (metric_readers.PRIME_RL_CAPACITY, *metric_readers.LLM_D_SIZES):
        ((labels, value),) = loaded.evaluate(name).items()
        sizes_in_tokens = [int(dict(labels)[size]) for size in sizes]
        assert value == 1 and math.prod(sizes_in_tokens[-2:]) == 40_000, name


def test_what_the_numbers_say(loaded: Scrapes) -> None:
    """Two samples of 7 prompt tokens ended, the second with 6 from the cache; of three long ones two run."""

    def value(name: str) -> float:
        return sum(numbers(loaded, name))

    assert value("vllm:num_requests_running") == value("sglang:num_running_reqs") == 2
    assert value("vllm:num_requests_waiting") == value("sglang:num_queue_reqs") == 1
    assert value('vllm:num_requests_waiting_by_reason{reason="capacity"}') == 1
    assert value('vllm:num_requests_waiting_by_reason{reason="deferred"}') == 0
    assert value("vllm:kv_cache_usage_perc") == value("sglang:token_usage") > 0
    for prefix in ("sglang", "vllm"):
        assert value(f"{prefix}:e2e_request_latency_seconds_count") == 2
        assert value(f"{prefix}:generation_tokens_total") > 80
    assert value("vllm:prefix_cache_queries_total") >= 14 + 2 * 3
    assert value("vllm:prefix_cache_hits_total") == value("sglang:cached_tokens_total") >= 6
    assert value('vllm:request_success_total{finished_reason="length"}') == 2
    assert value("vllm:request_prompt_tokens_sum") == 14 and value("vllm:request_generation_tokens_sum") == 80
    parts = [value(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(value("vllm:e2e_request_latency_seconds_sum"), rel=0.02)
    assert value("vllm:inter_token_latency_seconds_sum") == pytest.approx(parts[2] / 39)


def test_requests_that_wait_for_a_pause_to_end_are_deferred(live: Live, loaded: Scrapes) -> None:
    assert live.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    body = {"input_ids": [1, 2], "sampling_params": GREEDY | {"max_new_tokens": 1}}
    waiting = threading.Thread(target=lambda: httpx.post(f"{live.url}/generate", json=body, timeout=30))
    waiting.start()

    def by_reason(reason: str) -> list[float]:
        text = live.client.get("/metrics").text
        return numbers(Scrapes(text, text, 1.0, TARGET), f'vllm:num_requests_waiting_by_reason{{reason="{reason}"}}')

    live.wait_until(lambda: by_reason("deferred") == [1])  # a caller that only looks overtakes the request
    assert by_reason("capacity") == [0]
    live.client.post("/continue_generation", json={})
    waiting.join(30)


def test_no_series_is_there_twice(live: Live) -> None:
    families = list(text_string_to_metric_families(live.client.get("/metrics").text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    series = [(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples]
    assert len(series) == len(set(series))


# --- /liveness ---------------------------------------------------------------------------------------------------


def test_a_server_is_alive_while_its_scheduler_answers(live: Live) -> None:
    assert live.client.get("/liveness").status_code == 200
    live.client.post("/pause_generation", json={"mode": "in_place"})
    assert live.client.get("/ready").status_code == 503
    assert live.client.get("/liveness").status_code == 200
    live.client.post("/continue_generation", json={})
    for timeout in ("0", "-1", "nan", "soon", "1e9"):
        assert live.client.get("/liveness", params={"timeout": timeout}).status_code == 400


def test_a_server_whose_scheduler_is_stuck_is_not_alive(live: Live) -> None:
    is_stuck, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        is_stuck.set()
        go_on.wait(20)

    agenda = live.scheduler.scheduler.agenda
    agenda.order = [*agenda.order, stand_still]
    agenda.call(stand_still)
    try:
        assert is_stuck.wait(5)
        reply = live.client.get("/liveness", params={"timeout": 0.5})
        assert reply.status_code == 503 and "0.5 s" in reply.json()["error"]["message"]
    finally:
        go_on.set()
    assert live.client.get("/liveness").status_code == 200


def test_a_server_without_a_scheduler_is_not_alive(tmp_path: Path) -> None:
    with live_server(write_model_folder(tmp_path)) as live:
        live.call_in_loop(live.manager.stop_admitting)
        live.wait_until(lambda: live.client.get("/health").status_code == 503)
        refused = live.client.post("/generate", json={"input_ids": [1, 2]})
        assert refused.status_code == 503 and "stopping" in refused.json()["error"]["message"]
        assert live.client.get("/liveness").status_code == 200, "it drains"
        live.call_in_loop(lambda: live.manager.fail("the scheduler ended"))
        live.wait_until(lambda: live.client.get("/liveness").status_code == 503)
