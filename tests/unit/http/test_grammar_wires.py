"""Grammars on every wire: what reaches the scheduler, and what is refused before."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.core.errors import UnsupportedFeature
from rollout.core.grammar import Grammar
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams, sampling_params_from_dict
from rollout.tokenizer_manager.restrictions import Restrictions
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OF_SCHEMA = Grammar("json_schema", TEXT)
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "json_schema", "schema": SCHEMA}
TOKENS = {"token_ids": [5]}
CHAT = {"messages": HI, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}}
MESSAGE = {"max_tokens": 2, "messages": HI}
WIRES = [
    ("/generate", {"text": "a", "sampling_params": {"json_schema": TEXT}}, OF_SCHEMA),
    ("/generate", {"text": "a", "sampling_params": {"regex": "a+b"}}, Grammar("regex", "a+b")),
    ("/generate", {"text": "a", "sampling_params": {"ebnf": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"')),
    ("/inference/v1/generate", TOKENS | {"sampling_params": {"structured_outputs": {"json": TEXT}}}, OF_SCHEMA),
    ("/v1/completions", {"prompt": "a", "response_format": FORMAT}, OF_SCHEMA),
    ("/v1/completions", {"prompt": "a", "guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ("/v1/chat/completions", CHAT | {"response_format": FORMAT}, OF_SCHEMA),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
    ("/v1/responses", {"input": "a", "text": {"format": {"name": "n"} | FLAT}}, OF_SCHEMA),
    ("/v1/messages", MESSAGE | {"output_config": {"format": FLAT}}, OF_SCHEMA),
    ("/v1/messages", MESSAGE | {"output_format": FLAT}, OF_SCHEMA),
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "f"}}
FORCED = [
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": NAMED}),
    (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "function"} | FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
    ),
    (
        "/v1/messages",
        MESSAGE | {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"}},
    ),
]


LOOSE = {"name": "g", "parameters": SCHEMA}
STRICT = [
    (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": each} for each in (FUNCTION | {"strict": True}, LOOSE)]},
    ),
    (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "function", "strict": True} | FUNCTION, {"type": "function"} | LOOSE]},
    ),
    (
        "/v1/messages",
        MESSAGE | {"tools": [{"name": name, "input_schema": SCHEMA, "strict": name == "f"} for name in ("f", "g")]},
    ),
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(write_model_folder(Path(tmp_path_factory.mktemp("model"))), tool_call_parser="hermes") as server:
        yield server


def params_sent(live: Live, path: str, body: dict) -> SamplingParams:
    live.scheduler.received.clear()
    reply = live.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    (sent,) = live.sent(TokenizedGenerateReqInput)
    return sent.sampling_params


def test_each_wire_hands_its_grammar_on(live: Live):
    for path, body, grammar in WIRES:
        assert params_sent(live, path, body).grammar == grammar, (path, body)


def test_a_forced_choice_is_a_grammar_in_the_form_of_the_tool_parser(live: Live):
    for path, body in FORCED:
        grammar = params_sent(live, path, body).grammar
        assert grammar is not None and grammar.kind == "ebnf", path
        assert r"\n{\"name\": \"f\", \"arguments\": " in grammar.text and json.dumps(SCHEMA) in grammar.text, path
        assert (")*" in grammar.text) == (body["tool_choice"] == "required")


def test_a_rendered_chat_asks_for_the_same_grammar(live: Live):
    for path, body, grammar in WIRES:
        if path in ("/v1/chat/completions", "/v1/completions"):
            rendered = live.client.post(f"{path}/render", json=body).json()
            rendered = rendered[0] if isinstance(rendered, list) else rendered
            assert params_sent(live, "/inference/v1/generate", rendered).grammar == grammar


def test_bad_words_and_allowed_ids_reach_the_sampler(live: Live):
    wanted = {"bad_words": ["to", "zq"], "allowed_token_ids": [5, 6]}
    for path, body in (
        ("/generate", {"text": "a", "sampling_params": wanted}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": wanted}),
        ("/v1/completions", {"prompt": "a"} | wanted),
        ("/v1/chat/completions", CHAT | wanted),
        ("/v1/responses", {"input": "a"} | wanted),
        ("/v1/messages", MESSAGE | wanted),
    ):
        params = params_sent(live, path, body)
        plain = [live.client.post("/tokenize", json={"prompt": word}).json()["tokens"] for word in wanted["bad_words"]]
        assert params.bad_word_ids[:2] == plain and params.allowed_token_ids == [5, 6], path


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"regex": "("}, "the grammar (regex) is refused"),
        ({"json_schema": '{"type": "no such type"}'}, "json_schema"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"ebnf": "nonsense ::="}, "ebnf"),
        ({"regex": "a", "ebnf": "b"}, "one grammar"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_before_it_is_sent(live: Live, params: dict, words: str):
    live.scheduler.received.clear()
    status, message = live.refused("/generate", text="a", sampling_params=params)
    assert status == 400 and words in message and "\n" not in message
    assert live.sent(TokenizedGenerateReqInput) == []


@pytest.mark.parametrize(("path", "body"), STRICT)
def test_a_strict_tool_is_a_grammar_under_auto(live: Live, path: str, body: dict):
    for choice in ({}, {"tool_choice": {"type": "auto"} if path == "/v1/messages" else "auto"}):
        grammar = params_sent(live, path, body | choice).grammar
        assert grammar is not None and grammar.kind == "ebnf"
        assert grammar.text.count(json.dumps(SCHEMA)) == 1, "the tool that is not strict is bound, too"
    loose = [dict(tool, strict=False) for tool in body["tools"]]
    if path == "/v1/chat/completions":
        loose = [{"type": "function", "function": LOOSE}]
    assert params_sent(live, path, body | {"tools": loose}).grammar is None
    none = {"type": "none"} if path == "/v1/messages" else "none"
    assert params_sent(live, path, body | {"tool_choice": none}).grammar is None


def ignored(live: Live, path: str, body: dict) -> tuple[list[str] | None, Grammar | None]:
    """Return the fields that the answer names, and the grammar of the request."""
    live.scheduler.received.clear()
    reply = live.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    (sent,) = live.sent(TokenizedGenerateReqInput)
    return reply.json().get("ignored_fields"), sent.sampling_params.grammar


@pytest.mark.parametrize(("path", "body"), STRICT)
def test_a_strict_tool_that_cannot_be_bound_is_named_and_not_refused(
    live: Live, path: str, body: dict, monkeypatch: pytest.MonkeyPatch
):
    """Agents send `strict` of themselves, so a server without the library of grammars still answers them."""
    assert ignored(live, path, body)[0] is None
    none = {"type": "none"} if path == "/v1/messages" else "none"
    monkeypatch.setattr(live.manager.restrictions, "has_grammars", False)
    assert ignored(live, path, body) == (["tools.strict"], None)
    assert ignored(live, path, body | {"typo": 1}) == (["typo", "tools.strict"], None)
    assert ignored(live, path, body | {"tool_choice": none}) == (None, None)


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_server_without_a_parser_of_calls_names_strict_tools_or_refuses_them(tmp_path: Path, is_strict: bool):
    with live_server(write_model_folder(tmp_path / "m"), strict_requests=is_strict) as server:
        for path, body in STRICT:
            if is_strict:
                assert "--tool-call-parser" in server.refused(path, **body)[1]
            else:
                assert ignored(server, path, body) == (["tools.strict"], None)


def test_a_chat_with_a_grammar_of_its_own_names_strict_tools(live: Live):
    path, body = STRICT[0]
    own = {"structured_outputs": {"grammar": 'root ::= "a"'}}
    names, grammar = ignored(live, path, body | own)
    assert names == ["tools.strict"] and grammar == Grammar("ebnf", 'root ::= "a"')
    assert ignored(live, path, body | {"response_format": FORMAT})[0] is None, "its calls are bound, too"


def test_a_stream_names_a_strict_tool_that_is_not_bound(live: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live.manager.restrictions, "has_grammars", False)
    for path, body in STRICT:
        assert '"ignored_fields":["tools.strict"]' in live.client.post(path, json=body | {"stream": True}).text, path


def test_a_grammar_beside_the_sampling_parameters_is_refused(live: Live):
    status, message = live.refused("/generate", text="a", regex="a")
    assert status == 400 and "ask with sampling_params.regex" in message


@pytest.mark.parametrize("fields", [{"regex": "a"}, {"bad_words": ["a"]}])
def test_a_server_without_a_tokenizer_refuses_grammars(live: Live, fields: dict):
    params, _ = sampling_params_from_dict(fields)
    restrictions = Restrictions(live.manager.model_config)
    restrictions.serve(None)
    with pytest.raises(UnsupportedFeature, match="need a tokenizer"):
        asyncio.run(restrictions.complete([TokenizedGenerateReqInput(rid="a", input_ids=[1], sampling_params=params)]))


def test_prompts_that_share_their_parameters_still_do(live: Live):
    params = {"bad_words": ["to"], "max_new_tokens": 2}
    live.scheduler.received.clear()
    assert live.client.post("/generate", json={"text": ["a", "b"], "sampling_params": params}).status_code == 200
    first, second = live.sent(TokenizedGenerateReqInput)
    assert first.sampling_params.bad_word_ids == second.sampling_params.bad_word_ids != []
