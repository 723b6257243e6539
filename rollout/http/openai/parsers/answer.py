"""`AnswerParser`: splits the text of an answer, as it comes, into reasoning, content and tool calls.

    start -> thought -> content <-> call

Whatever the pieces in which the text comes, the result is the same.  Nothing is lost: a call that is malformed or not
finished stays content as it was written.  Only white space that separates calls is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.http.openai.parsers import reasoning
from rollout.http.openai.parsers.harmony import HarmonyReader
from rollout.http.openai.parsers.reasoning import ReasoningFormat
from rollout.http.openai.parsers.said import Piece, Said, ToolCall
from rollout.http.openai.parsers.tagged_calls import Tools
from rollout.http.openai.parsers.text import NotACall, Reading, Text
from rollout.http.openai.parsers.tool_calls import CallFormat

__all__ = ["AnswerParser", "Piece", "ToolCall"]


class AnswerParser:
    """Give it text with `feed`, and `finish` it once.

    `call_format` None leaves tool calls in the content, `reasoning_format` None the reasoning.  `in_thought`: the
    answer begins within a thought.  `is_harmony`: the model writes messages of the harmony format; it does if one of
    the formats is harmony's.  `function_names`: the names in `tools`, where they are known already.
    """

    def __init__(
        self,
        reasoning_format: ReasoningFormat | None = None,
        call_format: CallFormat | None = None,
        tools: Tools = (),
        *,
        function_names: frozenset[str] | None = None,
        in_thought: bool = False,
        is_harmony: bool = False,
    ) -> None:
        self._text = Text()
        self._said = Said()
        formats = (reasoning_format, call_format)
        if is_harmony or any(each is not None and each.is_harmony for each in formats):
            names = names_of(tools) if function_names is None else function_names
            messages = HarmonyReader(
                self._text,
                self._said,
                has_reasoning=reasoning_format is not None,
                function_names=None if call_format is None else names,
            )
            self._reader = messages.answer(in_thought=in_thought)
        else:
            reader = _Reader(self._text, self._said, reasoning_format, call_format, tools)
            self._reader = reader.answer(in_thought=in_thought)
        next(self._reader, None)

    @property
    def is_thinking(self) -> bool:
        """True while more reasoning may come."""
        return self._said.is_thinking

    def feed(self, text: str) -> Piece:
        """Return what `text` adds, as far as it is certain."""
        self._text.append(text)
        next(self._reader, None)
        return self._said.take()

    def finish(self) -> Piece:
        """Return what is left at the end of the answer."""
        self._text.end()
        for _ in self._reader:
            pass
        self._said.close()
        return self._said.take()


def names_of(tools: Tools) -> frozenset[str]:
    """Return the names of the functions that tools declare."""
    functions = [tool.get("function") for tool in tools]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return frozenset(name for name in names if isinstance(name, str))


class _Reader:
    """Reads answers whose reasoning stands between markers, and whose calls begin with one."""

    def __init__(
        self, text: Text, said: Said, reasoning_format: ReasoningFormat | None, calls: CallFormat | None, tools: Tools
    ) -> None:
        self._text = text
        self._said = said
        self._reasoning = reasoning_format
        self._calls = calls
        self._tools = tools
        begins = () if calls is None else tuple(filter(None, (calls.opener, calls.before)))
        ends_thought = begins if reasoning_format is not None and reasoning_format.calls_end_thought else ()
        self._thought_marks = (reasoning.CLOSE, *ends_thought)
        self._content_marks = begins if calls is None or not calls.after else (*begins, calls.after)

    def answer(self, *, in_thought: bool) -> Reading[None]:
        if self._reasoning is not None and (yield from self._begins_thought(in_thought)):
            yield from self._thought()
        self._said.is_thinking = False
        yield from self._content()

    def _begins_thought(self, in_thought: bool) -> Reading[bool]:
        self._said.is_thinking = True
        begin = self._text.at
        yield from self._text.space()
        if (yield from self._text.goes_on(reasoning.OPEN)):
            self._text.at += len(reasoning.OPEN)
            self._text.take()
            return True
        self._text.at = begin
        return in_thought

    def _thought(self) -> Reading[None]:
        """Read up to the end of the thought, or through the first call in it."""
        while (mark := (yield from self._until(self._thought_marks, self._said.think))) is not None:
            if mark == reasoning.CLOSE:
                self._text.at += len(mark)
                self._text.take()
                return
            self._text.barriers = self._thought_marks
            is_call = yield from self._call_in_thought(mark)
            self._text.barriers = ()
            if is_call:
                return

    def _call_in_thought(self, mark: str) -> Reading[bool]:
        """Read a call; False where the model only speaks of one, which is part of the thought."""
        assert self._calls is not None
        begin = self._text.at
        try:
            yield from self._read(mark)
        except NotACall as failure:
            if failure.is_cut:
                self._text.rest()
            self._text.back_to((reasoning.CLOSE,) if failure.is_cut else self._thought_marks, begin + len(mark))
            self._said.think(self._text.take())
            return False
        return True

    def _content(self) -> Reading[None]:
        while (yield from self._bare_call()):
            pass
        while (mark := (yield from self._until(self._content_marks, self._said.speak))) is not None:
            assert self._calls is not None
            if mark == self._calls.opener:
                if (yield from self._call(mark)):
                    while (yield from self._bare_call()):
                        pass
                continue
            self._text.at += len(mark)
            written = self._text.take()
            if mark == self._calls.before:
                self._said.hold(written)
            elif self._said.follows_call:
                self._said.drop_held()
            else:
                self._said.speak(written)

    def _call(self, opener: str = "") -> Reading[bool]:
        """Read a call.  A malformed one is content up to its end, or up to the place where it stops being a call."""
        assert self._calls is not None
        begin = self._text.begin
        try:
            yield from self._read(opener)
        except NotACall as failure:
            if failure.is_cut:
                self._text.rest()
            elif self._calls.has_quotes and self._calls.closer:
                self._text.back_behind(self._calls.closer, begin)
            self._said.speak(self._text.take())
            return False
        return True

    def _bare_call(self) -> Reading[bool]:
        """Read an object that is a call by its place: at the beginning, or after a call, with a semicolon between."""
        if self._calls is None or not self._calls.bare:
            return False
        begin = self._text.at
        yield from self._text.space()
        if self._said.follows_call and (yield from self._text.goes_on(";")):
            self._text.at += 1
            yield from self._text.space()
        if (yield from self._text.goes_on("{")):
            return (yield from self._call())
        self._text.at = begin
        return False

    def _read(self, mark: str) -> Reading[None]:
        """Read what begins with `mark`, and say the calls.  Raises `NotACall`."""
        assert self._calls is not None and self._calls.read is not None
        self._text.at += len(mark)
        if mark and mark == self._calls.before:
            yield from self._text.space()
            yield from self._text.expect(self._calls.opener)
        calls = yield from self._calls.read(self._text, self._tools)
        self._text.take()
        for call in calls:
            self._said.call(call)

    def _until(self, marks: tuple[str, ...], say: Callable[[str], None]) -> Reading[str | None]:
        """Say the text up to the first of `marks` and return that; None: the answer has ended."""
        while True:
            mark = self._text.seek(marks)
            say(self._text.take())
            if mark is not None:
                return mark
            if not (yield from self._text.more()):
                self._text.rest()
                say(self._text.take())
                return None
