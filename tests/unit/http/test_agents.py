"""Chats of agents: reasoning and tool calls apart, called by the `openai` package; sessions."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import ControlReqOutput, TokenizedGenerateReqInput
from rollout.core.messages.sessions import FinishSessionReqInput, GetSessionsReqInput
from rollout.families.registry import load_model_config
from rollout.http import sessions as session_book
from rollout.http.openai.messages import ChatMessages
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.tokenizer_manager.channel import SchedulerChannel
from rollout.tokenizer_manager.manager import TokenizerManager
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

EOS = 264
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
CALL = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(
        folder, enable_return_routed_experts=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    ) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    live.scheduler.received.clear()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=10) as made:
        yield made


def ids_of(live: Live, text: str) -> list[int]:
    return live.client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def chat(live: Live, client: openai.OpenAI, answer: str, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the response of a model that answers `answer` and stops: the stand-in repeats its prompt."""
    body = {"input_ids": [*ids_of(live, answer), EOS]} | (extra or {})
    return client.chat.completions.create(model="tiny", messages=[], extra_body=body, **{"tools": TOOLS} | options)


def test_reasoning_and_calls_apart(live: Live, client: openai.OpenAI) -> None:
    choice = chat(live, client, f"<think>\nhm</think>ok {CALL}").choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning_content) == (
        "tool_calls", "ok", "\nhm",
    )  # fmt: skip
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "f", {"x": 1})
    assert call.id.startswith("call_")


def test_a_stream_says_the_same(live: Live, client: openai.OpenAI) -> None:
    chunks = list(chat(live, client, f"<think>hm </think>ok\n{CALL}", stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    reasoning = [text for delta in deltas if (text := getattr(delta, "reasoning_content", None))]
    assert len(reasoning) > 1 and "".join(reasoning) == "hm "
    assert "".join(delta.content or "" for delta in deltas) == "ok"
    ((call,),) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "f", {"x": 1})
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["tool_calls"]


def test_reasoning_at_once_or_not_at_all(live: Live, client: openai.OpenAI) -> None:
    def pieces(**extra: Any) -> list[str]:
        chunks = list(chat(live, client, "<think>hm hm</think>ok", extra, stream=True))
        return [
            text
            for chunk in chunks
            for choice in chunk.choices
            if (text := getattr(choice.delta, "reasoning_content", None))
        ]

    assert pieces(stream_reasoning=False) == ["hm hm"]
    assert pieces(include_reasoning=False) == []
    message = chat(live, client, "<think>hm</think>ok", {"separate_reasoning": False}).choices[0].message
    assert message.content == "<think>hm</think>ok" and not hasattr(message, "reasoning_content")


def test_the_prompt_may_have_opened_the_thought(live: Live, client: openai.OpenAI) -> None:
    ids = [*ids_of(live, "hm</think>ok"), EOS, *ids_of(live, "<think>\n")]
    reply = client.chat.completions.create(model="tiny", messages=[], extra_body={"input_ids": ids})
    assert (reply.choices[0].message.reasoning_content, reply.choices[0].message.content) == ("hm", "ok")  # type: ignore[attr-defined]


def test_calls_only_where_tools_are_given(live: Live, client: openai.OpenAI) -> None:
    for options in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = chat(live, client, CALL, **options).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_every_sample_has_calls_of_its_own(live: Live, client: openai.OpenAI) -> None:
    ids = ids_of(live, CALL)
    options: Any = {"tools": TOOLS, "n": 2, "max_tokens": len(ids) + 3, "extra_body": {"input_ids": ids}}
    reply = client.chat.completions.create(model="tiny", messages=[], **options)
    for choice in reply.choices:
        assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 1
        assert (choice.message.content, choice.finish_reason) == ("<to", "length")
    assert len({choice.message.tool_calls[0].id for choice in reply.choices if choice.message.tool_calls}) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "names the tool g"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "give one of both"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(
    live: Live, client: openai.OpenAI, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        chat(live, client, CALL, **options)


@pytest.mark.parametrize("token_id", [-1, 300, 2**31, 2**63, -(2**63)])
def test_ids_that_do_not_exist_are_refused(live: Live, token_id: int) -> None:
    status, message = live.refused("/v1/chat/completions", input_ids=[5, token_id])
    assert status == 400 and str(token_id) in message


def test_templates_get_arguments_as_objects() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "arguments": arguments}}

    calls = [call('{"x": 1}'), call({"x": 1}), call("[1]"), call("no"), "odd"]
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "assistant", "tool_calls": calls}]})
    (message,) = body.template_messages()
    assert message["content"] == ""
    assert message["tool_calls"] == [call({"x": 1}), call({"x": 1}), call("[1]"), call("no"), "odd"]


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_list(flag: str, folder: Path, tmp_path: Path) -> None:
    args = ServerArgs(model_path=str(folder), **{flag: "pythonic"})
    channel = SchedulerChannel(str(tmp_path))
    try:
        with pytest.raises(StartupError, match=r"pythonic is not known: there are .*(qwen25|qwen3)"):
            ChatMessages(TokenizerManager(args, load_model_config(folder), channel))
    finally:
        channel.close()


