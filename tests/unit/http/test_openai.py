"""The OpenAI endpoints, called by the `openai` package."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from capture.codec import decode_compact
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.http import answers
from rollout.http.openai.protocol import ChatCompletionRequest
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import logprob_of, route_rows
from tests.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, enable_return_routed_experts=True) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    live.scheduler.received.clear()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=10) as made:
        yield made


def tokens(live: Live, text: str) -> list[int]:
    return live.client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_a_completion_has_text_usage_and_version(live: Live, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="hello", max_tokens=2, seed=5)
    choice = reply.choices[0]
    assert (reply.object, reply.model, choice.text, choice.finish_reason) == (
        "text_completion", "tiny", "hellohello", "length",
    )  # fmt: skip
    assert choice.logprobs is None
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (1, 2, 3)
    assert reply.model_extra is not None
    assert reply.model_extra["metadata"]["weight_version"] == "v0"
    params = live.sent(TokenizedGenerateReqInput)[0].sampling_params
    assert (params.max_new_tokens, params.sampling_seed) == (2, 5)


def test_a_completion_without_a_length_has_16_tokens(live: Live, client: openai.OpenAI) -> None:
    """E2: OpenAI, SGLang and vLLM do the same.  A context with less room gives fewer tokens."""
    assert len(client.completions.create(model="tiny", prompt="a").choices[0].text) == 16
    assert len(client.completions.create(model="tiny", prompt="a", max_tokens=None).choices[0].text) == 16
    assert len(client.completions.create(model="tiny", prompt="a" * 150).choices[0].text) == 10
    with pytest.raises(openai.BadRequestError, match="min_new_tokens"):
        client.completions.create(model="tiny", prompt="a", extra_body={"min_tokens": 20})


def test_chats_and_token_requests_without_a_length_fill_the_context(live: Live, client: openai.OpenAI) -> None:
    """E2: the other two endpoints keep the context's limit."""
    reply = client.chat.completions.create(model="tiny", messages=[], extra_body={"input_ids": [5]})
    assert reply.usage is not None and reply.usage.completion_tokens == 159
    reply = live.client.post("/inference/v1/generate", json={"token_ids": [5]}).json()
    assert reply["usage"]["completion_tokens"] == 159


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a", ["aa"]), (["a", "b"], ["aa", "bb"]), ("IDS", ["aa"]), ("LISTS", ["aa", "bb"])],
)
def test_a_prompt_may_be_text_ids_or_a_list(live: Live, client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    forms = {"IDS": tokens(live, "a"), "LISTS": [tokens(live, "a"), tokens(live, "b")]}
    given = forms[prompt] if isinstance(prompt, str) and prompt in forms else prompt
    reply = client.completions.create(model="tiny", prompt=given, max_tokens=2)
    assert [choice.text for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == list(range(len(texts)))


def test_n_counts_the_prompt_once(live: Live, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=2, n=3)
    assert [choice.text for choice in reply.choices] == ["ab"] * 3 + ["cc"] * 3
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 12)


def test_echo_adds_the_prompt_and_its_logprobs(live: Live, client: openai.OpenAI) -> None:
    a, b = tokens(live, "a")[0], tokens(live, "b")[0]
    reply = client.completions.create(model="tiny", prompt="ab", max_tokens=1, echo=True, logprobs=2)
    choice = reply.choices[0]
    assert choice.text == "aba"
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.tokens == ["a", "b", "a"]
    assert logprobs.token_logprobs == [None, logprob_of(b), logprob_of(a)]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] is None
    assert [len(top) for top in logprobs.top_logprobs[1:]] == [2, 2]
    assert logprobs.top_logprobs[2]["a"] == logprob_of(a)


@pytest.mark.parametrize("echo", [False, True])
def test_completion_stream_adds_up_to_the_plain_reply(live: Live, client: openai.OpenAI, echo: bool) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": ["é!", "b"], "max_tokens": 4, "echo": echo, "logprobs": 1}
    plain = client.completions.create(**arguments)
    texts, names, logprobs, finishes, usages = ["", ""], [[], []], [[], []], [None, None], []
    for chunk in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                names[choice.index] += choice.logprobs.tokens
                logprobs[choice.index] += choice.logprobs.token_logprobs
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        if chunk.usage is not None:
            usages.append(chunk.usage)
    assert texts == [choice.text for choice in plain.choices]
    assert names == [choice.logprobs.tokens for choice in plain.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in plain.choices]
    assert finishes == ["length", "length"]
    assert [usage.total_tokens for usage in usages] == [plain.usage.total_tokens]


MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def test_chat_uses_the_template_and_the_whole_context(live: Live, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    sent = live.sent(TokenizedGenerateReqInput)[0]
    shown = live.manager.tokenizer.decode(sent.input_ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert len(sent.input_ids) + sent.sampling_params.max_new_tokens == 160
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content is not None
    assert choice.finish_reason == "length"


def test_chat_stops_at_the_end_token(live: Live, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=30)
    assert reply.choices[0].message.content == "user\nhello"
    assert reply.choices[0].finish_reason == "stop"


def test_a_chat_returns_logprobs_and_bytes_of_its_tokens(live: Live, client: openai.OpenAI) -> None:
    ids = tokens(live, "é")
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=3,
        extra_body={"input_ids": [*ids, 66]},
    )  # fmt: skip
    content = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [logprob_of(t) for t in (*ids, 66)]
    assert [entry.bytes for entry in content[:2]] == [[byte] for byte in "é".encode()]  # half a character each
    assert content[2].bytes == list(content[2].token.encode())
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]


def test_a_streamed_chat_equals_the_whole_one(live: Live, client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, logprobs=True, n=2)
    texts, roles, counts = ["", ""], [None, None], [0, 0]
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, logprobs=True, n=2, stream=True
    ):
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] = choice.delta.role or roles[choice.index]
            counts[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in plain.choices]
    assert roles == ["assistant"] * 2
    assert counts == [len(choice.logprobs.content) for choice in plain.choices]


def test_routes_at_response_level_are_the_first_choice(live: Live, client: openai.OpenAI) -> None:
    body = {"return_routed_experts": True, "input_ids": [1, 2, 3], "routed_experts_format": "compact"}
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, n=2, extra_body=body)
    extension = reply.model_extra["sglext"]
    routed = decode_compact(base64.b64decode(extension["routed_experts"]))
    assert routed.logical_ids_TLK.tobytes() == route_rows(0, 4)
    assert extension["routed_experts_format"] == "compact"
    chunks = list(
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, stream=True, extra_body=body)
    )
    streamed = chunks[-1].model_extra["sglext"]["routed_experts"]
    assert chunks[-1].choices == [] and decode_compact(base64.b64decode(streamed)) == routed


def test_meta_info_on_every_choice(live: Live, client: openai.OpenAI) -> None:
    body = {
        "return_routed_experts": True, "input_ids": [1, 2, 3], "return_meta_info": True, "return_token_ids": True,
    }  # fmt: skip
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, n=2, extra_body=body)
    assert "sglext" not in reply.model_extra
    for choice in reply.choices:
        meta = choice.model_extra["meta_info"]
        assert meta["routed_experts"] and len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 2
        assert choice.model_extra["prompt_token_ids"] == [1, 2, 3]
        assert choice.model_extra["token_ids"] == [1, 2]


def ids_of(names: list[str]) -> list[int]:
    return [int(name.removeprefix("token_id:")) for name in names]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_the_text(live: Live, client: openai.OpenAI, stream: bool, echo: bool) -> None:
    """B1: offsets count characters, whatever the tokens are called, even where a character has several tokens."""
    text = "hello é😀!"
    for prompt in (text, tokens(live, text)):
        arguments: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "logprobs": 1, "echo": echo, "stream": stream}
        answers = [
            client.completions.create(model="tiny", extra_body={"return_tokens_as_token_ids": as_ids}, **arguments)
            for as_ids in (False, True)
        ]
        found = []
        for answer in answers:
            chunks = list(answer) if stream else [answer]
            parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
            found.append([place for part in parts if part.logprobs for place in part.logprobs.text_offset])
            whole = "".join(part.text for part in parts)
        assert found[0] == found[1]
        places = [0, 5, 6, 6, 7, 7, 7, 7, 8]  # hello, space, two bytes, four bytes, !
        assert found[0] == ([*places, *(9 + place for place in places), 18, 23, 24] if echo else [*places, 9, 14, 15])
        assert whole == (text if echo else "") + text + "hello \ufffd"


