"""The ways in which models write tool calls: one entry a format.

Names of functions are not checked against the tools: the program that runs them must see a call to one that does not
exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rollout.http.openai.parsers import call_grammar, harmony
from rollout.http.openai.parsers.json_calls import (
    read_deepseek_call,
    read_hermes_call,
    read_kimi_call,
    read_llama_call,
)
from rollout.http.openai.parsers.lark import Lark
from rollout.http.openai.parsers.said import ToolCall
from rollout.http.openai.parsers.tagged_calls import CLOSE, OPEN, Tools, read_glm_call, read_qwen3_coder_calls
from rollout.http.openai.parsers.text import Reading, Text

CallReader = Callable[[Text, Tools], Reading[list[ToolCall]]]
CallWriter = Callable[[Lark, str, dict[str, Any]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """`opener` begins a call, `closer` ends it; `before` and `after` may stand around the calls of an answer.

    `read` reads what follows the opener; None: calls are messages of the harmony format.
    `has_quotes`: values are JSON, so that a closer within one looks like the end of a malformed call.
    `bare`: an answer that begins with a brace is a call without its opener, and so is what follows a call.
    `other_markers`: the other special tokens that `read` looks for.
    `write`: the grammar of what follows the opener; `separator`: text between two calls, None if a turn has one call.
    `ends`: tokens that end the turn with a call, also where the model's configuration does not name them.
    """

    write: CallWriter
    read: CallReader | None = None
    separator: str | None = ""
    opener: str = ""
    closer: str = ""
    before: str = ""
    after: str = ""
    has_quotes: bool = True
    bare: bool = False
    other_markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @property
    def is_harmony(self) -> bool:
        return self.read is None

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the reader must see, even if they are special to the tokenizer."""
        named = (self.opener, self.closer, self.before, self.after, *self.other_markers)
        return tuple(marker for marker in named if marker)


HERMES = CallFormat(read=read_hermes_call, write=call_grammar.hermes_call, separator="\n", opener=OPEN, closer=CLOSE)
QWEN3_CODER = CallFormat(
    read=read_qwen3_coder_calls,
    write=call_grammar.qwen3_coder_call,
    separator="\n",
    opener=OPEN,
    closer=CLOSE,
    has_quotes=False,
)
GLM = CallFormat(
    read=read_glm_call,
    write=call_grammar.glm_call,
    separator="\n",
    opener=OPEN,
    closer=CLOSE,
    has_quotes=False,
    other_markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
LLAMA = CallFormat(
    read=read_llama_call,
    write=call_grammar.llama_call,
    separator="; ",
    opener="<|python_tag|>",
    bare=True,
    ends=("<|eom_id|>", "<|eot_id|>"),
)
DEEPSEEK = CallFormat(
    read=read_deepseek_call,
    write=call_grammar.deepseek_v31_call,
    opener="<｜tool▁call▁begin｜>",
    closer="<｜tool▁call▁end｜>",
    before="<｜tool▁calls▁begin｜>",
    after="<｜tool▁calls▁end｜>",
    other_markers=("<｜tool▁sep｜>",),
)
DEEPSEEK_V3 = replace(DEEPSEEK, write=call_grammar.deepseek_v3_call, separator="\n")
KIMI = CallFormat(
    read=read_kimi_call,
    write=call_grammar.kimi_call,
    opener="<|tool_call_begin|>",
    closer="<|tool_call_end|>",
    before="<|tool_calls_section_begin|>",
    after="<|tool_calls_section_end|>",
    other_markers=("<|tool_call_argument_begin|>",),
)
HARMONY = CallFormat(
    write=call_grammar.harmony_call, separator=None, other_markers=harmony.MARKERS, ends=harmony.ENDS_OF_TURN
)

TOOL_CALL_READERS: dict[str, CallFormat] = {
    "qwen": HERMES,
    "qwen25": HERMES,
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "glm": GLM,
    "glm45": GLM,
    "glm47": GLM,
    "llama3": LLAMA,
    "llama3_json": LLAMA,
    "deepseekv3": DEEPSEEK_V3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "kimi_k2": KIMI,
    "gpt-oss": HARMONY,
    "openai": HARMONY,
}
"""By the names that SGLang and vLLM give them."""