def test_routes_count_on_the_given_tokens(live: Live, client: openai.OpenAI) -> None:
    """A session server sends turn by turn: the rows of all turns make one sequence without a gap."""
    sequence = ids_of(live, "abc")
    num_rows = 0
    for turn in ("de", "fgh"):
        extra = {
            "input_ids": sequence, "return_routed_experts": True, "routed_experts_start_len": num_rows,
            "return_meta_info": True, "return_token_ids": True,
        }  # fmt: skip
        messages: Any = [{"role": "user", "content": "not read"}]
        reply = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=3, extra_body=extra, logprobs=True
        )
        choice = reply.choices[0]
        assert choice.model_extra is not None and choice.model_extra["prompt_token_ids"] == sequence
        meta = choice.model_extra["meta_info"]
        assert meta["prompt_tokens"] == len(sequence) and meta["routed_experts_start_len"] == num_rows
        assert [entry[1] for entry in meta["output_token_logprobs"]] == choice.model_extra["token_ids"]
        answer = choice.model_extra["token_ids"]
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 2, 2)
        assert len(rows) == len(sequence) + len(answer) - 1 - num_rows
        num_rows += len(rows)
        sequence = [*sequence, *answer, *ids_of(live, turn)]


# --- sessions ----------------------------------------------------------------------------------------------------

KEPT = {"mine": {"kv_tokens": 30, "pinned_tokens": 20, "expires_in_s": 5.0}}


@pytest.fixture
def sessions(live: Live) -> Live:
    """The server, whose scheduler reports that one session keeps KV."""

    def answer(verb: Any) -> ControlReqOutput:
        data: dict[str, Any] = {"sessions": KEPT, "num_pinned_tokens": 20}
        if isinstance(verb, FinishSessionReqInput):
            data = {"num_released_tokens": 20 if verb.session_id == "mine" else 0}
        return ControlReqOutput(request_id=verb.request_id, success=True, data=data)

    live.scheduler.answers |= {GetSessionsReqInput: answer, FinishSessionReqInput: answer}
    live.scheduler.received.clear()
    return live


@pytest.mark.parametrize(
    ("headers", "body", "session_id"),
    [
        ({"X-Session-ID": "a"}, {}, "a"),
        ({"X-SMG-Routing-Key": "b"}, {}, "b"),
        ({"X-Session-ID": "a", "X-SMG-Routing-Key": "b"}, {}, "a"),
        ({"X-Session-ID": "a"}, {"session_id": "c"}, "c"),
        ({"X-Session-ID": ""}, {}, None),
        ({}, {}, None),
    ],
)
def test_whose_request_it_is(
    sessions: Live, headers: dict[str, str], body: dict[str, Any], session_id: str | None
) -> None:
    calls: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}},
        "/v1/completions": {"prompt": "a", "max_tokens": 2},
        "/v1/chat/completions": {"input_ids": [5], "max_tokens": 2},
    }
    if not body:
        calls["/inference/v1/generate"] = {"token_ids": [5], "sampling_params": {"max_tokens": 2}}
    for path, call in calls.items():
        reply = sessions.client.post(path, json=call | body, headers=headers).json()
        assert reply.get("meta_info", reply.get("metadata")).get("session_id") == session_id
        assert sessions.sent(TokenizedGenerateReqInput)[-1].session_id == session_id


def test_the_data_parallel_rank_of_the_header(sessions: Live) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    assert sessions.client.post("/generate", json=body, headers={"X-data-parallel-rank": "0"}).status_code == 200
    for rank in ("1", "-1", "x", "9" * 30):
        reply = sessions.client.post("/generate", json=body, headers={"X-data-parallel-rank": rank})
        assert reply.status_code == 400 and "rank" in reply.json()["error"]["message"]
    given = body | {"data_parallel_rank": 0}
    assert sessions.client.post("/generate", json=given, headers={"X-data-parallel-rank": "x"}).status_code == 200