def test_offsets_of_tokens_that_the_text_does_not_show(live: Live, client: openai.OpenAI) -> None:
    """B1: special tokens that are skipped take no room."""
    ids = [*tokens(live, "a"), 263, *tokens(live, "b")]
    for shown, places in ((False, [0, 1, 1]), (True, [0, 1, 13])):
        body = {"skip_special_tokens": not shown}
        choice = client.completions.create(model="tiny", prompt=ids, max_tokens=3, logprobs=0, extra_body=body).choices[
            0
        ]
        assert choice.logprobs is not None and choice.logprobs.text_offset == places
        assert choice.text == ("a<|im_start|>b" if shown else "ab")


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_put_together_are_the_text(live: Live, client: openai.OpenAI, stream: bool) -> None:
    """B2: a token that is part of a character has its bytes, and so have the other likely tokens."""
    ids = tokens(live, "a😀é")
    body = {"input_ids": ids}
    answer = client.chat.completions.create(
        model="tiny", messages=[], max_tokens=7, logprobs=True, top_logprobs=3, stream=stream, extra_body=body
    )
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "a😀é"
    assert entries[1].token == "\ufffd" and entries[1].bytes == [0xF0]
    assert all(other.bytes for entry in entries for other in entry.top_logprobs)


def test_ids_may_say_that_no_special_tokens_are_added(live: Live, client: openai.OpenAI) -> None:
    """3.3: for a prompt of token ids the field changes nothing; for text it would."""
    body = {"add_special_tokens": False}
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        assert client.completions.create(model="tiny", prompt=prompt, max_tokens=2, extra_body=body).choices
    with pytest.raises(openai.BadRequestError, match="add_special_tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=2, extra_body=body)


def test_the_first_chunk_of_a_completion_tells_its_prompt(live: Live, client: openai.OpenAI) -> None:
    """3.4: the first chunk of each choice holds the ids of the prompt, and no other chunk does."""
    prompts = [[5, 6], [7, 8, 9]]
    body = {"return_token_ids": True}
    found: dict[int, list[Any]] = {}
    for chunk in client.completions.create(
        model="tiny", prompt=prompts, max_tokens=4, stream=True, n=2, extra_body=body
    ):
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append((choice.model_extra or {}).get("prompt_token_ids"))
    assert {index: given[0] for index, given in found.items()} == {
        0: prompts[0], 1: prompts[0], 2: prompts[1], 3: prompts[1],
    }  # fmt: skip
    assert not any(given for rest in found.values() for given in rest[1:])


def test_metadata_holds_nothing_but_text(live: Live, client: openai.OpenAI) -> None:
    """3.1: facts that are not text are in `version_info`."""
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=True))
    for extra in (reply.to_dict(), [chunk.to_dict() for chunk in chunks if chunk.choices][-1]):
        metadata: Any = extra["metadata"]
        facts: Any = extra["version_info"]
        assert metadata["weight_version"] == facts["weight_version"] == "v0"
        assert all(isinstance(value, str) for value in metadata.values())
        assert facts["weight_versions"][0]["version"] == "v0" and "prefill_weight_versions" in facts


def test_a_label_that_is_no_number_does_not_stand_where_one_is_read(live: Live) -> None:
    """3.2: rllm's gateway reads the top-level field as a number."""
    for version, shown in (("v0", None), ("7~20of52", None), ("12", "12")):
        live.scheduler.version = version
        for path, body in (
            ("/v1/completions", {"prompt": [5], "max_tokens": 1}),
            ("/v1/chat/completions", {"input_ids": [5], "max_tokens": 1}),
        ):
            assert live.client.post(path, json=body).json().get("weight_version") == shown
    live.scheduler.version = "v0"


def test_small_facts_in_vllms_words(live: Live) -> None:
    """3.6: vLLM's clients find facts of tokenizer, weights, version and load at vLLM's paths."""

    def get(path: str) -> Any:
        return live.client.get(path).json()

    info = get("/tokenizer_info")
    assert (info["eos_token"], info["pad_token"], info["bos_token"]) == ("<|im_end|>", "<|endoftext|>", None)
    assert "im_start" in info["chat_template"] and (info["vocab_size"], info["model_max_length"]) == (266, 160)
    assert get("/weight_info") == {"weight_version": "v0"}
    assert get("/version").keys() == {"version"} and get("/load") == {"server_load": 0}


