"""`AnswerParser`: text of an answer, as it comes, into reasoning, content and tool calls.

    start -> thought -> content <-> call

Whatever the pieces in which the text comes, the result is the same.  Nothing is lost: a call that is malformed or not
finished stays content as it was written.  Of white space only that goes which separates calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollout.entrypoints.parsers import reasoning, tool_calls
from rollout.entrypoints.parsers.reasoning import ReasoningFormat
from rollout.entrypoints.parsers.tool_calls import CallReader, ToolCall, Tools

_STRETCH = 4096
"""Characters that are parsed in one go, as consuming some copies the rest each time."""


@dataclass(slots=True)
class Piece:
    """What some text adds to a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerParser:
    """Give it text with `feed`, and `finish` it once.

    `read_call` None leaves tool calls in the content, `reasoning_format` None the reasoning.  `in_thought`: the answer
    begins within a thought.
    """

    def __init__(
        self,
        reasoning_format: ReasoningFormat | None = None,
        read_call: CallReader | None = None,
        tools: Tools = (),
        *,
        in_thought: bool = False,
    ) -> None:
        self._read_call = read_call
        self._tools = tools
        self._in_thought = in_thought
        self._thought_ends = [reasoning.CLOSE]
        if read_call is not None and reasoning_format is not None and reasoning_format.calls_end_thought:
            self._thought_ends.append(tool_calls.OPEN)
        self._rest = ""  # text that may still turn out to be a marker, or a call that is not whole
        self._searched = 0  # characters of `_rest` that hold no end of the call
        self._gap = ""  # white space that is dropped if a call follows
        self._after_call = False
        self._state: Callable[[Piece], bool] = self._content if reasoning_format is None else self._start

    @property
    def is_thinking(self) -> bool:
        """Whether more reasoning may come."""
        return self._state in (self._start, self._thought, self._call_in_thought)

    def feed(self, text: str) -> Piece:
        """What `text` adds, as far as it is certain."""
        pieces = []
        for start in range(0, len(text), _STRETCH):
            self._rest += text[start : start + _STRETCH]
            pieces.append(piece := Piece())
            while self._state(piece):
                pass
        return Piece(
            "".join(piece.reasoning for piece in pieces),
            "".join(piece.content for piece in pieces),
            [call for piece in pieces for call in piece.calls],
        )

    def finish(self) -> Piece:
        """What is left at the end of the answer."""
        rest, self._rest = self._rest, ""
        if self._state in (self._thought, self._call_in_thought) or (self._state == self._start and self._in_thought):
            return Piece(reasoning=rest)
        gap = "" if self._after_call and not rest else self._gap
        return Piece(content=gap + rest)

    # Each state takes what it can from `_rest`; True: another state goes on with the rest.

    def _start(self, piece: Piece) -> bool:
        text = self._rest.lstrip()
        if len(text) < len(reasoning.OPEN) and reasoning.OPEN.startswith(text):
            return False
        is_marked = text.startswith(reasoning.OPEN)
        if is_marked:
            self._rest = text[len(reasoning.OPEN) :]
        self._state = self._thought if is_marked or self._in_thought else self._content
        return True

    def _thought(self, piece: Piece) -> bool:
        ends = [(at, mark) for mark in self._thought_ends if (at := self._rest.find(mark)) >= 0]
        if not ends:
            piece.reasoning += self._take(len(self._rest) - _partial(self._rest, self._thought_ends))
            return False
        at, mark = min(ends)
        piece.reasoning += self._take(at)
        if mark == reasoning.CLOSE:
            self._take(len(mark))
            self._state = self._content
        else:
            self._state = self._call_in_thought
        return True

    def _call_in_thought(self, piece: Piece) -> bool:
        """A call ends the thought; a marker that the model only mentions is part of it."""
        assert self._read_call is not None
        marks, begin = (reasoning.CLOSE, tool_calls.CLOSE), len(tool_calls.OPEN)
        ends = [(at, mark) for mark in marks if (at := self._rest.find(mark, self._searched)) >= 0]
        at, mark = min(ends, default=(len(self._rest), ""))
        self._searched = 0
        if (mentioned := self._rest.rfind(tool_calls.OPEN, begin, at)) >= 0:
            piece.reasoning += self._take(mentioned)
        elif not ends:
            self._searched = max(0, len(self._rest) - max(map(len, marks)))
            return False
        elif mark == tool_calls.CLOSE and self._read_call(self._rest[begin:at], self._tools):
            self._state = self._content
        else:
            piece.reasoning += self._take(begin)
            self._state = self._thought
        return True

    def _content(self, piece: Piece) -> bool:
        if self._read_call is None:
            piece.content += self._take(len(self._rest))
            return False
        at = self._rest.find(tool_calls.OPEN)
        text = self._take(len(self._rest) - _partial(self._rest, [tool_calls.OPEN]) if at < 0 else at)
        words = text.rstrip()
        if words:
            piece.content += self._gap + words
            self._gap, self._after_call = "", False
        self._gap += text[len(words) :]
        if at >= 0:
            self._state = self._call
        return at >= 0

    def _call(self, piece: Piece) -> bool:
        assert self._read_call is not None
        at = self._rest.find(tool_calls.CLOSE, self._searched)
        if at < 0:
            self._searched = max(0, len(self._rest) - len(tool_calls.CLOSE))
            return False
        block = self._take(at + len(tool_calls.CLOSE))
        calls = self._read_call(block[len(tool_calls.OPEN) : -len(tool_calls.CLOSE)], self._tools)
        piece.calls += calls
        if not calls:
            piece.content += self._gap + block
        self._gap, self._after_call, self._searched = "", bool(calls), 0
        self._state = self._content
        return True

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


def _partial(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0
