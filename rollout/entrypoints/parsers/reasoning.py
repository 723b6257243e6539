"""Where the reasoning of an answer begins: one entry a format.

All formats think between `<think>` and `</think>`, once, before the answer.  The opening marker is the model's to
write, or the template's: then the prompt ends with it.
"""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`thinks_unmarked`: an answer is reasoning from its first word, whether or not the model writes the marker.

    `calls_end_thought`: the models go from a thought into a tool call without closing the thought.
    """

    thinks_unmarked: bool = False
    calls_end_thought: bool = False

    def begins_in_thought(self, prompt_tail: str, begun: str) -> bool:
        """Whether the answer goes on with a thought.

        `prompt_tail`: the last words of the prompt; `begun`: the answer's beginning, if the prompt holds one.
        """
        opened, closed = begun.rfind(OPEN), begun.rfind(CLOSE)
        if opened != closed:
            return opened > closed
        end = prompt_tail.rstrip()
        return end.endswith(OPEN) or (self.thinks_unmarked and not end.endswith(CLOSE))


REASONING_FORMATS = {
    "qwen3": ReasoningFormat(calls_end_thought=True),
    "glm45": ReasoningFormat(calls_end_thought=True),
    "deepseek-r1": ReasoningFormat(thinks_unmarked=True),
}
REASONING_FORMATS["deepseek_r1"] = REASONING_FORMATS["deepseek-r1"]
