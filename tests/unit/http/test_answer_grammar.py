"""Answers that are drawn at random from the grammars of chats, and what the parsers read in them."""

import json

import jsonschema
import pytest

from rollout.core.errors import LockstepError
from rollout.core.grammar import Grammar
from rollout.http.openai.answer_grammar import CallGrammar, Thinking, answer_grammar, forced_tools, strict_tools
from rollout.http.openai.parsers import harmony
from rollout.http.openai.parsers.answer import AnswerParser
from rollout.http.openai.parsers.lark import Lark, json_value, regex
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


NO_THOUGHT = Thinking()
GOOD = {"city": "Bern", "days": 2}
FAULTS = {"days": 0}, {"city": "Bern"}, {"city": "Bern", "days": 2, "more": 1}, {"city": 7, "days": 2}


def written(calls: str, arguments: dict, name: str = "get_weather") -> str:
    """Return a call as the models of a format write it, from the marker on that begins it."""
    text, tags = json.dumps(arguments), TOOL_CALL_READERS[calls]
    pairs = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()]
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
        + "</function>\n</tool_call>",
        "glm45": f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
        + "</tool_call>",
        "llama3": f'<|python_tag|>{{"name": "{name}", "parameters": {text}}}',
        "deepseekv3": f"{tags.before}{tags.opener}function<｜tool▁sep｜>{name}\n```json\n{text}\n```{tags.closer}"
        + tags.after,
        "deepseekv31": f"{tags.before}{tags.opener}{name}<｜tool▁sep｜>{text}{tags.closer}{tags.after}",
        "kimi_k2": f"{tags.before}{tags.opener}functions.{name}:0<|tool_call_argument_begin|>{text}{tags.closer}"
        + tags.after,
        "gpt-oss": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}",
    }[calls]


BEGUN = {
    "hermes": len("<tool_call>"),
    "qwen3_coder": len("<tool_call>"),
    "glm45": len("<tool_call>"),
    "llama3": len("<|python_tag|>"),
    "deepseekv3": len("<｜tool▁calls▁begin｜>"),
    "deepseekv31": len("<｜tool▁calls▁begin｜>"),
    "kimi_k2": len("<|tool_calls_section_begin|>"),
    "gpt-oss": len("<|channel|>commentary to="),
}
"""Letters of an answer after which a call has begun."""


def free_grammar(drawer: Drawer, calls: str, thinking=NO_THOUGHT, strict=("get_weather", "now"), has_many=True):
    format_ = TOOL_CALL_READERS[calls]
    wanted = CallGrammar(format_, strict_tools(TOOLS, strict, format_), has_many, is_free=True)
    return answer_grammar(lark_of(drawer), None, wanted, thinking, is_harmony=format_.is_harmony)


def in_text(calls: str, before: str, call: str) -> str:
    """Return an answer that has a text before a call."""
    if calls != "gpt-oss":
        return before + call
    return f"<|channel|>analysis<|message|>{before}<|end|><|start|>assistant{call}"


@pytest.mark.parametrize(("calls", "thinks"), FORMATS)
def test_a_strict_tool_binds_a_call_and_not_the_text_around_it(drawer, calls, thinks):
    grammar = free_grammar(drawer, calls)
    for before in ("", "I look {it} up: <b> "):
        assert drawer.accepts(grammar, answer := in_text(calls, before, written(calls, GOOD))), answer
        for fault in FAULTS:
            if calls not in ("qwen3_coder", "glm45") or fault.get("city") != 7:  # a text there, whatever is written
                assert not drawer.accepts(grammar, answer := in_text(calls, before, written(calls, fault))), answer
        assert not drawer.accepts(grammar, in_text(calls, before, written(calls, GOOD, "unknown")))
    plain = "Nothing to look up { here }." if calls != "gpt-oss" else "<|channel|>final<|message|>Nothing."
    assert drawer.accepts(grammar, plain)


@pytest.mark.parametrize(("calls", "thinks"), FORMATS)
def test_texts_with_strict_tools_have_no_call_that_breaks_its_schema(drawer, calls, thinks):
    grammar = free_grammar(drawer, calls)
    for seed in range(3):
        text = drawer.text(grammar, seed, begin=in_text(calls, "I look.", written(calls, {}, "")[: BEGUN[calls]]))
        found = said_in(text, calls, thinks, in_thought=False)[2]
        assert found, text
        for call in found:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize(("calls", "thinks"), FORMATS)
def test_a_tool_that_is_not_strict_takes_any_arguments(drawer, calls, thinks):
    grammar = free_grammar(drawer, calls, strict=("now",))
    assert drawer.accepts(grammar, written(calls, {"city": "x", "days": "many"}))
    assert not drawer.accepts(grammar, written(calls, {"city": "x"}, "now"))


def test_several_calls_stand_in_one_text_unless_one_is_allowed(drawer):
    for calls, between in [("hermes", "\nAnd "), ("llama3", "; "), ("kimi_k2", " and ")]:
        call = written(calls, GOOD)
        again = call.removeprefix("<|python_tag|>") if calls == "llama3" else call
        assert drawer.accepts(free_grammar(drawer, calls), call + between + again), calls
        assert not drawer.accepts(free_grammar(drawer, calls, has_many=False), call + between + again), calls


def test_an_object_of_llama_is_a_call_by_its_place(drawer):
    grammar = free_grammar(drawer, "llama3")
    bare = written("llama3", GOOD).removeprefix("<|python_tag|>")
    assert drawer.accepts(grammar, bare) and drawer.accepts(grammar, f"Bare: {bare}")
    for answer in ('{"name": "get_weather", "parameters": {}}', ' {"a": 1}', f'{bare}; {{"name": "x"}}'):
        assert not drawer.accepts(grammar, answer), answer


def test_what_explains_a_schema_is_no_part_of_a_grammar(drawer):
    """An agent with forty described tools would be over the limit of a grammar."""
    names = {"title": {"enum": [{"title": "a"}]}, "description": {"type": "string", "description": "why"}}
    noted = {"title": "T", "description": "x" * 3000, "properties": names, "required": ["title"], "default": {}}
    bare = {"properties": names | {"description": {"type": "string"}}, "required": ["title"]}
    assert json_value({"anyOf": [noted]}) == json_value({"anyOf": [bare]}) == f"%json {json.dumps({'anyOf': [bare]})}"
    tools = [
        {"type": "function", "function": {"name": f"tool_{index}", "parameters": WEATHER | {"description": "x" * 3000}}}
        for index in range(40)
    ]
    for calls in TOOL_CALL_READERS:
        format_ = TOOL_CALL_READERS[calls]
        wanted = CallGrammar(format_, tools, has_many=True, is_free=True)
        answer_grammar(lark_of(drawer), None, wanted, NO_THOUGHT, is_harmony=format_.is_harmony).validate()


def test_a_schema_of_any_depth_is_written():
    deep = {"description": "x"}
    for _ in range(200):
        deep = {"items": deep, "title": "t"}
    assert json_value(deep).count('"title"') == 135


def test_a_marker_that_is_a_token_cannot_be_spelled_in_letters():
    """Parsers read text, so that letters would begin a call whose arguments nothing binds."""
    drawer = Drawer(dict.fromkeys(MARKERS, True), ENDINGS)
    matcher = drawer._compiler.matcher(free_grammar(drawer, "hermes"))
    letters = [drawer.tokenizer.encode(letter).ids[0] for letter in "a <tool_call>"]
    assert all(map(matcher.advance, letters[:-1])) and not matcher.advance(letters[-1])


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
