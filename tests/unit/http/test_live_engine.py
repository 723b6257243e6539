"""The HTTP process in front of a real engine: aborts, errors, samples that run together, and times."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint

PROMPT = [5, 9, 2, 6, 5, 3, 5]
CONTEXT = 16_384  # long enough for a request to be met while it runs
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=1, context_length=CONTEXT)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder, engine=EngineThread, max_total_tokens=40_000, dtype="float32") as server:
        yield server
        assert server.scheduler.error is None


@pytest.fixture(autouse=True)
def _serves_on(live: Live) -> Iterator[None]:
    yield
    live.client.post("/continue_generation", json={})
    assert live.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 2})


class Posted:
    """A request on a thread of its own."""

    def __init__(self, live: Live, path: str = "/generate", **body: Any) -> None:
        self._answer: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answer.append(httpx.post(live.url + path, json=body, timeout=30))
        )
        self._thread.start()

    def answer(self) -> httpx.Response:
        self._thread.join(30)
        return self._answer[0]


def pause(live: Live, mode: str = "in_place") -> None:
    assert live.client.post("/pause_generation", json={"mode": mode}).json()["paused"]


# --- 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rids", "n"), [(["a", "a"], 1), (["r", "r_0"], 2), (["r_1", "r", "r"], 2)])
def test_engine_01_an_abort_that_names_a_sample_twice(live: Live, rids: list[str], n: int) -> None:
    params = GREEDY | {"max_new_tokens": 8000, "n": n}
    posted = Posted(live, rid=rids[0].removesuffix("_1"), input_ids=PROMPT, sampling_params=params)
    live.wait_until(lambda: live.manager.num_in_flight == n)
    assert live.client.post("/abort_request", json={"rid": rids}).status_code == 200
    answer = posted.answer()
    assert answer.status_code == 200
    samples = answer.json() if n > 1 else [answer.json()]
    assert [sample["meta_info"]["finish_reason"]["type"] for sample in samples] == ["abort"] * n


# --- 4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("start", [0, 3])
def test_engine_04_an_abort_before_the_prompt_is_scored_answers_with_what_there_is(
    live: Live, n: int, start: int
) -> None:
    wanted = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2, "token_ids_logprob": [1, 2]}
    pause(live)
    posted = Posted(live, rid="p", input_ids=PROMPT, sampling_params=GREEDY | {"n": n}, **wanted)
    live.wait_until(lambda: live.manager.num_in_flight == n)
    pause(live, "abort")
    answer = posted.answer()
    assert answer.status_code == 200, answer.text
    for sample in answer.json() if n > 1 else [answer.json()]:
        meta = sample["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["prompt_tokens"] == len(PROMPT)
        assert meta["input_token_logprobs"] == [[None, PROMPT[start], None]]
        assert meta["input_top_logprobs"] == meta["input_token_ids_logprobs"] == [None]


def test_engine_04_a_stream_that_is_aborted_before_its_prompt_is_scored_ends_without_error(live: Live) -> None:
    pause(live)
    body = {"rid": "s", "input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0, "stream": True}
    posted = Posted(live, **body)
    live.wait_until(lambda: live.manager.num_in_flight == 1)
    live.client.post("/abort_request", json={"rid": "s"})
    events = posted.answer().text
    assert '"abort"' in events and '"error"' not in events


def test_engine_04_an_unhandled_error_is_a_json_answer_and_the_connection_lives(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(live.manager, "submit", broken)
    with httpx.Client(base_url=live.url, limits=httpx.Limits(max_connections=1), timeout=10) as client:
        for _ in range(3):
            answer = client.post("/generate", json={"input_ids": PROMPT})
            assert answer.status_code == 500 and "connection" not in answer.headers
            assert answer.json() == {"error": {"type": "InternalError", "message": "internal error: ZeroDivisionError"}}
            assert client.get("/ping").status_code == 200, "over the same connection"


# --- 9 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "new_tokens", "most"), [(64, 64, 66), (256, 128, 132)])
def test_engine_09_samples_of_one_call_run_together(live: Live, n: int, new_tokens: int, most: int) -> None:
    stats = live.scheduler.scheduler.stats
    before = stats.num_steps
    prompt = [n % 300] * 40
    body = {"input_ids": prompt, "sampling_params": GREEDY | {"max_new_tokens": new_tokens, "n": n}}
    answer = live.client.post("/generate", json=body, timeout=120).json()
    assert [len(sample["output_ids"]) for sample in answer] == [new_tokens] * n
    assert stats.num_steps - before <= most


# --- 20 ----------------------------------------------------------------------------------------------------------


def test_engine_20_the_first_token_is_timed_when_it_is_made(live: Live) -> None:
    def first_token_sum() -> float:
        text = live.client.get("/metrics").text
        (line,) = [line for line in text.splitlines() if line.startswith("sglang:time_to_first_token_seconds_sum")]
        return float(line.split()[-1])

    before = first_token_sum()
    answer = live.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 600})
    whole = answer["meta_info"]["e2e_latency"]
    assert 0 < first_token_sum() - before < 0.3 * whole


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, 2**80])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/eplb_rebalance", "layers_per_chunk"),
        ("/eplb_rebalance", "physical_to_logical_map"),
        ("/begin_weight_update", "placement_epoch"),
    ],
)
def test_engine_20_numbers_beyond_64_bits_are_refused(live: Live, path: str, field: str, number: int) -> None:
    value = [[number]] if field == "physical_to_logical_map" else number
    answer = live.client.post(path, json={field: value})
    assert answer.status_code == 400 and field in answer.text


def test_engine_20_a_temperature_beyond_float32_is_a_bad_request(live: Live) -> None:
    status, message = live.refused(input_ids=PROMPT, sampling_params={"temperature": 1e39, "min_new_tokens": 4})
    assert status == 400 and "temperature" in message
