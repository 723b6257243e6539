"""Parsers of answers: what each format reads, that pieces do not matter, that nothing is lost."""

from __future__ import annotations

import json
import random
import time

import pytest

from rollout.http.openai.parsers.answer import AnswerParser, Piece
from rollout.http.openai.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from rollout.http.openai.parsers.tagged_calls import Tools
from rollout.http.openai.parsers.tool_calls import TOOL_CALL_READERS

WEATHER_PARAMETERS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "fine": {"type": "boolean"},
    "where": {"type": "object"},
    "code": {"type": ["string", "integer"]},
    "any": {},
}
TOOLS: Tools = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": WEATHER_PARAMETERS}}},
    {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"x": {"type": 5, "anyOf": 3}}}}},
]


def parse(
    pieces: list[str], *, tools: str | None = None, reasoning: str | None = None, in_thought: bool = False
) -> tuple[str, str, list[tuple[str, dict]]]:
    """Parse an answer that comes in `pieces`, and return its reasoning, content and calls."""
    parser = AnswerParser(
        REASONING_FORMATS[reasoning] if reasoning else None,
        TOOL_CALL_READERS[tools] if tools else None,
        TOOLS,
        in_thought=in_thought,
    )
    found = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    calls = [(call.name, json.loads(call.arguments)) for piece in found for call in piece.calls]
    return "".join(piece.reasoning for piece in found), "".join(piece.content for piece in found), calls


def random_pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


HERMES = 'Look:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
CODER = (
    "Look:\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM45 = (
    "Look:\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
GLM47 = GLM45.replace("\n<arg", "<arg").replace("\n</tool_call>", "</tool_call>")
LLAMA = 'Look:\n<|python_tag|>{"name": "weather", "parameters": {"city": "Köln", "days": 2}}'
DEEPSEEK = (
    "Look:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Köln", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK31 = (
    "Look:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Köln", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
KIMI = (
    "Look:\n<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
)
EXAMPLES = {
    **dict.fromkeys(("hermes", "qwen25", "qwen"), HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), CODER),
    **dict.fromkeys(("glm45", "glm"), GLM45),
    "glm47": GLM47,
    **dict.fromkeys(("llama3", "llama3_json"), LLAMA),
    **dict.fromkeys(("deepseekv3", "deepseek_v3"), DEEPSEEK),
    **dict.fromkeys(("deepseekv31", "deepseek_v31"), DEEPSEEK31),
    "kimi_k2": KIMI,
}
HARMONY = {"gpt-oss", "openai"}
MARKED = sorted(REASONING_FORMATS.keys() - {"gpt-oss", "openai_gptoss"})


def test_every_reader_has_an_example() -> None:
    assert EXAMPLES.keys() | HARMONY == TOOL_CALL_READERS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_call_is_read(name: str) -> None:
    text = EXAMPLES[name]
    call = ("weather", {"city": "Köln", "days": 2})
    assert parse([text], tools=name) == ("", "Look:", [call])
    assert parse([text + "\n" + text[5:] + "\n"], tools=name) == ("", "Look:", [call, call])
    assert parse([text + "\nDone. "], tools=name) == ("", "Look:\nDone. ", [call])


@pytest.mark.parametrize("reasoning", [None, *MARKED])
@pytest.mark.parametrize("name", EXAMPLES)
def test_pieces_do_not_matter(name: str, reasoning: str | None) -> None:
    rng = random.Random(name)
    texts = [
        "<think>\nA thought, 2 < 3 </thin k>\n</think>\n\n" + EXAMPLES[name],
        "\n<think>cut " + EXAMPLES[name],
        " no thought <tool_call> not one </tool_call> \n\n" + EXAMPLES[name] + "  \n",
        EXAMPLES[name] + "\n and more" + EXAMPLES[name][:-4],
        "",
        "<thin",
    ]
    for text in texts:
        for in_thought in (False, True):
            whole = parse([text], tools=name, reasoning=reasoning, in_thought=in_thought)
            assert whole == parse(list(text), tools=name, reasoning=reasoning, in_thought=in_thought)
            for _ in range(10):
                pieces = random_pieces(text, rng)
                assert whole == parse(pieces, tools=name, reasoning=reasoning, in_thought=in_thought), pieces


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_no_call_stays_as_it_was_written(name: str) -> None:
    texts = [
        EXAMPLES[name]
        .removesuffix("<｜tool▁calls▁end｜>")
        .removesuffix("<|tool_calls_section_end|>")[:-3],  # not finished
        "a <tool_call> b </tool_call> c ",
        'x <tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>weather <arg_key>city</arg_value></tool_call>",
        "spaces \n\n",
        "<｜tool▁calls▁begin｜>",
        "a<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>",
        '<|python_tag|>print("x")',
        '{"name": "Bob", "age": 5}',
        '{"name": "Bob", "parameters": [1]} and more',
        'then {"name": "Bob", "parameters": {}}',
        "{",
    ]
    for text in texts:
        if text.startswith("x ") and name.startswith("glm"):
            continue  # in that format all text that is not a tag is a name
        reasoning, content, calls = parse(list(text), tools=name)
        if not (name.startswith("glm") and calls):
            assert (reasoning, content, calls) == ("", text, []), text


def test_without_a_reader_calls_are_content() -> None:
    assert parse([HERMES]) == ("", HERMES, [])


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("days", "5", 5),
        ("days", "five", "five"),
        ("limit", "5", 5),
        ("limit", "2.5", 2.5),
        ("limit", "null", None),
        ("fine", "True", True),
        ("fine", "false", False),
        ("where", '{"a": [1, "x"]}', {"a": [1, "x"]}),
        ("where", "{'a': 1}", "{'a': 1}"),
        ("where", "NaN", "NaN"),
        ("code", "7", 7),
        ("code", '{"a": 1}', '{"a": 1}'),
        ("any", "7", 7),
        ("any", "seven", "seven"),
    ],
)
def test_values_take_the_type_that_the_schema_says(parameter: str, text: str, value: object) -> None:
    coder = f"<tool_call><function=weather><parameter={parameter}>\n{text}\n</parameter></function></tool_call>"
    glm = f"<tool_call>weather<arg_key>{parameter}</arg_key><arg_value>{text}</arg_value></tool_call>"
    for name, answer in (("qwen3_coder", coder), ("glm47", glm)):
        ((_, arguments),) = parse([answer], tools=name)[2]
        assert arguments == {parameter: value} and type(arguments[parameter]) is type(value)


