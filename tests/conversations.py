"""Seeded conversations with tools, as agents have them: calls, answers of tools, thoughts, and text of many scripts."""

from __future__ import annotations

import json
import random
from typing import Any

WORDS = (
    *("hello", "the", "Weather", "in", "Zürich", "is", "18.5", "°C", "don't", "I'LL", "naïve", "x_1", "=>", "3.14159"),
    *("北京", "今天", "漢字", "かな", "カナ", "한국어", "Привет", "שלום", "مرحبا", "नमस्ते", "ไทย", "😀", "👩‍👩‍👧", "🇨🇭"),
    *("\n", "\n\n", "  ", "\t", "</tool_call>", "{", "}", '"', "\\", "<b>", "&", "#", "e\u0301", "\u00a0", "ﬁ"),
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place, in °C <or> °F & more.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Zürich, 北京"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": 'Runs "code".',
            "parameters": {"type": "object", "properties": {"code": {"type": "string", "enum": ["a'b", "c\n"]}}},
        },
    },
]


def conversation(
    seed: int, *, text_arguments: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Make the messages of a chat, and its tools (None in every fourth chat).

    With `text_arguments` the arguments of calls are JSON, as DeepSeek's templates take them, and as clients send them.
    """
    rng = random.Random(seed)
    tools = None if seed % 4 == 3 else TOOLS[: 1 + seed % 2]
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _text(rng)})
        if tools is not None and rng.random() < 0.6:
            messages += _call(rng, tools, text_arguments)
        messages.append({"role": "assistant", "content": _text(rng)})
    if rng.random() < 0.3:
        messages.append({"role": "user", "content": _text(rng)})
    return messages, tools


def _call(rng: random.Random, tools: list[dict[str, Any]], text_arguments: bool) -> list[dict[str, Any]]:
    """Make an assistant's turn of calls, and an answer to each call."""
    calls, answers = [], []
    for index in range(rng.randint(1, 2)):
        arguments: Any = {"place": _text(rng), "days": index}
        arguments = json.dumps(arguments, ensure_ascii=False) if text_arguments else arguments
        function = {"name": rng.choice(tools)["function"]["name"], "arguments": arguments}
        calls.append({"id": f"call_{index}", "type": "function", "function": function})
        answers.append({"role": "tool", "tool_call_id": f"call_{index}", "content": _text(rng)})
    return [{"role": "assistant", "content": _text(rng), "tool_calls": calls}, *answers]


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))
