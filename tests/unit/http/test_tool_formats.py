"""Calls of models whose markers are special tokens: what the server shows to parsers, and where a turn ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.families.registry import load_model_config
from rollout.http.openai.messages import ChatMessages
from rollout.http.openai.parsers import harmony
from rollout.tokenizer_manager.channel import SchedulerChannel
from rollout.tokenizer_manager.manager import TokenizerManager
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

EOS = 264
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


def folder_of(tmp_path_factory: pytest.TempPathFactory, markers: tuple[str, ...]) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), more_special=markers)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = folder_of(tmp_path_factory, harmony.MARKERS)
    with live_server(folder, tool_call_parser="gpt-oss", reasoning_parser="gpt-oss") as server:
        yield server


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(folder_of(tmp_path_factory, KIMI), tool_call_parser="kimi_k2") as server:
        yield server


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(folder_of(tmp_path_factory, ()), context_length=400, tool_call_parser="hermes") as server:
        yield server


def chat(live: Live, answer: str, **options: Any) -> Any:
    """Return the reply of a model that answers `answer` and stops: the stand-in repeats its prompt."""
    ids = live.client.post("/tokenize", json={"prompt": answer}).json()["tokens"]
    body = {"input_ids": [*ids, EOS]} | options.pop("extra_body", {})
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        reply = client.chat.completions.create(
            model="tiny", messages=[], extra_body=body, **{"tools": TOOLS, "max_tokens": len(ids) + 1} | options
        )
        return list(reply) if options.get("stream") else reply


def streamed(chunks: list[Any]) -> tuple[str, str, list[Any], list[str]]:
    """Collect the reasoning, the content, the calls and the finish reasons of a stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    deltas = [choice.delta for choice in choices]
    return (
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
        "".join(delta.content or "" for delta in deltas),
        [call for delta in deltas for call in delta.tool_calls or ()],
        [choice.finish_reason for choice in choices if choice.finish_reason],
    )


def test_a_closing_tag_within_an_argument_ends_no_call(hermes: Live) -> None:
    """B3: a second call survives, whole and streamed."""
    first = '<tool_call>{"name":"w","arguments":{"x":"a</tool_call>b"}}</tool_call>'
    answer = first + '\n<tool_call>{"name":"f"}</tool_call>'
    choice = chat(hermes, answer).choices[0]
    _, content, calls, finished = streamed(chat(hermes, answer, stream=True))
    for found in (choice.message.tool_calls, calls):
        assert [(call.function.name, call.function.arguments) for call in found] == [
            ("w", '{"x":"a</tool_call>b"}'),
            ("f", "{}"),
        ]
    assert (choice.message.content, choice.finish_reason, content, finished) == (None, "tool_calls", "", ["tool_calls"])


def test_harmony_is_parsed_whole_and_streamed_over_http(gpt_oss: Live) -> None:
    """N27: reasoning and calls of gpt-oss are the same whole and streamed."""
    answer = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
    )
    choice = chat(gpt_oss, answer).choices[0]
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == (
        "hm",
        None,
        "tool_calls",
    )
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
    reasoning, content, (call,), finished = streamed(chat(gpt_oss, answer, stream=True))
    assert (reasoning, content, finished) == ("hm", "", ["tool_calls"])
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})


def test_harmony_without_tools_still_separates_reasoning(gpt_oss: Live) -> None:
    answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|im_start|>"
    message = chat(gpt_oss, answer, tools=openai.NOT_GIVEN).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")
    whole = chat(gpt_oss, answer, tools=openai.NOT_GIVEN, extra_body={"separate_reasoning": False}).choices[0].message
    assert whole.content == "<|channel|>analysis<|message|>hm<|end|>yes"


def test_a_call_ends_the_turn(gpt_oss: Live) -> None:
    """N27: `<|call|>` and `<|return|>` end an answer even where the model's configuration does not list them."""
    gpt_oss.scheduler.received.clear()
    chat(gpt_oss, "<|channel|>final<|message|>a", extra_body={"stop_token_ids": [5]})
    chat(gpt_oss, "<|channel|>final<|message|>a", extra_body={"ignore_eos": True})
    ends = gpt_oss.manager.tokenizer.vocabulary.ids_of(harmony.ENDS_OF_TURN)
    assert len(ends) == 2
    first, second = (source.sampling_params.stop_token_ids for source in gpt_oss.sent(TokenizedGenerateReqInput))
    assert (list(first), list(second)) == ([5, *sorted(ends)], [])


def test_special_markers_are_seen_by_the_parser_alone(kimi: Live) -> None:
    """N27: the ids of Kimi-K2's calls come through; other special tokens stay out of the text."""
    answer = (
        "ok<|im_start|> <|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    for reply in (chat(kimi, answer), chat(kimi, answer, stream=True)):
        if isinstance(reply, list):
            _, content, (call,), _ = streamed(reply)
        else:
            content, (call,) = reply.choices[0].message.content, reply.choices[0].message.tool_calls
        assert (content, call.id, call.function.name, call.function.arguments) == ("ok", "functions.f:3", "f", "{}")
    assert chat(kimi, answer, tools=openai.NOT_GIVEN).choices[0].message.content == "ok functions.f:3{}"


def test_one_call_at_most(kimi: Live) -> None:
    """3.5: parallel_tool_calls false keeps the first call of an answer, whole and streamed."""
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    both = chat(kimi, call * 2).choices[0].message.tool_calls
    assert len(both) == 2 and both[0].id == "functions.f:0" and both[1].id != both[0].id
    choice = chat(kimi, call * 2, parallel_tool_calls=False).choices[0]
    assert (len(choice.message.tool_calls), choice.message.content, choice.finish_reason) == (1, None, "tool_calls")
    _, content, calls, finished = streamed(chat(kimi, call * 2, parallel_tool_calls=False, stream=True))
    assert (len(calls), content, finished) == (1, "", ["tool_calls"])


def test_harmony_goes_with_nothing_else(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    args = ServerArgs(model_path=str(folder), tool_call_parser="hermes", reasoning_parser="gpt-oss")
    channel = SchedulerChannel(str(tmp_path))
    try:
        with pytest.raises(StartupError, match="--tool-call-parser hermes does not go with --reasoning-parser gpt-oss"):
            ChatMessages(TokenizerManager(args, load_model_config(folder), channel, []))
    finally:
        channel.close()