def test_values_keep_their_lines() -> None:
    program = "def f():\n    return 1\n"
    text = f"<tool_call>\n<function=run>\n<parameter=code>\n{program}\n</parameter>\n</function>\n</tool_call>"
    assert parse([text], tools="qwen3_coder")[2] == [("run", {"code": program})]


def test_calls_with_unknown_names_or_missing_tags_are_read() -> None:
    unknown = "<tool_call>{}</tool_call>"
    coder = unknown.format("<function=weather><parameter=unknown>7</parameter></function>")
    assert parse([coder], tools="qwen3_coder")[2] == [("weather", {"unknown": "7"})]
    for value, read in (("7", 7), ("seven", "seven")):
        glm = unknown.format(f"weather<arg_key>unknown</arg_key><arg_value>{value}</arg_value>")
        assert parse([glm], tools="glm47")[2] == [("weather", {"unknown": read})]
    two = "<tool_call><function=a></function><function=b><parameter=x>1</tool_call>"
    assert parse([two], tools="qwen3_coder")[2] == [("a", {}), ("b", {"x": "1"})]
    assert parse(["<tool_call>now</tool_call>"], tools="glm47")[2] == [("now", {})]
    odd = "<tool_call><function=odd><parameter=x>1</parameter></function></tool_call>"
    assert parse([odd], tools="qwen3_coder")[2] == [("odd", {"x": 1})]


def test_reasoning_is_kept_to_the_letter() -> None:
    text = "<think>\n a \n</think>\n\nThe answer "
    for name in MARKED:
        assert parse([text], reasoning=name) == ("\n a \n", "\n\nThe answer ", [])
    assert parse(["The answer <think>"], reasoning="qwen3") == ("", "The answer <think>", [])
    assert parse(["a </think>b"], reasoning="glm45", in_thought=True) == ("a ", "b", [])
    assert parse(["<think>not done"], reasoning="qwen3") == ("not done", "", [])
    assert parse(["a </thi"], reasoning="qwen3", in_thought=True) == ("a </thi", "", [])