def test_tokens_as_token_ids(live: Live, client: openai.OpenAI) -> None:
    """TRL and AReaL read ids out of the names of tokens."""
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = client.completions.create(
        model="tiny", prompt=[5, 6], max_tokens=3, logprobs=1, extra_body=body
    ).choices  # fmt: skip
    assert choice.logprobs.tokens == ["token_id:5", "token_id:6", "token_id:5"]
    assert [ids_of(list(top)) for top in choice.logprobs.top_logprobs] == [[5], [6], [5]]
    assert choice.model_extra["prompt_token_ids"] == [5, 6] and choice.model_extra["token_ids"] == [5, 6, 5]
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=1, extra_body=body
    )
    [entries] = [choice.logprobs.content for choice in reply.choices]
    assert ids_of([entry.token for entry in entries]) == reply.choices[0].model_extra["token_ids"]
    assert entries[0].bytes is None and entries[0].top_logprobs[0].token == entries[0].token


def test_a_chat_tells_its_prompt_at_the_top_too(live: Live, client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    reply = client.chat.completions.create(**arguments, extra_body={"return_token_ids": True})
    prompt = live.sent(TokenizedGenerateReqInput)[0].input_ids
    assert reply.model_extra["prompt_token_ids"] == reply.choices[0].model_extra["prompt_token_ids"] == prompt
    first = next(client.chat.completions.create(**arguments, stream=True, extra_body={"return_token_ids": True}))
    assert first.model_extra["prompt_token_ids"] == prompt
    assert "prompt_token_ids" not in client.chat.completions.create(**arguments).model_extra


def test_prompt_logprobs_have_the_form_of_vllm(live: Live, client: openai.OpenAI) -> None:
    """The token itself comes first, whatever its rank; output log-probabilities come only where asked for."""
    completion = client.completions.create(
        model="tiny", prompt=[[5, 6], [7]], max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    two, one = (choice.model_extra["prompt_logprobs"] for choice in completion.choices)
    assert one == [None] and two[0] is None
    assert two[1] == {
        "6": {"logprob": logprob_of(6), "rank": 1, "decoded_token": None},
        "7": {"logprob": logprob_of(7), "rank": 2, "decoded_token": None},
    }
    assert completion.choices[0].logprobs is None
    chat = client.chat.completions.create(
        model="tiny", messages=[], max_tokens=1, logprobs=True, top_logprobs=3,
        extra_body={"input_ids": [5, 6], "prompt_logprobs": 0},
    )  # fmt: skip
    assert chat.model_extra["prompt_logprobs"][1]["6"]["rank"] == 1
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 3


def test_prompt_logprobs_rank_a_token_outside_the_top() -> None:
    meta = {"input_token_logprobs": [[None, 4, None], [-9.0, 5, "x"]],
            "input_top_logprobs": [None, [[-1.0, 8, "y"], [float("-inf"), 9, "z"]]]}  # fmt: skip
    first, second = answers.prompt_logprobs(meta, 1)
    assert first is None and list(second) == ["5", "8"]
    assert second["5"] == {"logprob": -9.0, "rank": 2, "decoded_token": "x"}
    assert answers.prompt_logprobs(meta, 2)[1]["9"] == {
        "logprob": answers.LOWEST_LOGPROB, "rank": 2, "decoded_token": "z"
    }  # fmt: skip


def test_vllms_request_id_and_the_rank(live: Live, client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt="a", max_tokens=1, extra_body={"request_id": "mine", "data_parallel_rank": 0}
    )
    assert reply.id == "mine"
    with pytest.raises(openai.BadRequestError, match="routed_dp_rank"):
        client.completions.create(model="tiny", prompt="a", extra_body={"data_parallel_rank": 1})


def test_the_head_of_the_answer_can_be_left_out(live: Live, client: openai.OpenAI) -> None:
    def prompt(**extra: Any) -> str:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, extra_body=extra)
        sent = live.sent(TokenizedGenerateReqInput)[-1].input_ids
        return live.manager.tokenizer.decode(sent, skip_special_tokens=False)

    assert prompt().endswith("assistant\n")
    assert prompt(add_generation_prompt=False).endswith("hello")
    assert prompt(continue_final_message=True).endswith("hello")


def test_models_are_listed_and_found_by_name(live: Live, client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert card.id == "tiny" and card.model_extra["max_model_len"] == 160
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only"),
        ({"messages": [{"role": "forbidden", "content": "x"}]}, "no such role"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "n": 0}, "n must be"),
        ({"messages": MESSAGES, "max_tokens": -1}, "max_new_tokens"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": MESSAGES, "extra_body": {"regex": "a", "ebnf": "b"}}, "one grammar"),
        ({"messages": MESSAGES, "extra_body": {"chat_template": "x"}}, "chat_template"),
        ({"messages": MESSAGES, "extra_body": {"structured_outputs": {"x": 1}}}, "structured_outputs"),
        ({"messages": MESSAGES, "extra_body": {"allowed_token_ids": [300]}}, "allowed_token_ids"),
        ({"messages": MESSAGES, "extra_body": {"priority": 3}}, "priority"),
        ({"messages": MESSAGES, "extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"messages": MESSAGES, "stream": True, "extra_body": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        (
            {"messages": MESSAGES, "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats",
        ),
        ({"messages": MESSAGES, "extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template"),
        ({"messages": MESSAGES, "extra_body": {"input_ids": [300]}}, "vocabulary"),
    ],
)
def test_bad_chat_requests_are_refused(
    live: Live, client: openai.OpenAI, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", **arguments)
    assert message in str(caught.value)
    assert live.sent(TokenizedGenerateReqInput) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": "a", "best_of": 3},
        {"prompt": "a", "logprobs": 5000},
        {"prompt": "a", "logprobs": -1},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "extra_body": {"response_format": {"type": "json_schema"}}},
        {"prompt": "a", "extra_body": {"bad_words": [" "]}},
        {"prompt": 5},
    ],
)
def test_bad_completion_requests_are_refused(live: Live, client: openai.OpenAI, arguments: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", **arguments)
    assert live.sent(TokenizedGenerateReqInput) == []


def test_content_parts_of_text_are_joined(live: Live, client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    reply = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    assert reply.choices[0].message.content == "user\nhello"


def test_detokenize_answers_in_both_dialects(live: Live) -> None:
    """SGLang's clients read `text`; vLLM's clients read `prompt`, and would take its absence for an empty text."""
    ids = tokens(live, "hello")
    assert live.client.post("/detokenize", json={"tokens": ids}).json() == {"text": "hello", "prompt": "hello"}
    batch = live.client.post("/v1/detokenize", json={"tokens": [ids, ids]}).json()
    assert batch["text"] == batch["prompt"] == ["hello", "hello"]


def test_special_tokens_are_text_in_vllms_dialect(live: Live) -> None:
    """SGLang skips them by default, vLLM does not; a caller that sets the field gets the text under both names."""
    end = live.client.post("/tokenize", json={"prompt": "<|im_end|>", "add_special_tokens": False}).json()["tokens"]
    ids = [*tokens(live, "hello"), *end]
    assert live.client.post("/detokenize", json={"tokens": ids}).json() == {
        "text": "hello", "prompt": "hello<|im_end|>",
    }  # fmt: skip
    for skips, text in ((True, "hello"), (False, "hello<|im_end|>")):
        reply = live.client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": skips}).json()
        assert reply == {"text": text, "prompt": text}


def test_calls_and_parts_are_tokenized_as_the_chat_has_them(live: Live, client: openai.OpenAI) -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    calls = [{"id": "a", "type": "function", "function": function}]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "so"},
    ]
    live.scheduler.received.clear()
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    ids = live.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert ids == live.sent(TokenizedGenerateReqInput)[0].input_ids


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
def test_an_effort_of_none_does_not_think(effort: str, thinks: bool) -> None:
    body = {"messages": MESSAGES, "reasoning_effort": effort}
    said = ChatCompletionRequest.model_validate(body).template_variables()
    assert said == {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    own = body | {"chat_template_kwargs": {"enable_thinking": not thinks}}
    assert ChatCompletionRequest.model_validate(own).template_variables()["enable_thinking"] is not thinks


def test_a_tokenized_chat_is_the_prompt_of_the_chat(live: Live, client: openai.OpenAI) -> None:
    for extra in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        live.scheduler.received.clear()
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, extra_body=extra)
        ids = live.client.post("/tokenize", json={"messages": MESSAGES} | extra).json()["tokens"]
        assert ids == live.sent(TokenizedGenerateReqInput)[0].input_ids
    assert live.refused("/tokenize", messages=MESSAGES, chat_template="x")[0] == 400
    assert live.refused("/tokenize", messages=MESSAGES, chat_template_kwargs={"tools": []})[0] == 400
