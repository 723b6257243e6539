"""Parsers of answers: what each format reads, that pieces do not matter, that nothing is lost."""

from __future__ import annotations

import json
import random
import time

import pytest

from rollout.entrypoints.parsers.answer import AnswerParser, Piece
from rollout.entrypoints.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from rollout.entrypoints.parsers.tool_calls import TOOL_CALL_READERS, Tools

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
    """Reasoning, content and calls of an answer that comes in `pieces`."""
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
EXAMPLES = {"hermes": HERMES, "qwen25": HERMES, "qwen": HERMES, "qwen3_coder": CODER, "glm45": GLM45, "glm47": GLM47}


def test_every_reader_has_an_example() -> None:
    assert EXAMPLES.keys() == TOOL_CALL_READERS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_call_is_read(name: str) -> None:
    text = EXAMPLES[name]
    call = ("weather", {"city": "Köln", "days": 2})
    assert parse([text], tools=name) == ("", "Look:", [call])
    assert parse([text + "\n" + text[5:] + "\n"], tools=name) == ("", "Look:", [call, call])
    assert parse([text + "\nDone. "], tools=name) == ("", "Look:\nDone. ", [call])


@pytest.mark.parametrize("reasoning", [None, *REASONING_FORMATS])
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
        EXAMPLES[name][:-3],  # not finished
        "a <tool_call> b </tool_call> c ",
        'x <tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>weather <arg_key>city</arg_value></tool_call>",
        "spaces \n\n",
    ]
    for text in texts:
        if text.startswith("x ") and name.startswith("glm"):
            continue  # there, all that is not a tag is a name
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


def test_odd_calls() -> None:
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
    for name in REASONING_FORMATS:
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
    ],
)
def test_text_that_loops_is_read_in_linear_time(name: str, text: str) -> None:
    """Half the text takes about half the time: what grows with the square takes a quarter, and minutes as a whole."""
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


def test_names_that_mean_the_same() -> None:
    assert REASONING_FORMATS["deepseek_r1"] is REASONING_FORMATS["deepseek-r1"]
    assert ReasoningFormat().begins_in_thought("", "") is False
    assert AnswerParser().feed("text") == Piece(content="text")