def test_a_call_ends_a_thought_where_models_do_that() -> None:
    text = "<think>I ask." + HERMES[5:]
    call = ("weather", {"city": "Köln", "days": 2})
    assert parse([text], tools="hermes", reasoning="qwen3") == ("I ask.\n", "", [call])
    assert parse([text], tools="hermes", reasoning="deepseek-r1") == (text[7:], "", [])
    assert parse([text], reasoning="qwen3") == (text[7:], "", [])


def test_a_call_that_a_thought_only_speaks_of_is_part_of_it() -> None:
    call = ("weather", {"city": "Köln", "days": 2})
    for thought in (
        "\nI will use the <tool_call> tag now.\n",
        "within `<tool_call></tool_call>` XML tags.\n",
        "<tool_call><tool_call> and </tool_call> again, <tool_call>",
    ):
        text = f"<think>{thought}</think>" + HERMES[5:]
        for pieces in ([text], list(text)):
            assert parse(pieces, tools="hermes", reasoning="qwen3") == (thought, "", [call])
        cut = f"<think>{thought}"
        assert parse(list(cut), tools="hermes", reasoning="qwen3") == (thought, "", [])
    text = "<think>as in <tool_call> or not" + HERMES[5:]
    assert parse([text], tools="hermes", reasoning="qwen3") == ("as in <tool_call> or not\n", "", [call])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "f" + "<arg_key>a</arg_key><arg_value>" * 20_000),
        ("glm45", "f" + "<arg_key>a</arg_key>" * 20_000),
        ("qwen3_coder", "<function=" * 40_000),
        ("qwen3_coder", "<function=f>" + "<parameter=" * 40_000),
        ("hermes", "</tool_call>" + "<tool_call></tool_call>" * 15_000),
        ("hermes", "<think>" + "<tool_call></tool_call>" * 15_000),
        ("hermes", "<think>" + "<tool_call>" * 30_000),
        ("hermes", '<tool_call>{"a":"' * 10_000),
        ("hermes", '<think><tool_call>{",":"' * 10_000),
        ("hermes", '<tool_call>{"a":["</tool_call>' * 10_000),
        ("qwen3_coder", "<tool_call><function=f><parameter=k></tool_call>x" * 4_000),
        ("qwen3_coder", "<think>" + "<tool_call><function=f><parameter=k>" * 4_000),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>" * 4_000),
        ("llama3", '{"name":"f","parameters":{}};' * 5_000),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a":"' * 2_000),
    ],
)
def test_text_that_loops_is_read_in_linear_time(name: str, text: str) -> None:
    """The whole text takes about 8 times as long as an eighth; a quadratic parser takes 64 times, and minutes."""
    seconds = []
    for part in (text[: len(text) // 8], text):
        started = time.process_time()
        parse([f"<think></think><tool_call>{part}</tool_call>", part], tools=name, reasoning="qwen3")
        seconds.append(time.process_time() - started)
    assert seconds[1] < 24 * seconds[0] + 0.5


@pytest.mark.parametrize(
    ("name", "tail", "begun", "thinks"),
    [
        ("qwen3", "<|im_start|>assistant\n", "", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", True),
        ("qwen3", "<think>\n\n</think>\n\n", "", False),
        ("qwen3", "what is <think>?<|im_end|>\n<|im_start|>assistant\n", "", False),
        ("deepseek-r1", "<Assistant>", "", True),
        ("deepseek-r1", "<Assistant></think>", "", False),
        ("deepseek-r1", "so far", "<think>a</think> so far", False),
        ("glm45", "and then", "<think>a and then", True),
        ("glm45", "words", "some words", False),
    ],
)
def test_where_an_answer_begins(name: str, tail: str, begun: str, thinks: bool) -> None:
    assert REASONING_FORMATS[name].begins_in_thought(tail, begun) is thinks


# --- where a call ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hermes", "qwen", "qwen25"])
def test_json_ends_where_its_object_ends(name: str) -> None:
    """B3: a closing tag within a string is part of the string, and a second call survives."""
    first = '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "x</tool_call>y"}}\n</tool_call>'
    second = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    calls = [("write_file", {"path": "a", "content": "x</tool_call>y"}), ("run", {})]
    for pieces in ([first + second], list(first + "\n" + second)):
        assert parse(pieces, tools=name) == ("", "", calls)
        assert parse(["<think>now ", *pieces], tools=name, reasoning="qwen3") == ("now ", "", calls[:1] + calls[1:])


def test_a_string_may_hold_the_end_of_a_thought() -> None:
    """B3: this holds in a call that ends a thought, too."""
    text = '<think>now <tool_call>{"name": "say", "arguments": {"x": "</think><tool_call>"}}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(pieces, tools="hermes", reasoning="qwen3") == ("now ", "", [("say", {"x": "</think><tool_call>"})])


def test_a_call_after_a_malformed_one_is_read() -> None:
    good = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    for bad in (
        '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "open}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "line\n"}}</tool_call>',
        "the tag <tool_call> is",
    ):
        for pieces in ([bad + good], list(bad + good)):
            assert parse(pieces, tools="hermes") == ("", bad, [("run", {})])


def test_words_in_a_malformed_call_are_no_call() -> None:
    inner = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    text = f'<tool_call>{{"name": "say", "arguments": {{"x": "{inner}"}}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(pieces, tools="hermes") == ("", text, [])


@pytest.mark.parametrize(
    "inside", ["x</tool_call>y", "</function>x", "</parameter> is a tag", "a <parameter=b> c", "<tool_call>"]
)
def test_tags_within_a_value_are_part_of_it(inside: str) -> None:
    """B3: this holds in formats without quotes, too."""
    coder = CODER.replace("Köln", inside) + CODER[6:]
    call = ("weather", {"city": inside, "days": 2})
    assert parse([coder], tools="qwen3_coder")[2] == [call, ("weather", {"city": "Köln", "days": 2})]
    glm = GLM45.replace("Köln", inside)
    assert parse([glm], tools="glm45")[2] == [call]


def test_a_whole_call_within_a_value_is_part_of_it() -> None:
    for name, example, nested in (("qwen3_coder", CODER, CODER[6:]), ("glm45", GLM45, GLM45[6:])):
        text = example.replace("Köln", f"as in\n{nested}\nor {nested}!")
        ((_, arguments),) = parse(list(text), tools=name)[2]
        assert arguments == {"city": f"as in\n{nested}\nor {nested}!", "days": 2}
        deep = "x"
        for _ in range(30):
            deep = example.replace("Köln", deep)
        assert parse([deep], tools=name)[2] == [] and parse([deep * 2], tools=name) == parse(list(deep * 2), tools=name)


def test_arguments_keep_what_the_model_wrote() -> None:
    given = '{"big": 123456789012345678901234567890, "small": 1.0e-400, "pair": "\\ud83d\\ude00", "half": "\\ud83d"}'
    parser = AnswerParser(None, TOOL_CALL_READERS["hermes"])
    (call,) = parser.feed(f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>').calls
    assert call.arguments == given
    text = (
        "<tool_call><function=weather><parameter=limit>\n12345678901234567890123\n</parameter></function></tool_call>"
    )
    (call,) = AnswerParser(None, TOOL_CALL_READERS["qwen3_coder"], TOOLS).feed(text).calls
    assert call.arguments == '{"limit": 12345678901234567890123}'


def test_schemas_that_refer_and_list() -> None:
    properties = {
        "r": {"$ref": "#/$defs/count"},
        "e": {"enum": [1, 2]},
        "a": {"allOf": [{"type": "integer"}]},
        "c": {"const": "1"},
    }
    parameters = {"properties": properties, "$defs": {"count": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    values = "".join(f"<parameter={key}>1</parameter>" for key in properties)
    parser = AnswerParser(None, TOOL_CALL_READERS["qwen3_coder"], tools)
    (call,) = parser.feed(f"<tool_call><function=f>{values}</function></tool_call>").calls
    assert json.loads(call.arguments) == {"r": 1, "e": 1, "a": 1, "c": "1"}


def test_a_schema_that_refers_to_itself_is_read_once() -> None:
    again = {"$ref": "#/$defs/x"}
    parameters = {"properties": {"k": again}, "$defs": {"x": {"anyOf": [again] * 50 + [{"type": "integer"}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call><function=f><parameter=k>7</parameter></function></tool_call>"
    (call,) = AnswerParser(None, TOOL_CALL_READERS["qwen3_coder"], tools).feed(text).calls
    assert json.loads(call.arguments) == {"k": 7}


# --- formats with special tokens -----------------------------------------------------------------------------------


def test_kimis_ids_are_kept() -> None:
    """N27: the call has the id that the model gives."""
    (call,) = AnswerParser(None, TOOL_CALL_READERS["kimi_k2"]).feed(KIMI).calls
    assert (call.id, call.name) == ("functions.weather:0", "weather")
    dotted = KIMI.replace("functions.weather:0", "functions.ns.weather:12")
    (call,) = AnswerParser(None, TOOL_CALL_READERS["kimi_k2"]).feed(dotted).calls
    assert (call.id, call.name) == ("functions.ns.weather:12", "ns.weather")


def test_kimi_thinks_into_a_call() -> None:
    text = "<think>now " + KIMI[6:]
    assert parse([text], tools="kimi_k2", reasoning="kimi_k2") == (
        "now ",
        "",
        [("weather", {"city": "Köln", "days": 2})],
    )


def test_llama_calls_without_a_mark() -> None:
    """N27: an answer begins with JSON objects, which semicolons separate."""
    one = '{"name": "weather", "parameters": {"city": "a;b"}}'
    call = ("weather", {"city": "a;b"})
    for pieces in ([one], list(one), [f" {one}"]):
        assert parse(pieces, tools="llama3") == ("", "", [call])
    for several in (f"{one}; {one}", f"<|python_tag|>{one};{one}", f"{one}\n{one}"):
        assert parse(list(several), tools="llama3") == ("", "", [call, call])
    assert parse([f"{one}; and more"], tools="llama3") == ("", "; and more", [call])
    assert parse([one * 3000], tools="llama3")[2] == [call] * 3000


HARMONY_CALL = (
    "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "<|call|>"}'
)


@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_a_harmony_call_is_read_with_and_without_its_end(end: str) -> None:
    """N27: the token that ends the turn is part of the text only where stops are kept."""
    for pieces in ([HARMONY_CALL + end], list(HARMONY_CALL + end)):
        assert parse(pieces, tools="gpt-oss", reasoning="gpt-oss") == (
            "I ask.",
            "",
            [("weather", {"city": "<|call|>"})],
        )


@pytest.mark.parametrize(
    "head",
    [
        " to=functions.weather<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>",
        "<|channel|>commentary to=weather <|message|>",
        "<|channel|>analysis to=functions.weather code<|message|>",
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
def test_headers_of_harmony_calls(head: str) -> None:
    for pieces in ([head + "{}"], list(head + "{}")):
        assert parse(pieces, tools="gpt-oss", reasoning="gpt-oss") == ("", "", [("weather", {})])


def test_harmony_channels_become_reasoning_and_content() -> None:
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is < 3.<|return|>"
    )
    assert parse(list(text), tools="gpt-oss", reasoning="gpt-oss") == ("a\nb", "I look.\nIt is < 3.", [])
    begun = "b<|end|><|start|>assistant<|channel|>final<|message|>c"
    assert parse([begun], reasoning="gpt-oss", in_thought=True) == ("b", "c", [])
    assert parse(["no header"], reasoning="gpt-oss", tools="gpt-oss") == ("", "no header", [])
    cut = "<|channel|>final<|message|>yes<|end|><|start|>assist"
    assert parse(list(cut), reasoning="gpt-oss") == ("", "yes", [])
    long = "<|channel|>" + "x" * 2000 + "<|message|>y"
    assert parse([long], reasoning="gpt-oss") == parse(list(long), reasoning="gpt-oss")


def test_harmony_markup_stays_where_nobody_asked_to_read_it() -> None:
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>"
    other = "<|channel|>commentary to=browser.search<|message|>{}<|call|>"
    thought = "<|channel|>analysis<|message|>a<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>b"
    assert parse([call], reasoning="gpt-oss") == ("", call, [])
    assert parse([other], reasoning="gpt-oss", tools="gpt-oss") == ("", other, [])
    assert parse([thought + final], tools="gpt-oss") == ("", thought + "b", [])


@pytest.mark.parametrize(
    ("tail", "thinks"),
    [
        ("<|start|>assistant", False),
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|start|>assistant<|channel|>analysis<|message|>so far", True),
        ("<|start|>assistant<|channel|>final<|message|>so far", False),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant", False),
        ("no marker", False),
    ],
)
def test_where_a_harmony_answer_begins(tail: str, thinks: bool) -> None:
    assert REASONING_FORMATS["gpt-oss"].begins_in_thought(tail, "") is thinks


def test_names_that_mean_the_same() -> None:
    assert REASONING_FORMATS["deepseek_r1"] is REASONING_FORMATS["deepseek-r1"]
    assert ReasoningFormat().begins_in_thought("", "") is False
    assert AnswerParser().feed("text") == Piece(content="text")
