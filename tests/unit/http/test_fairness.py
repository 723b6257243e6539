"""A client with a large text, answer or number of requests does not hold up the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import LogprobDelta, ReqOutput
from rollout.core.sampling_params import SamplingParams
from rollout.http.gate import Turns
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager import response
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.sample import SampleRecord
from tests.alternatives import alternatives
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import StandInScheduler


def test_engine_06_a_short_text_does_not_wait_behind_a_long_one(folder: Path) -> None:
    async def scenario() -> tuple[float, float]:
        tokenizer = Tokenizer.load(folder)
        started = time.monotonic()

        async def took(texts: list[str]) -> float:
            await tokenizer.encode(texts)
            return time.monotonic() - started

        long = asyncio.create_task(took(["hello world " * 60_000]))
        await asyncio.sleep(0.05)
        short = await took(["hello " * 1000])
        return short, await long

    short, long = asyncio.run(scenario())
    assert short < long / 2, (short, long)


def ping_while(live: Live, work: Callable[[], Any]) -> float:
    """Run `work` on a thread, send /ping meanwhile, and return the seconds of the slowest one."""
    thread = threading.Thread(target=work)
    thread.start()
    times = []
    with httpx.Client(base_url=live.url, timeout=60.0) as client:
        while thread.is_alive():
            started = time.monotonic()
            assert client.get("/ping").status_code == 200
            times.append(time.monotonic() - started)
    thread.join()
    return max(times)


@pytest.fixture(scope="module")
def long_context(folder: Path) -> Iterator[Live]:
    def engine(args: ServerArgs, input_addr: str, output_addr: str) -> StandInScheduler:
        scheduler = StandInScheduler(input_addr, output_addr)
        scheduler.context_length = scheduler.max_total_num_tokens = 100_000
        return scheduler

    with live_server(folder, engine=engine) as server:
        yield server


@pytest.mark.full
def test_engine_12_log_probabilities_with_text_do_not_hold_up_others(long_context: Live) -> None:
    params = {"max_new_tokens": 400, "n": 4}
    body = {"input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True, "return_text_in_logprobs": True}
    body["top_logprobs_num"] = 200
    replies: list[Any] = []
    slowest = ping_while(
        long_context, lambda: replies.append(httpx.post(f"{long_context.url}/generate", json=body, timeout=60))
    )
    assert [len(reply["meta_info"]["output_top_logprobs"]) for reply in replies[0].json()] == [400] * 4
    assert slowest < 4.0, slowest


def test_engine_12_detokenize_is_capped_and_does_not_hold_up_others(long_context: Live) -> None:
    ids = [[100] * 50_000] * 20
    replies: list[Any] = []
    slowest = ping_while(
        long_context,
        lambda: replies.append(httpx.post(f"{long_context.url}/detokenize", json={"tokens": ids}, timeout=60)),
    )
    assert replies[0].status_code == 200 and len(replies[0].json()["text"]) == 20
    assert slowest < 4.0, slowest
    assert long_context.refused("/detokenize", tokens=[100] * ((1 << 20) + 1))[0] == 413


def test_engine_12_a_stream_makes_each_entry_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    original = response._entries

    def counting(values: Any, ids: Any, text_of: Any) -> Any:
        nonlocal made
        made += len(values)
        return original(values, ids, text_of)

    monkeypatch.setattr(response, "_entries", counting)
    source = TokenizedGenerateReqInput(
        rid="r", input_ids=[1], sampling_params=SamplingParams(), return_logprob=True, top_logprobs_num=2
    )
    record = SampleRecord(source, 0.0, "v")
    form = response.ResponseForm(response.RouteShape(8, 2, (0,), 1))
    handle = GenerateHandle([record], replies_with_list=False, tokenizer=None, form=form, abort=lambda rids: None)
    for count in range(1, 101):
        logprobs = LogprobDelta(values=[-1.0], alternatives=alternatives([([-1.0, -2.0], [5, 6])]))
        record.append(
            ReqOutput(rid="r", token_ids=[5], num_output_tokens=count, weight_version="v", logprobs=logprobs), 0.0
        )
        meta = handle._build(handle._samples[0])["meta_info"]
        assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == count
    assert made == 300


def test_engine_13_requests_that_come_together_leave_turns_for_others() -> None:
    async def scenario() -> None:
        turns = Turns()
        order: list[str] = []

        async def request() -> None:
            await turns.take()
            order.append("request")

        async def health() -> None:
            for _ in range(6):  # as many passes as an answer takes
                await asyncio.sleep(0)
            order.append("health")

        given_up = asyncio.create_task(request())
        tasks = [asyncio.create_task(request()) for _ in range(1000)]
        tasks.append(asyncio.create_task(health()))
        await asyncio.sleep(0)
        given_up.cancel()
        tasks[500].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order.index("health") < 100
        assert order.count("request") == 1000
        await asyncio.wait_for(turns.take(), 1.0)

    asyncio.run(scenario())
