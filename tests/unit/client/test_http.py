from __future__ import annotations

import asyncio
import inspect
import time

import httpx
import pytest
from fastapi.responses import PlainTextResponse

from rollout.client import AsyncRolloutClient, ResponseFormatError, RolloutClient
from rollout.client.errors import ServerError
from rollout.client.sse import SseDecoder
from rollout.core.messages.experts import EplbRebalanceReply, EplbRebalanceReqInput
from rollout.core.messages.sessions import FinishSessionReply, FinishSessionReqInput
from tests.canned_server import CannedServer, event_stream, json_response, serving
from weight_sync.sender import EngineControl

SAMPLE = {
    "text": "a\u2028b",
    "output_ids": [1, 2],
    "meta_info": {"id": "r", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 1},
}
PARTIAL = {"text": "a", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": None, "prompt_tokens": 1}}
OK = {"success": True, "message": "done"}
REBALANCE = {"rebalanced": False, "dry_run": True, "decision": {}, "placement_epoch": 2}


def in_process(canned, **options):
    transport = httpx.ASGITransport(canned.app())
    return AsyncRolloutClient("http://server", transport=transport, **options)


def run_async(canned, use, **options):
    """Run `use(client)` with an asynchronous client that calls the canned application without a socket."""

    async def main():
        async with in_process(canned, **options) as client:
            return await use(client)

    return asyncio.run(asyncio.wait_for(main(), 20))


# Each verb: the call, the answer, and the request and result that must follow.
VERBS = [
    (lambda c: c.get_world_size(), {"world_size": 2}, "GET", "/get_world_size", None, 2),
    (lambda c: c.abort("r1"), "", "POST", "/abort_request", {"rid": "r1", "abort_all": False}, None),
    (lambda c: c.abort_all(), "", "POST", "/abort_request", {"rid": "", "abort_all": True}, None),
    (lambda c: c.pause("retract"), {"paused": True}, "POST", "/pause_generation", {"mode": "retract"}, ...),
    (lambda c: c.pause(), {"paused": True}, "POST", "/pause_generation", {"mode": "abort"}, ...),
    (lambda c: c.continue_generation(), {"status": "ok"}, "POST", "/continue_generation", {}, ...),
    (
        lambda c: c.continue_generation("7"),
        {"status": "ok"},
        "POST",
        "/continue_generation",
        {"abort_below_weight_version": "7"},
        ...,
    ),
    (
        lambda c: c.load_adapter("poet", "/a", pinned=True),
        OK,
        "POST",
        "/load_lora_adapter",
        {"lora_name": "poet", "lora_path": "/a", "pinned": True},
        ...,
    ),
    (
        lambda c: c.unload_adapter("poet"),
        OK,
        "POST",
        "/unload_lora_adapter",
        {"lora_name": "poet", "retire": False},
        ...,
    ),
    (
        lambda c: c.start_profile(),
        OK,
        "POST",
        "/start_profile",
        {"with_stack": False, "record_shapes": False},
        ...,
    ),
    (
        lambda c: c.start_profile("/tmp/p", 3, with_stack=True, record_shapes=True),
        OK,
        "POST",
        "/start_profile",
        {"output_dir": "/tmp/p", "num_steps": 3, "with_stack": True, "record_shapes": True},
        ...,
    ),
    (lambda c: c.stop_profile(), OK, "POST", "/stop_profile", {}, ...),
    (
        lambda c: c.report_trainer_metrics({"kl": 0.5}, step=3),
        {},
        "POST",
        "/dashboard/trainer_metrics",
        {"values": {"kl": 0.5}, "step": 3},
        ...,
    ),
    (lambda c: c.release_memory_occupation(), {}, "POST", "/release_memory_occupation", {}, ...),
    (
        lambda c: c.resume_memory_occupation(["weights"]),
        {},
        "POST",
        "/resume_memory_occupation",
        {"tags": ["weights"]},
        ...,
    ),
    (lambda c: c.flush_cache(), PlainTextResponse("Cache flushed.\n"), "POST", "/flush_cache", {}, "Cache flushed."),
    (lambda c: c.model_info(), {"model_path": "m"}, "GET", "/model_info", None, ...),
    (lambda c: c.server_info(), {"tp_size": 1}, "GET", "/server_info", None, ...),
    (lambda c: c.loads(), {"loads": []}, "GET", "/v1/loads", None, ...),
    (lambda c: c.weight_version(), {"weight_version": "v3"}, "GET", "/weight_version", None, "v3"),
    (
        lambda c: c.tokenize("hi"),
        {"tokens": [1, 2]},
        "POST",
        "/tokenize",
        {"prompt": "hi", "add_special_tokens": True},
        [1, 2],
    ),
    (
        lambda c: c.detokenize((1, 2)),
        {"text": "hi"},
        "POST",
        "/detokenize",
        {"tokens": [1, 2], "skip_special_tokens": True},
        "hi",
    ),
    (
        lambda c: c.init_weights_update_group("127.0.0.1", 29500, 1, 2, "g", "gloo"),
        OK,
        "POST",
        "/init_weights_update_group",
        {
            "master_address": "127.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "g",
            "backend": "gloo",
        },
        ...,
    ),
    (
        lambda c: c.destroy_weights_update_group("g"),
        OK,
        "POST",
        "/destroy_weights_update_group",
        {"group_name": "g"},
        ...,
    ),
    (
        lambda c: c.begin_weight_update(base_version="v1", base_digest="ab", lease_s=5.0),
        OK,
        "POST",
        "/begin_weight_update",
        {"coverage": "full", "base_version": "v1", "base_digest": "ab", "lease_s": 5.0},
        ...,
    ),
    (
        lambda c: c.begin_weight_update(placement_epoch=3, per_rank=True),
        OK,
        "POST",
        "/begin_weight_update",
        {"coverage": "full", "placement_epoch": 3, "per_rank": True},
        ...,
    ),
    (
        lambda c: c.weight_parts(["w"], ["float32"], [[2]]),
        OK,
        "POST",
        "/weight_parts",
        {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]},
        ...,
    ),
    (lambda c: c.weight_update(), {"open": False}, "GET", "/weight_update", None, {"open": False}),
    (lambda c: c.begin_weight_update(), OK, "POST", "/begin_weight_update", {"coverage": "full"}, ...),
    (
        lambda c: c.begin_weight_update("v1", "partial", [{"name": "w", "dtype": "float32", "shape": [2]}]),
        OK,
        "POST",
        "/begin_weight_update",
        {
            "coverage": "partial",
            "weight_version": "v1",
            "manifest": [{"name": "w", "dtype": "float32", "shape": [2]}],
        },
        ...,
    ),
    (
        lambda c: c.update_weights_from_tensor([b"abc", "YWJj"], load_format="flattened_bucket"),
        OK,
        "POST",
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["YWJj", "YWJj"],
            "load_format": "flattened_bucket",
            "flush_cache": False,
        },
        ...,
    ),
    (
        lambda c: c.update_weights_from_tensor(
            format="safetensors", shm_name="psm", shm_bytes=9, shm_unlink=True, weight_version="v", flush_cache=True
        ),
        OK,
        "POST",
        "/update_weights_from_tensor",
        {
            "format": "safetensors",
            "shm_name": "psm",
            "shm_bytes": 9,
            "shm_unlink": True,
            "weight_version": "v",
            "flush_cache": True,
        },
        ...,
    ),
    (
        lambda c: c.update_weights_from_distributed(("w",), ("bfloat16",), ((2, 3),), "g"),
        OK,
        "POST",
        "/update_weights_from_distributed",
        {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g", "flush_cache": False},
        ...,
    ),
    (
        lambda c: c.update_weights_from_distributed([], [], [], load_format="flattened_bucket", weight_version="v"),
        OK,
        "POST",
        "/update_weights_from_distributed",
        {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": "weight_update_group",
            "flush_cache": False,
            "load_format": "flattened_bucket",
            "weight_version": "v",
        },
        ...,
    ),
    (
        lambda c: c.update_weights_from_ipc({"cpu": "ipc://@x"}, "v"),
        OK,
        "POST",
        "/update_weights_from_ipc",
        {"zmq_handles": {"cpu": "ipc://@x"}, "flush_cache": False, "weight_version": "v"},
        ...,
    ),
    (
        lambda c: c.update_weights_from_disk("/m", "v"),
        OK,
        "POST",
        "/update_weights_from_disk",
        {"model_path": "/m", "weight_version": "v"},
        ...,
    ),
    (
        lambda c: c.pull_weights("/l", "/s", 3, weight_version="v"),
        OK,
        "POST",
        "/pull_weights",
        {
            "local_checkpoint_dir": "/l",
            "source_dir": "/s",
            "target_version": 3,
            "update_memory": False,
            "weight_version": "v",
        },
        ...,
    ),
    (lambda c: c.end_weight_update(), OK, "POST", "/end_weight_update", {}, ...),
    (lambda c: c.end_weight_update("verify"), OK, "POST", "/end_weight_update", {"phase": "verify"}, ...),
    (lambda c: c.abort_weight_update(), OK, "POST", "/abort_weight_update", {}, ...),
    (
        lambda c: c.begin_weight_update(update_id="u"),
        OK,
        "POST",
        "/begin_weight_update",
        {"coverage": "full", "update_id": "u"},
        ...,
    ),
    (
        lambda c: c.update_weights_from_distributed(["w"], ["float32"], [[2]], update_id="u"),
        OK,
        "POST",
        "/update_weights_from_distributed",
        {
            "names": ["w"],
            "dtypes": ["float32"],
            "shapes": [[2]],
            "group_name": "weight_update_group",
            "flush_cache": False,
            "update_id": "u",
        },
        ...,
    ),
    (
        lambda c: c.end_weight_update("commit", "u"),
        OK,
        "POST",
        "/end_weight_update",
        {"phase": "commit", "update_id": "u"},
        ...,
    ),
    (lambda c: c.abort_weight_update("u"), OK, "POST", "/abort_weight_update", {"update_id": "u"}, ...),
    (
        lambda c: c.update_weight_version("v2"),
        OK,
        "POST",
        "/update_weight_version",
        {"new_version": "v2", "abort_all_requests": False},
        ...,
    ),
    (
        lambda c: c.get_weights_by_name("w", 3),
        [[1.0, 2.0]],
        "POST",
        "/get_weights_by_name",
        {"name": "w", "truncate_size": 3},
        ...,
    ),
    (
        lambda c: c.control(FinishSessionReqInput, session_id="a b"),
        OK | {"num_released_tokens": 3},
        "POST",
        "/finish_session",
        None,
        FinishSessionReply(num_released_tokens=3),
    ),
    (
        lambda c: c.control(EplbRebalanceReqInput, dry_run=True),
        OK | REBALANCE,
        "POST",
        "/eplb_rebalance",
        {"dry_run": True},
        EplbRebalanceReply(**REBALANCE),
    ),
    (lambda c: c.weights_checker(), OK, "POST", "/weights_checker", {"action": "checksum"}, ...),
    (
        lambda c: c.weights_checker("compare", keep_content=True, skip_tensor_list=["w"]),
        OK,
        "POST",
        "/weights_checker",
        {"action": "compare", "keep_content": True, "skip_tensor_list": ["w"]},
        ...,
    ),
]


