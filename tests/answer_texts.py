"""Answers as models write them, in every format, with what a client should get of them.

Strings hold whatever may mislead a reader: the markers of all formats, quotes, escapes, characters of many kinds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MARKERS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=k>"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", "<|eom_id|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    *("<|call|>", "<|return|>", "```json\n", "```", "```\n"),
]
SCRAPS = [
    *('"', '\\"', "\\", "\\\\", "{", "}", "[", "]", "}}", ":", ",", ";", "\n", " ", "\t", "<", ">", "</", "|", "<|"),
    *("Köln", "東京", "😀", "é", "\u2028", "\x00", "\x1f", "\x7f", "\ud7ff", "null", "true", "-0.5e+3", "word", "to="),
    *('{"name": "f", "arguments": {}}', '{"name": "g", "parameters": {"a": 1}}', "functions.f:0", "assistant", "final"),
]
NAMES = ["f", "get_weather", "ns.tool-1", "schreib_é"]
PARAMETERS = {"s": {"type": "string"}, "n": {"type": "number"}, "b": {"type": "boolean"}, "o": {}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"properties": PARAMETERS}}} for name in NAMES]


@dataclass
class Answer:
    """A text, and the reasoning, content and calls in it."""

    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def words(rng: random.Random, *, without: tuple[str, ...] = (), most: int = 6) -> str:
    """Return some text of markers and scraps that holds none of `without`."""
    parts = [rng.choice(MARKERS if rng.random() < 0.4 else SCRAPS) for _ in range(rng.randint(0, most))]
    text = "".join(parts)
    for part in without:
        text = text.replace(part, "_")
    return text


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 3:
        return words(rng)
    if kind < 6:
        return rng.choice([0, -1, 2.5, 10**25, True, False, None])
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return arguments(rng, depth + 1)


def arguments(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {words(rng, most=2) + str(index): value(rng, depth) for index in range(rng.randint(0, 3))}


def json_text(rng: random.Random, content: Any) -> str:
    return json.dumps(content, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))


def space(rng: random.Random) -> str:
    return rng.choice(["", "", "\n", " ", "\n\n", "\t"])


# --- one call --------------------------------------------------------------------------------------------------------

Call = tuple[str, str, Any]  # as it is written, name, arguments


def hermes_call(rng: random.Random) -> Call:
    name, given = rng.choice(NAMES), arguments(rng)
    fields = [("name", name), (rng.choice(["arguments", "parameters"]), given)]
    rng.shuffle(fields)
    inner = json_text(rng, dict(fields))
    return f"<tool_call>{space(rng)}{inner}{space(rng)}</tool_call>", name, given


def llama_call(rng: random.Random) -> Call:
    name, given = rng.choice(NAMES), arguments(rng)
    return json_text(rng, {"name": name, "parameters": given}), name, given


def deepseek_call(rng: random.Random) -> Call:
    name, given = rng.choice(NAMES), arguments(rng)
    inner = json_text(rng, given)
    if rng.random() < 0.5:
        body = f"function<｜tool▁sep｜>{name}\n```json\n{inner}\n```"
    else:
        body = f"{name}<｜tool▁sep｜>{inner}"
    return f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>", name, given


def kimi_call(rng: random.Random) -> Call:
    name, given = rng.choice(NAMES), arguments(rng)
    head = f"functions.{name}:{rng.randint(0, 9)}{space(rng)}<|tool_call_argument_begin|>{space(rng)}"
    return f"<|tool_call_begin|>{head}{json_text(rng, given)}{space(rng)}<|tool_call_end|>", name, given


def tagged_values(rng: random.Random, text_of: Callable[[random.Random], str]) -> dict[str, tuple[str, Any]]:
    """Return values as they are written and as they are read: the schema of `PARAMETERS` defines which are not text."""
    numbers = [("7", 7), ("-2.5", -2.5), (str(10**25), 10**25)]
    flags = [("true", True), ("True", True), ("false", False)]
    objects = [('{"a": [1, "</tool_call>"]}', {"a": [1, "</tool_call>"]}), ("word", "word"), ("null", None)]
    text = text_of(rng)
    values = {"s": (text, text), "n": rng.choice(numbers), "b": rng.choice(flags), "o": rng.choice(objects)}
    return {key: values[key] for key in values if rng.random() < 0.6}


def plain_value(rng: random.Random) -> str:
    """Return a text that holds tags, but no tag that could close it, and no beginning of a call."""
    return words(
        rng, without=("</parameter>", "</arg_value>", "<parameter=k>", "<function=f>", "<tool_call>", "<arg_key>")
    )


def coder_value(rng: random.Random) -> str:
    example = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"
    odd = [
        "</parameter> is a tag",
        "</function>x",
        "</tool_call>y",
        "a <parameter=s> b",
        example,
        f"{example}\n{example}",
    ]
    return f"({plain_value(rng)}.{rng.choice([*odd, '', ''])}.)" if rng.random() < 0.8 else ""


def glm_value(rng: random.Random) -> str:
    example = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    odd = ["</arg_value> is a tag", "</tool_call>y", "<tool_call> is one", example, f"{example}\n{example}"]
    return f"({plain_value(rng)}.{rng.choice([*odd, '', ''])}.)" if rng.random() < 0.8 else ""


def coder_call(rng: random.Random) -> Call:
    name, values = rng.choice(NAMES), tagged_values(rng, coder_value)
    inner = "".join(f"<parameter={key}>\n{written}\n</parameter>\n" for key, (written, _) in values.items())
    return (
        f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>",
        name,
        {key: read for key, (_, read) in values.items()},
    )


def glm_call(rng: random.Random) -> Call:
    name, values, gap = rng.choice(NAMES), tagged_values(rng, glm_value), rng.choice(["", "\n"])
    inner = "".join(
        f"{gap}<arg_key>{key}</arg_key>{gap}<arg_value>{written}</arg_value>" for key, (written, _) in values.items()
    )
    return f"<tool_call>{name}{inner}{gap}</tool_call>", name, {key: read for key, (_, read) in values.items()}


# --- whole answers ---------------------------------------------------------------------------------------------------

ALL_OPENERS = ("<tool_call>", "<|python_tag|>", "<｜tool▁call", "<|tool_call", "<think>", "</think>")


def prose(rng: random.Random) -> str:
    """Return text without the beginning of a call, and without white space at its ends."""
    return f"({words(rng, without=(*ALL_OPENERS, '<｜tool▁calls▁end｜>', '<|tool_calls_section_end|>'))})"


def marked_answer(
    rng: random.Random, call: Callable[[random.Random], Call], *, before: str = "", after: str = ""
) -> Answer:
    """Make an answer of a thought, content, and calls, perhaps with content after them.

    `before` and `after` stand around the calls.
    """
    reasoning = words(rng, without=ALL_OPENERS) if rng.random() < 0.5 else ""
    text = f"{space(rng)}<think>{reasoning}</think>" if reasoning or rng.random() < 0.3 else ""
    content = prose(rng) if rng.random() < 0.5 else ""
    calls = [call(rng) for _ in range(rng.randint(0, 3))]
    text += content
    if calls:
        written = [f"{space(rng)}{each[0]}" for each in calls]
        text += f"{space(rng)}{before}{''.join(written)}{space(rng) if after else ''}{after}"
        if rng.random() < 0.3:
            tail = space(rng) + prose(rng)
            text, content = text + tail, content + tail
        else:
            text += space(rng)
    return Answer(text, reasoning, content, [(name, given) for _, name, given in calls])


def llama_answer(rng: random.Random) -> Answer:
    calls = [llama_call(rng) for _ in range(rng.randint(1, 3))]
    content = prose(rng) if rng.random() < 0.4 else ""
    mark = "<|python_tag|>" if content or rng.random() < 0.5 else ""
    gap = rng.choice(["; ", ";", "\n"])
    text = content + space(rng) + mark + gap.join(written for written, _, _ in calls)
    return Answer(text, "", content, [(name, given) for _, name, given in calls])


def harmony_answer(rng: random.Random) -> Answer:
    """Make an answer of messages on all channels; calls come last, and the end of the turn is not in the text."""
    free = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    parts, reasoning, content = [], [], []
    for _ in range(rng.randint(0, 2)):
        thought = words(rng, without=free) + "."
        parts.append(f"<|channel|>analysis<|message|>{thought}<|end|>")
        reasoning.append(thought)
    if rng.random() < 0.4:
        said = words(rng, without=free) + "."
        parts.append(f"<|channel|>commentary<|message|>{said}<|end|>")
        content.append(said)
    calls = []
    for _ in range(rng.randint(0, 2)):
        name, given = rng.choice(NAMES), arguments(rng)
        target = rng.choice([f"functions.{name}", name])
        constrain = rng.choice([" <|constrain|>json", " json", "", "<|constrain|>json"])
        head = rng.choice(
            [f"<|channel|>commentary to={target}{constrain}", f" to={target}<|channel|>commentary{constrain}"]
        )
        parts.append(f"{head}<|message|>{json_text(rng, given)}<|call|>")
        calls.append((name, given))
    if not calls:
        said = words(rng, without=free) + "."
        parts.append(f"<|channel|>final<|message|>{said}{rng.choice(['', '<|return|>'])}")
        content.append(said)
    elif rng.random() < 0.7:
        parts[-1] = parts[-1].removesuffix("<|call|>")
    return Answer("<|start|>assistant".join(parts), "\n".join(reasoning), "\n".join(content), calls)


ANSWERS: dict[str, Callable[[random.Random], Answer]] = {
    "hermes": lambda rng: marked_answer(rng, hermes_call),
    "qwen3_coder": lambda rng: marked_answer(rng, coder_call),
    "glm45": lambda rng: marked_answer(rng, glm_call),
    "deepseek_v3": lambda rng: marked_answer(
        rng, deepseek_call, before="<｜tool▁calls▁begin｜>", after=rng.choice(["", "<｜tool▁calls▁end｜>"])
    ),
    "kimi_k2": lambda rng: marked_answer(
        rng, kimi_call, before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>"
    ),
    "llama3": llama_answer,
    "gpt-oss": harmony_answer,
}
"""Makers of answers, by the name of the parser."""
