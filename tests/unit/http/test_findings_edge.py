"""Bodies, keys, pages of other sites, health and readiness: what one client can do to a server that others use."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from rollout.control import weight_reading
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args, server_args_from_namespace
from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetStateReqInput,
    SchedulerFailed,
    TokenizedGenerateReqInput,
    encode,
)
from rollout.core.messages.req_output import FinishReason, LogprobDelta, ReqOutput
from rollout.core.messages.weights import GetWeightsByNameReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.http import protocol
from rollout.http.gate import Turns
from rollout.http.openai import protocol as openai_protocol
from rollout.scheduler.channel import ZmqChannel
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager import response
from rollout.tokenizer_manager.channel import SchedulerChannel
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.sample import SampleRecord
from tests.alternatives import alternatives
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.stand_in_scheduler import StandInScheduler
from tests.tiny_tokenizer import write_model_folder

ONE_TOKEN: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Live]:
    with live_server(folder) as server:
        yield server


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    yield shared
    shared.scheduler.answers.clear()
    shared.scheduler.refusal = None
    shared.scheduler.paused = False


# --- bodies ------------------------------------------------------------------------------------------------------

WORST_BODIES = """
import resource, sys, time
from rollout.core.errors import BadRequest, TooLarge
from rollout.http import io as http_io, protocol
from rollout.http.native import generate
from rollout.http.openai import protocol as openai_protocol

SIZE = 64 << 20
size_now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size_now + (1700 << 20),) * 2)
for model, name, element in (
    (generate.GenerateRequest, b"input_ids", b'""'),
    (generate.GenerateRequest, b"input_ids", b"[]"),
    (generate.GenerateRequest, b"input_ids", b"257.5"),
    (openai_protocol.ChatCompletionRequest, b"messages", b"{}"),
    (protocol.AbortRequest, b"rid", b"1000"),
):
    body = b'{"' + name + b'":[' + (element + b",") * ((SIZE - 40) // (len(element) + 1)) + element + b"]}"
    started = time.monotonic()
    try:
        http_io.parse_body(model, body)
        raise SystemExit(f"{name} {element} was taken")
    except (BadRequest, TooLarge) as error:
        assert len(str(error)) < 300, len(str(error))
    assert time.monotonic() - started < 20, (name, element)
print("done")
"""


@pytest.mark.full
def test_engine_05_the_worst_bodies_are_refused_in_bounded_memory_and_time() -> None:
    done = subprocess.run([sys.executable, "-c", WORST_BODIES], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr[-2000:]


def all_bodies(model: type[protocol.Body] = protocol.Body) -> list[type[protocol.Body]]:
    return [model, *(found for child in model.__subclasses__() for found in all_bodies(child))]


def collections_in(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("type") in ("list", "dict"):
            yield node
        node = list(node.values())
    if isinstance(node, list | tuple):
        for part in node:
            yield from collections_in(part)


def test_engine_05_no_list_of_any_body_keeps_an_error_for_each_element() -> None:
    assert openai_protocol.CompletionRequest in all_bodies()
    found = [(body, node) for body in all_bodies() for node in collections_in(body.__pydantic_core_schema__)]
    assert len(found) > 30
    assert not [body for body, node in found if not node.get("fail_fast")]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_ids": [None] * 50_000}, "input_ids.0"),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 50_000}, "stop"),
        ("/v1/chat/completions", {"messages": [1] * 50_000}, "messages.0"),
        ("/abort_request", {"rid": [1] * 50_000}, "rid"),
        ("/update_weights_from_distributed", {"names": [1] * 50_000, "dtypes": [], "shapes": []}, "names.0"),
    ],
)
def test_engine_05_a_refusal_names_the_first_error_only(live: Live, path: str, body: Any, field: str) -> None:
    status, message = live.refused(path, **body)
    assert status == 400 and message.startswith(field) and len(message) < 200


def test_engine_05_a_long_text_full_of_quotes_and_brackets_is_no_crowd_of_objects(live: Live) -> None:
    text = '[{"\\' * (1 << 19)
    status, message = live.refused(text=text)
    assert status == 400 and "context length" in message


def test_engine_05_many_objects_are_413(live: Live) -> None:
    assert live.refused(sampling_params={"junk": [{}] * ((1 << 20) + 1)}, input_ids=[1])[0] == 413


# --- long prompts ------------------------------------------------------------------------------------------------

LONG_TEXTS = """
import asyncio, resource, sys, time
from rollout.core.errors import BadRequest, TooLarge
from rollout.text import tokenizer as module

module.MAX_TOKENS = 500_000
tokenizer = module.Tokenizer.load(sys.argv[1])
tokenizer.context_length = 200_000
size_now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size_now + (700 << 20),) * 2)