def test_every_verb_asks_for_the_right_thing_on_both_clients():
    for call, content, method, path, body, result in VERBS:
        expected = content if result is ... else result
        canned = CannedServer({path: PlainTextResponse("") if content == "" else content})
        assert run_async(canned, call) == expected, path
        asked = canned.asked[-1]
        assert (asked.method, asked.path, asked.body) == (method, path, body)
    merged = CannedServer()
    with serving(merged) as url, RolloutClient(url) as client:
        for call, content, method, path, body, result in VERBS:
            merged.answers[path] = PlainTextResponse("") if content == "" else content
            assert call(client) == (content if result is ... else result), path
            asked = merged.asked[-1]
            assert (asked.method, asked.path, asked.body) == (method, path, body)


def test_both_clients_have_the_same_methods_and_every_verb_is_tested():
    def surface(client_type):
        methods = inspect.getmembers(client_type, inspect.isfunction)
        return {name: list(inspect.signature(m).parameters.values()) for name, m in methods if name[0] != "_"}

    assert surface(RolloutClient) == surface(AsyncRolloutClient)
    names = {call.__code__.co_names[0] for call, *_ in VERBS}
    assert surface(RolloutClient).keys() - names == {
        *(
            "generate",
            "generate_many",
            "resume",
            "score",
            "embed",
            "classify",
            "stream",
            "resume_stream",
            "paused",
            "weight_transaction",
            "adapter_update",
        ),
        *("health", "wait_until_ready", "close"),
    }