def test_a_session_id_has_an_end(sessions: Live) -> None:
    for session_id in ("x" * 513, ""):
        status, message = sessions.refused(input_ids=[5], session_id=session_id)
        assert status == 400 and "session id" in message


def test_the_report_of_sessions(sessions: Live) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "session_id": "reported"}
    assert sessions.generate(**body)["meta_info"]["session_id"] == "reported"
    assert sessions.generate(**body | {"stream": False})["meta_info"]["dp_rank"] == 0
    report = sessions.client.get("/sessions/reported").json()
    assert report.pop("idle_s") < 10.0
    assert report == {
        "session_id": "reported", "num_running": 0, "kv_tokens": 0, "pinned_tokens": 0, "expires_in_s": None,
        "num_finished": 2, "prompt_tokens": 4, "cached_tokens": 2, "completion_tokens": 6, "context_tokens": 5,
        "dp_rank": 0,
    }  # fmt: skip
    mine = sessions.client.get("/sessions/mine").json()
    assert (mine["kv_tokens"], mine["num_finished"], mine["idle_s"]) == (30, 0, None)
    everything = sessions.client.get("/sessions").json()
    assert [item["session_id"] for item in everything["sessions"]][:2] == ["mine", "reported"]
    assert everything["num_sessions"] >= 2 and everything["num_pinned_tokens"] == 20
    assert len(sessions.client.get("/sessions", params={"limit": 1}).json()["sessions"]) == 1


def test_requests_that_run_are_counted(sessions: Live) -> None:
    with sessions.client.stream(
        "POST", "/generate", json={"input_ids": [5], "stream": True, "extra_key": "slow", "session_id": "busy"}
    ) as stream:
        events = stream.iter_bytes()
        next(events)
        assert sessions.client.get("/sessions/busy").json()["num_running"] == 1
    sessions.wait_until(lambda: sessions.client.get("/sessions/busy").json()["num_running"] == 0)


def test_bad_questions_about_sessions(sessions: Live) -> None:
    limits = {f"/sessions?limit={limit}": 400 for limit in (0, 5000, "x")}
    for path, status in ({"/sessions/nobody": 404} | limits).items():
        reply = sessions.client.get(path)
        assert reply.status_code == status and reply.json()["error"]["message"]


def test_a_session_is_finished(sessions: Live) -> None:
    def finish(**params: str) -> Any:
        return sessions.client.post("/finish_session", params=params)

    assert finish(session_id="mine").json()["num_released_tokens"] == 20
    assert finish(session_id="nobody").json()["num_released_tokens"] == 0
    assert finish().status_code == finish(session_id="").status_code == 400
    assert [verb.session_id for verb in sessions.sent(FinishSessionReqInput)] == ["mine", "nobody"]


def test_labels_of_sessions_have_a_bound(sessions: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def labels() -> dict[str, float]:
        text = sessions.client.get("/metrics").text
        found = re.findall(r'^lockstep:session_requests_total{.*session_id="(.*)"} (.*)$', text, re.MULTILINE)
        return {label: float(value) for label, value in found}

    before = labels()
    monkeypatch.setattr(session_book, "MAX_LABELS", len(before) + 2)
    for index in range(5):
        sessions.generate(input_ids=[5], sampling_params={"max_new_tokens": 1}, session_id=f'label-{index}"')
    assert labels() == before | {'label-0\\"': 1.0, 'label-1\\"': 1.0, "other": 3.0}


def test_doors_answer_ids_without_a_tokenizer_and_refuse_text(folder: Path) -> None:
    with live_server(folder, with_tokenizer=False) as live:
        for door, limit, text in (
            ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
            ("/v1/responses", "max_output_tokens", {"input": "hello"}),
        ):
            body = {limit: 3, "session_id": "s", "return_token_record": True}
            reply = live.client.post(door, json=body | {"input_ids": [5, 6]})
            assert reply.status_code == 200 and reply.json()["token_record"]["output_token_ids"] == [5, 6, 5]
            refused = live.client.post(door, json=body | text)
            assert refused.status_code == 400 and "--skip-tokenizer-init" in refused.text