async def main():
    for texts in (["hello wor" * (7 << 20)], ["x" * (1 << 20)], ["y" * 16000] * 4096):
        started = time.monotonic()
        try:
            await tokenizer.encode(texts)
            raise SystemExit("taken")
        except (BadRequest, TooLarge) as error:
            assert len(str(error)) < 300
        assert time.monotonic() - started < 40

asyncio.run(main())
print("done")
"""


@pytest.mark.full
def test_engine_06_texts_that_cannot_fit_are_refused_before_they_are_encoded(folder: Path) -> None:
    command = [sys.executable, "-c", LONG_TEXTS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr[-2000:]


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


def test_engine_06_ids_that_cannot_fit_are_refused_before_they_are_looked_at(live: Live) -> None:
    assert "context length" in live.refused(input_ids=[-1] * 1000)[1]
    assert "token_ids_logprob" in live.refused(**ONE_TOKEN, token_ids_logprob=[1] * 5000)[1]
    for name, value in (("stop_token_ids", [1] * 5000), ("logit_bias", {str(i): 1 for i in range(5000)})):
        assert name in live.refused(input_ids=[1], sampling_params={name: value})[1]


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_engine_14_keys_that_partition_the_prefix_cache_are_capped(live: Live, name: str, path: str) -> None:
    body = ONE_TOKEN if path == "/generate" else {"prompt": [1], "max_tokens": 1}
    assert live.client.post(path, json=body | {name: "k" * 512}).status_code == 200
    status, message = live.refused(path, **body, **{name: "k" * 513})
    assert status == 400 and name in message and "512" in message


# --- keys and pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", " ", " k"])
@pytest.mark.parametrize("flag", ["api_key", "admin_api_key"])
def test_engine_08_an_empty_key_is_an_error(flag: str, key: str) -> None:
    with pytest.raises(StartupError, match="--" + flag.replace("_", "-")):
        ServerArgs(host="0.0.0.0", **{"api_key": "k", flag: key}).validate()


FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"host": "evil.example:30000", "origin": "http://evil.example:30000"},
    {"host": "evil.example:30000"},
    {"host": "127.0.0.1.evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://localhost:3000", "host": "localhost:30000"},
]
STATE_CHANGING = [
    ("POST", "/generate"),
    ("POST", "/weights_checker"),
    ("POST", "/update_weight_version"),
    ("POST", "/abort_request"),
    ("GET", "/flush_cache"),
    ("GET", "/weights_checker"),
    ("GET", "/release_memory_occupation"),
    ("POST", "/v1/chat/completions"),
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_engine_15_w13_pages_of_other_sites_are_refused(live: Live, headers: dict[str, str]) -> None:
    live.scheduler.received.clear()
    for method, path in STATE_CHANGING:
        content = b'{"new_version": "evil", "input_ids": [1]}' if method == "POST" else None
        reply = live.client.request(method, path, headers=headers | {"content-type": "text/plain"}, content=content)
        assert reply.status_code == 403 and set(reply.json()["error"]) == {"type", "message"}, path
    assert live.scheduler.received == []
    assert live.client.get("/health", headers=headers).status_code == 200


def test_engine_15_w13_trainers_curl_and_the_own_pages_pass(live: Live) -> None:
    port = httpx.URL(live.url).port
    for headers in (
        {},
        {"host": "localhost"},
        {"host": f"localhost:{port}", "origin": f"http://localhost:{port}", "sec-fetch-site": "same-origin"},
        {"host": "[::1]:30000"},
        {"host": "10.0.0.7:30000"},
        {"sec-fetch-site": "none"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/plain"},
    ):
        assert live.client.post("/generate", json=ONE_TOKEN, headers=headers).status_code == 200, headers
        assert live.client.get("/flush_cache", headers=headers).status_code == 200, headers


def test_engine_15_w13_names_can_be_allowed_and_keys_need_no_names(folder: Path) -> None:
    evil = {"host": "evil.example"}
    with live_server(folder, allowed_hosts="engine.example, other") as live:
        for headers in ({"host": "engine.example:80"}, {"origin": "https://engine.example"}, {"host": "OTHER"}):
            assert live.client.get("/flush_cache", headers=headers).status_code == 200, headers
        assert live.client.get("/flush_cache", headers=evil).status_code == 403
    with live_server(folder, api_key="k") as live:
        headers = {"authorization": "Bearer k", "origin": "http://evil.example"}
        assert live.client.get("/flush_cache", headers=headers | evil).status_code == 200


def test_engine_15_w13_beyond_this_machine_only_pages_are_held_to_names(folder: Path) -> None:
    with live_server(folder, host="0.0.0.0", allow_unauthenticated=True) as live:
        assert live.client.get("/flush_cache", headers={"host": "engine-0.svc.cluster.local"}).status_code == 200
        for headers in FOREIGN[:3]:
            assert live.client.post("/abort_request", headers=headers).status_code == 403


# --- health and state --------------------------------------------------------------------------------------------


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


def test_engine_17_get_weights_by_name_shows_a_bounded_count_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reading, "_MAX_NUMBERS_SHOWN", 1000, raising=False)
    harness = Harness(tiny_checkpoint(tmp_path / "model"))
    name = "model.embed_tokens.weight"
    shown = harness.control(GetWeightsByNameReqInput, name=name, truncate_size=2)
    assert shown.success and len(shown.data["parameter"]) == 2
    refused = harness.control(GetWeightsByNameReqInput, name=name, truncate_size=2**31 - 1)
    assert not refused.success and refused.status_code == 413 and "truncate_size" in refused.message


# --- big answers -------------------------------------------------------------------------------------------------


def ping_while(live: Live, work: Callable[[], Any]) -> float:
    """Seconds of the slowest /ping beside `work`."""
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


# --- secrets -----------------------------------------------------------------------------------------------------


def parsed(*words: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return server_args_from_namespace(parser.parse_args(["--model-path", "m", *words]))


def test_engine_22_keys_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("from a file\n")
    monkeypatch.setenv("LOCKSTEP_API_KEY", "from the environment")
    args = parsed("--admin-api-key", f"@{file}")
    assert (args.api_key, args.admin_api_key) == ("from the environment", "from a file")
    assert parsed("--api-key", "given").api_key == "given"
    monkeypatch.setenv("LOCKSTEP_API_KEY", "")
    with pytest.raises(StartupError, match="empty"):
        parsed()
    with pytest.raises(StartupError, match="--admin-api-key @"):
        parsed("--api-key", "given", "--admin-api-key", f"@{tmp_path}/none")


def test_engine_22_messages_of_strangers_over_the_network_are_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        channel = SchedulerChannel(tmp_path, remote_host="127.0.0.1")
        assert channel.remote_output_addr is not None
        context = zmq.Context()
        stranger = context.socket(zmq.PUSH)
        stranger.connect(channel.remote_output_addr)
        fake = encode(SchedulerFailed(message="fake"))
        try:
            for frames in ([fake], [b"guess", fake], [b"", fake]):
                stranger.send_multipart(frames)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.receive(), 1.0)
            rank = ZmqChannel(None, channel.remote_output_addr, channel.secret)
            rank.send(SchedulerFailed(message="true"))
            rank.close()
            assert await asyncio.wait_for(channel.receive(), 10.0) == SchedulerFailed(message="true")
        finally:
            context.destroy(linger=0)
            channel.close()

    asyncio.run(scenario())


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