def test_the_client_is_the_control_side_that_a_weight_sender_asks_for():
    for name, asked in inspect.getmembers(EngineControl, inspect.isfunction):
        if name[0] != "_":
            keywords = {key: None for key in inspect.signature(asked).parameters if key != "self"}
            inspect.signature(getattr(RolloutClient, name)).bind(None, **keywords)


def test_generate_over_http_on_both_clients():
    canned = CannedServer({"/generate": lambda body: [SAMPLE] * 2 if isinstance(body["text"], list) else SAMPLE})
    with serving(canned) as url, RolloutClient(url) as client:
        assert client.generate("hi").text == "a\u2028b"
        assert [output.output_ids for output in client.generate(["a", "b"], rid=["x", "y"])] == [[1, 2], [1, 2]]
        assert canned.asked[-1].body == {"text": ["a", "b"], "rid": ["x", "y"]}

    async def many(client):
        return await asyncio.gather(*(client.generate(f"p{i}") for i in range(50)))

    assert len(run_async(canned, many)) == 50


def test_a_stream_yields_every_event_in_order():
    canned = CannedServer({"/generate": lambda body: event_stream([PARTIAL, SAMPLE])})
    with serving(canned) as url, RolloutClient(url) as client:
        outputs = list(client.stream("hi", sampling_params={"max_new_tokens": 2}))
    assert [(o.text, o.finish_reason is None) for o in outputs] == [("a", True), ("a\u2028b", False)]
    sent = {"text": "hi", "sampling_params": {"max_new_tokens": 2}, "stream": True, "stream_format": "cumulative"}
    assert canned.asked[-1].body == sent

    async def collect(client):
        return [output async for output in client.stream("hi")]

    assert run_async(canned, collect) == outputs


