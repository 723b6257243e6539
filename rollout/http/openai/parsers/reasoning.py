"""The places where the reasoning of an answer begins: one entry a format.

Most formats think between `<think>` and `</think>`, once, before the answer.  The opening marker is the model's to
write, or the template's: then the prompt ends with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.http.openai.parsers import harmony

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`thinks_unmarked`: an answer is reasoning from its first word, whether or not the model writes the marker.

    `calls_end_thought`: the models go from a thought into a tool call without closing the thought.
    `is_harmony`: reasoning is messages of the harmony format.
    """

    thinks_unmarked: bool = False
    calls_end_thought: bool = False
    is_harmony: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the reader must see, even if they are special to the tokenizer."""
        return harmony.MARKERS if self.is_harmony else (OPEN, CLOSE)

    def begins_in_thought(self, prompt_tail: str, begun: str) -> bool:
        """Return whether the answer goes on with a thought.

        `prompt_tail`: the last words of the prompt; `begun`: the answer's beginning, if the prompt holds one.
        """
        if self.is_harmony:
            return not begun and harmony.begins_in_thought(prompt_tail)
        opened, closed = begun.rfind(OPEN), begun.rfind(CLOSE)
        if opened != closed:
            return opened > closed
        end = prompt_tail.rstrip()
        return end.endswith(OPEN) or (self.thinks_unmarked and not end.endswith(CLOSE))

    def may_begin(self, prompt_tail: str, begun: str) -> bool:
        """Return whether an answer that does not begin in a thought may open one."""
        return not begun and (self.is_harmony or not prompt_tail.rstrip().endswith(CLOSE))


_MARKED = ReasoningFormat(calls_end_thought=True)
_UNMARKED = ReasoningFormat(thinks_unmarked=True)
_ALWAYS = ReasoningFormat(thinks_unmarked=True, calls_end_thought=True)
_DEEPSEEK = ReasoningFormat()
_HARMONY = ReasoningFormat(is_harmony=True)

REASONING_FORMATS = {
    "qwen3": _MARKED,
    "qwen3-thinking": _ALWAYS,
    "glm45": _MARKED,
    "kimi_k2": _MARKED,
    "deepseek-r1": _UNMARKED,
    "deepseek_r1": _UNMARKED,
    "deepseek-v3": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt-oss": _HARMONY,
    "openai_gptoss": _HARMONY,
}
"""By the names that SGLang and vLLM give them."""
