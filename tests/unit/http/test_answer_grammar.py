"""Answers that are drawn at random from the grammars of chats, and what the parsers read in them."""

import json

import jsonschema
import pytest

from rollout.core.errors import LockstepError
from rollout.core.grammar import Grammar
from rollout.http.openai.answer_grammar import CallGrammar, Thinking, answer_grammar, forced_tools
from rollout.http.openai.parsers import harmony
from rollout.http.openai.parsers.answer import AnswerParser
from rollout.http.openai.parsers.lark import Lark, regex
from rollout.http.openai.parsers.reasoning import REASONING_FORMATS
from rollout.http.openai.parsers.tool_calls import TOOL_CALL_READERS
from rollout.text.token_vocabulary import TokenVocabulary
from tests.grammar_drawer import Drawer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
MARKERS = sorted({*(mark for each in TOOL_CALL_READERS.values() for mark in each.markers), "<think>", "</think>"})
ENDINGS = ("\n</parameter>\n", *MARKERS, '"', "}", "]")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def drawer(request) -> Drawer:
    special = MARKERS if request.param else harmony.MARKERS  # harmony's always are
    return Drawer({mark: mark in special for mark in MARKERS}, ENDINGS)


def lark_of(drawer: Drawer) -> Lark:
    special = TokenVocabulary(drawer.tokenizer).special_ids
    return Lark(drawer.tokenizer.token_to_id, special.__contains__)


FORMATS = [  # a parser of calls, and the parser of reasoning that goes with it
    ("hermes", "qwen3"),
    ("qwen3_coder", "qwen3"),
    ("glm45", "glm45"),
    ("llama3", None),
    ("deepseekv3", "deepseek-v3"),
    ("deepseekv31", "deepseek-v3"),
    ("kimi_k2", "kimi_k2"),
    ("gpt-oss", "gpt-oss"),
]


def grammar_of(drawer: Drawer, calls: str, thinking: Thinking, text=None, tools=TOOLS) -> Grammar:
    format_ = TOOL_CALL_READERS[calls]
    wanted = CallGrammar(format_, tools, has_many=True) if tools else None
    return answer_grammar(lark_of(drawer), text, wanted, thinking, is_harmony=format_.is_harmony)


def said_in(text: str, calls: str, thinks: str | None, *, in_thought: bool):
    parser = AnswerParser(
        REASONING_FORMATS[thinks] if thinks else None, TOOL_CALL_READERS[calls], TOOLS, in_thought=in_thought
    )
    pieces = [parser.feed(text), parser.finish()]
    found = [call for piece in pieces for call in piece.calls]
    return "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces), found


@pytest.mark.parametrize(("calls", "thinks"), FORMATS)
def test_a_forced_choice_gives_calls_that_parse_and_fit_their_schemas(drawer, calls, thinks):
    for seed in range(3):
        thinking = Thinking(is_open=bool(thinks) and seed == 0, is_possible=bool(thinks) and seed == 1)
        text = drawer.text(grammar_of(drawer, calls, thinking, tools=TOOLS[seed % 2 :]), seed)
        content, _, found = said_in(text, calls, thinks, in_thought=thinking.is_open)
        assert found and not content.strip(), text
        for call in found:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize(("calls", "thinks"), [("hermes", "qwen3"), ("gpt-oss", "gpt-oss")])
def test_an_answer_of_a_form_may_call_instead(drawer, calls, thinks):
    form = Grammar("json_schema", json.dumps(ANSWER))
    kinds = set()
    for seed in range(8):
        text = drawer.text(grammar_of(drawer, calls, Thinking(is_possible=True), form), seed)
        content, _, found = said_in(text, calls, thinks, in_thought=False)
        kinds.add(bool(found))
        if not found:
            jsonschema.validate(json.loads(content), ANSWER)
    assert kinds == {False, True}


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        (Grammar("json_object"), lambda text: isinstance(json.loads(text), dict)),
        (Grammar("regex", "a/b[0-9]{2}"), lambda text: text[:3] == "a/b" and text[3:].isdigit() and len(text) == 5),
        (Grammar("choice", '["yes", "no/\\n"]'), lambda text: text in ("yes", "no/\n")),
    ],
)
def test_a_form_begins_behind_the_thought(drawer, form, fits):
    grammar = answer_grammar(lark_of(drawer), form, None, Thinking(is_open=True), is_harmony=False)
    for seed in range(2):
        thought, _, text = drawer.text(grammar, seed).partition("</think>")
        assert fits(text.lstrip("\n ")) or fits(text), (thought, text)


def test_without_thoughts_and_calls_a_form_stays_as_it_is():
    lark, form = Lark(lambda token: None, lambda index: False), Grammar("ebnf", 'root ::= "a"')
    assert answer_grammar(lark, form, None, Thinking(), is_harmony=False) is form
    assert answer_grammar(lark, None, None, Thinking(is_open=True), is_harmony=False) is None
    with pytest.raises(LockstepError, match="does not go with a thought"):
        answer_grammar(lark, form, None, Thinking(is_open=True), is_harmony=False)


def test_slashes_of_a_regular_expression_are_escaped_once():
    assert regex(r"a/b\/c\\/d") == r"/a\/b\/c\\\/d/"


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, None),
        ("auto", None),
        ("none", None),
        ("required", ["get_weather", "now"]),
        (named("now"), ["now"]),
        ({"type": "function", "name": "now"}, ["now"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("now")]}}, ["now"]),
    ],
)
def test_a_choice_of_tools_forces_a_call_of_these(choice, names):
    forced = forced_tools(choice, TOOLS)
    assert (forced and [tool["function"]["name"] for tool in forced]) == names


@pytest.mark.parametrize(
    ("choice", "tools", "words"),
    [
        ("required", None, "there are no tools"),
        ("any", TOOLS, "tool_choice must be none, auto"),
        (named("x"), TOOLS, "names the tool x"),
        ({"type": "function"}, TOOLS, "the name of a function"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named("now")]}, TOOLS, "mode other than required"),
        ({"type": "allowed_tools", "mode": "required"}, TOOLS, "allowed_tools must have tools"),
    ],
)
def test_a_choice_of_tools_that_cannot_be_made_is_refused(choice, tools, words):
    with pytest.raises(LockstepError, match=words):
        forced_tools(choice, tools)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"name": "a b"}, "has a name of letters"),
        ({"name": "a", "parameters": {"type": "string"}}, "must be a schema of the type object"),
    ],
)
def test_a_tool_that_no_grammar_can_call_is_refused(drawer, tool, words):
    with pytest.raises(LockstepError, match=words):
        grammar_of(drawer, "hermes", Thinking(), tools=[{"type": "function", "function": tool}])