def test_a_stream_that_breaks_off_or_fails_is_an_error():
    cases = [
        (lambda body: event_stream([PARTIAL], done=False), ResponseFormatError),
        (lambda body: event_stream([PARTIAL, {"error": {"message": "gone", "code": 503}}]), ServerError),
        (lambda body: json_response({"error": {"message": "no"}}, 400), ServerError),
        (lambda body: json_response({"error": {"message": "no"}}, 307), ServerError),
        (lambda body: event_stream([{"text": "no meta"}]), ResponseFormatError),
    ]
    canned = CannedServer()

    async def collect(client):
        return [output async for output in client.stream("hi")]

    with serving(canned) as url, RolloutClient(url) as client:
        for answer, error in cases:
            canned.answers["/generate"] = answer
            with pytest.raises(error):
                list(client.stream("hi"))
            with pytest.raises(error):
                run_async(canned, collect)


def test_closing_a_stream_closes_the_connection():
    canned = CannedServer()
    event = b'data: {"text": "a", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": null}}\n\n'
    canned.answers["/generate"] = canned.stream_forever(event)
    with serving(canned) as url, RolloutClient(url) as client:
        outputs = client.stream("hi")
        assert next(outputs).text == "a"
        assert not canned.disconnected.is_set()
        outputs.close()
        assert canned.disconnected.wait(10)

    async def first_of(url):
        async with AsyncRolloutClient(url) as client:
            outputs = client.stream("hi")
            async for output in outputs:
                assert output.text == "a"
                break
            await outputs.aclose()

    canned.disconnected.clear()
    canned.answers["/generate"] = canned.stream_forever(event)
    with serving(canned) as url:
        asyncio.run(asyncio.wait_for(first_of(url), 20))
        assert canned.disconnected.wait(10)


@pytest.mark.parametrize("status", [200, 400])
def test_a_refused_weight_verb_raises_what_the_server_said(status):
    refusal = {"success": False, "message": "2 tensors are missing: a, b", "error": {"type": "CoverageError"}}
    canned = CannedServer({"/end_weight_update": json_response(refusal, status)})
    with pytest.raises(ServerError, match="2 tensors are missing: a, b") as caught:
        run_async(canned, lambda client: client.end_weight_update())
    assert caught.value.status == status


def test_keys_go_where_they_belong():
    canned = CannedServer({"/generate": SAMPLE, "/pause_generation": {}})
    cases = [
        ({}, None, None),
        ({"api_key": "k"}, "Bearer k", "Bearer k"),
        ({"api_key": "k", "admin_api_key": "a"}, "Bearer k", "Bearer a"),
        ({"admin_api_key": "a"}, None, "Bearer a"),
    ]
    for options, generate_key, pause_key in cases:

        async def use(client):
            await client.generate("hi")
            await client.pause()

        run_async(canned, use, **options)
        assert [asked.headers.get("authorization") for asked in canned.asked[-2:]] == [generate_key, pause_key]


def test_answers_of_the_wrong_kind_are_errors():
    wrong = [
        ("/model_info", [1], lambda c: c.model_info()),
        ("/weight_version", {}, lambda c: c.weight_version()),
        ("/tokenize", {"tokens": "x"}, lambda c: c.tokenize("x")),
        ("/end_weight_update", PlainTextResponse("fine"), lambda c: c.end_weight_update()),
    ]
    for path, content, call in wrong:
        with pytest.raises(ResponseFormatError):
            run_async(CannedServer({path: content}), call)


def test_engine_19_reading_an_event_takes_time_in_proportion_to_its_size() -> None:
    def seconds() -> float:
        decoder, chunk = SseDecoder(), b"x" * 256
        start = time.perf_counter()
        assert not list(decoder.feed(b"data: "))
        for _ in range(12_000):
            assert not list(decoder.feed(chunk))
        (event,) = decoder.feed(b"\n\n")
        assert len(event) == 12_000 * 256
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.4  # 0.02 s; 18 GB were copied when it was quadratic


def test_engine_19_events_are_the_same_however_they_are_cut() -> None:
    stream = b'data: {"a": 1}\r\n\r\n: comment\ndata: two\ndata:lines\n\nid: 3\n\ndata: [DONE]\n\n'
    whole = list(SseDecoder().feed(stream))
    assert whole == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
    for size in (1, 2, 3, 7):
        decoder = SseDecoder()
        cut = [event for i in range(0, len(stream), size) for event in decoder.feed(stream[i : i + size])]
        assert cut == whole
