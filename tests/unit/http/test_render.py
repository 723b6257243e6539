"""vLLM's renderer: what it renders generates what a chat generates, and derendered it is that chat's answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.http.vllm import render
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

EOS = 264
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
CALL = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
ANSWERS = ["hello", f"<think>\nhm</think>ok {CALL}", "okENDx", "<think>hm", "é", ""]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


def ids_of(live: Live, text: str) -> list[int]:
    tokens: list[int] = live.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def post(live: Live, path: str, body: Any) -> Any:
    reply = live.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat_of(live: Live, answer: str) -> dict[str, Any]:
    """Return a chat that the stand-in answers with `answer`, as it repeats its prompt."""
    ids = [*ids_of(live, answer), EOS]
    return {
        "messages": [],
        "input_ids": ids,
        "tools": TOOLS,
        "stop": ["END"],
        "max_tokens": 80,
        "seed": 3,
        "logprobs": True,
    }


def sent(live: Live) -> list[TokenizedGenerateReqInput]:
    return live.sent(TokenizedGenerateReqInput)


def message_of(answer: dict[str, Any]) -> Any:
    (choice,) = answer["choices"]
    message = choice["message"]
    for call in message.get("tool_calls") or ():
        call.pop("id")
    return message, choice["finish_reason"], choice["matched_stop"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_chat_goes_through_three_calls(live: Live, answer: str) -> None:
    live.scheduler.received.clear()
    chat = chat_of(live, answer)
    whole = post(live, "/v1/chat/completions", chat)
    rendered = post(live, "/v1/chat/completions/render", chat)
    generated = post(live, "/inference/v1/generate", rendered)
    first, second = sent(live)
    assert list(first.input_ids) == list(second.input_ids) and first.sampling_params == second.sampling_params
    assert first.return_logprob and second.return_logprob
    body = {"model": "tiny", "generate_response": generated, "prompt_tokens": 7, "chat_request": chat}
    made = post(live, "/v1/chat/completions/derender", body)
    assert message_of(made) == message_of(whole)
    count = whole["usage"]["completion_tokens"]
    assert made["usage"] == {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": count + 7}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("size", [1, 3])
def test_chunks_add_up_to_the_whole(live: Live, answer: str, size: int) -> None:
    chat = chat_of(live, answer)
    generated = post(live, "/inference/v1/generate", post(live, "/v1/chat/completions/render", chat))
    (choice,) = generated["choices"]
    body = {"generate_response": generated, "chat_request": chat}
    want, reason, matched = message_of(post(live, "/v1/chat/completions/derender", body))
    ids, state, said = choice["token_ids"], None, {"content": "", "reasoning": "", "tool_calls": []}
    for first in range(0, len(ids), size):
        is_last = first + size >= len(ids)
        part = {"index": 0, "token_ids": ids[first : first + size]}
        if is_last:
            part |= {"finish_reason": choice["finish_reason"], "matched_stop": choice["matched_stop"]}
        chunk_body = {
            "stream": True, "chat_request": chat, "generate_chunk": {"choices": [part]}, "stream_state": state,
        }  # fmt: skip
        reply = post(live, "/v1/chat/completions/derender", chunk_body)
        state, chunk = reply["stream_state"], reply["chunk"]
        assert chunk["object"] == "chat.completion.chunk"
        (piece,) = chunk["choices"]
        for name in said:
            said[name] += piece["delta"].get(name) or type(said[name])()
        assert (piece["finish_reason"], piece["matched_stop"]) == ((reason, matched) if is_last else (None, None))
    for call in said["tool_calls"]:
        call.pop("id")
    shown = {name: value for name, value in said.items() if value}
    assert shown == {name: value for name, value in want.items() if name in said and value}


def test_completions_are_rendered_one_a_prompt(live: Live) -> None:
    body = {"prompt": ["a", "b"], "logprobs": 2, "temperature": 0.5, "ignore_eos": True}
    rendered = post(live, "/v1/completions/render", body)
    assert [one["token_ids"] for one in rendered] == [ids_of(live, "a"), ids_of(live, "b")]
    assert rendered[0]["sampling_params"] == {
        "temperature": 0.5,
        "ignore_eos": True,
        "max_tokens": 16,
        "logprobs": 2,
        "n": 1,
    }
    answers = [post(live, "/inference/v1/generate", one) for one in rendered]
    made = post(live, "/v1/completions/derender", {"generate_responses": answers, "prompt_tokens": [1, 1]})
    assert [choice["text"] for choice in made["choices"]] == ["a" * 16, "b" * 16]
    assert [choice["index"] for choice in made["choices"]] == [0, 1] and made["usage"]["total_tokens"] == 34


def test_without_the_request_the_text_is_plain(live: Live) -> None:
    tokens = [*ids_of(live, f"<think>hm</think>{CALL}"), EOS]
    answer = {"choices": [{"token_ids": tokens, "finish_reason": "stop"}]}
    made = post(live, "/v1/chat/completions/derender", {"generate_response": answer})
    assert made["choices"][0]["message"] == {"role": "assistant", "content": f"<think>hm</think>{CALL}"}


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, "generate_response is missing, or has no choices"),
        ({"stream": True}, 400, "generate_chunk is missing, or has no choices"),
        ({"model": "x", "generate_response": {"choices": [{"token_ids": [1]}]}}, 404, "the model 'x' does not exist"),
        ({"generate_response": {"choices": []}}, 400, "generate_response is missing, or has no choices"),
        ({"generate_response": {"choices": [{"token_ids": []}]}}, 400, "a choice has no token_ids"),
        ({"generate_response": {"choices": [{"token_ids": [999]}]}}, 400, "token_ids"),
        (
            {"stream": True, "generate_chunk": {"choices": [{"token_ids": [1]}]}, "stream_state": {"token_ids": [1]}},
            400,
            "stream_state must be the one of the chunk before",
        ),
        ({"generate_response": {"choices": [{"token_ids": [1]}]}, "chat_request": {"messages": 3}}, 400, "messages"),
        (
            {
                "generate_response": {"choices": [{"token_ids": [1]}]},
                "chat_request": {"messages": [{"role": "user", "content": "a"}], "stop": ["END", ""]},
            },
            400,
            "a stop string must have 1 to",
        ),
    ],
)
def test_what_cannot_be_derendered_is_refused(live: Live, body: dict[str, Any], status: int, text: str) -> None:
    got, message = live.refused("/v1/chat/completions/derender", **body)
    assert got == status and text in message


@pytest.mark.mutant
def test_chunks_that_forget_the_tokens_before_are_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_tokens_before", lambda *_: [])
    with pytest.raises(AssertionError):
        test_chunks_add_up_to_the_whole(live, ANSWERS[1], 1)
