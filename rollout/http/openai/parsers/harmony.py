"""The harmony format of gpt-oss: an answer is a row of messages, each with a header.

    <|channel|>analysis<|message|>...<|end|>                                                 reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>                             content, before a call
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>                               content

The prompt holds `<|start|>assistant` already, and the recipient may stand before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rollout.http.openai.parsers.json_text import read_object
from rollout.http.openai.parsers.said import Said, ToolCall
from rollout.http.openai.parsers.text import NotACall, Reading, Text

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ENDS_OF_TURN = (CALL, RETURN)
MAX_HEADER = 512
"""Characters of a header; a longer one is content."""

_ENDS = (END, CALL, RETURN)
_NEXT = (*_ENDS, START, CHANNEL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_PREFIX = "functions."


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message; `function` is what it calls, None if it calls nothing, or not a function."""

    channel: str
    recipient: str | None

    @property
    def function(self) -> str | None:
        recipient = self.recipient or ""
        return recipient.removeprefix(_PREFIX) if recipient.startswith(_PREFIX) else None

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" and self.function is None


def begins_in_thought(prompt_tail: str) -> bool:
    """Return whether the prompt ends within a message of reasoning."""
    if any(prompt_tail.rfind(end) > prompt_tail.rfind(MESSAGE) for end in (*_ENDS, START, CHANNEL)):
        return False
    header, message, _ = prompt_tail.rpartition(MESSAGE)
    return bool(message) and _header(header).is_reasoning


class HarmonyReader:
    """Reads the messages of one answer.

    `has_reasoning` False leaves reasoning in the content as it is written, `function_names` None the calls: else they
    are the functions that exist, which models may call without their prefix.
    """

    def __init__(self, text: Text, said: Said, *, has_reasoning: bool, function_names: frozenset[str] | None) -> None:
        self._text = text
        self._said = said
        self._has_reasoning = has_reasoning
        self._function_names = function_names
        self._has_thought = False
        self._has_spoken = False

    def answer(self, *, in_thought: bool) -> Reading[None]:
        text, said = self._text, self._said
        if in_thought:
            yield from self._body(Header("analysis", None))
        elif (yield from text.goes_on(" to=", "to=")):
            yield from self._message()
        while True:
            said.is_thinking = self._has_reasoning and not said.has_content
            marker = text.seek(MARKERS)
            said.speak(text.take())
            if marker in (START, CHANNEL, MESSAGE):
                yield from self._message()
            elif marker is not None:
                text.at += len(marker)
                text.take()  # it ends no message
            elif not (yield from text.more()):
                text.rest()
                said.speak(text.take())
                return

    def _message(self) -> Reading[None]:
        """Read a header and what follows it."""
        try:
            header = yield from self._header()
        except NotACall as failure:
            written = self._text.take()
            if not (failure.is_cut and written.startswith("<|")):  # an answer that ends in a header adds nothing there
                self._said.speak(written)
            return
        names = self._function_names
        is_call = header.function is not None or (names is not None and header.recipient in names)
        if is_call and names is not None:
            yield from self._call(header.function or header.recipient or "")
        elif header.is_reasoning or not header.recipient:
            yield from self._body(header)
        else:
            yield from self._raw()  # a call of something other than a function, or without tools

    def _header(self) -> Reading[Header]:
        """Read up to the message.  Raises `NotACall` for a header that does not lead to one."""
        text, begin = self._text, self._text.at
        if (yield from text.goes_on(START)):
            text.at += len(START)
        while True:
            marker = text.seek((MESSAGE, *_ENDS, START))
            if text.at - begin > MAX_HEADER:
                text.at = begin + MAX_HEADER
                raise NotACall
            if marker == MESSAGE:
                written = text.since(begin)
                text.at += len(MESSAGE)
                return _header(written)
            if marker is not None:
                raise NotACall
            if not (yield from text.more()):
                text.rest()
                raise NotACall(is_cut=True)

    def _call(self, name: str) -> Reading[None]:
        """Read the arguments of a call and the end of its message; anything else stays content as it is written."""
        text = self._text
        try:
            yield from text.space()
            arguments = (yield from read_object(text)).written
            yield from text.space()
            if not text.is_spent:  # the token that ended the turn is not part of the text
                if (yield from text.goes_on(*_NEXT)) is None:
                    raise NotACall
                text.at += len((yield from text.goes_on(*_ENDS)) or "")
        except NotACall as failure:
            if failure.is_cut:
                text.rest()
            self._said.speak(text.take())
            return
        text.take()
        self._said.call(ToolCall(name, arguments))

    def _body(self, header: Header) -> Reading[None]:
        """Read a message of reasoning or content, each on a line of its own."""
        if header.is_reasoning and not self._has_reasoning:
            yield from self._raw()
            return
        said = self._said
        self._text.take()
        said.is_thinking = header.is_reasoning
        if header.is_reasoning:
            say, is_first = said.think, not self._has_thought
            self._has_thought = True
        else:
            say, is_first = said.speak, not self._has_spoken
            self._has_spoken = True
        if not is_first:
            say("\n")
        yield from self._until_end(say)
        self._text.take()

    def _raw(self) -> Reading[None]:
        """Read a message, and leave it in the content with its header and its end."""
        yield from self._until_end(self._said.speak)
        self._said.speak(self._text.take())

    def _until_end(self, say: Callable[[str], None]) -> Reading[None]:
        """Say a message, and read the marker that ends it."""
        while True:
            marker = self._text.seek(_NEXT)
            say(self._text.take())
            if marker is not None:
                self._text.at += len(marker) if marker in _ENDS else 0
                return
            if not (yield from self._text.more()):
                self._text.rest()
                say(self._text.take())
                return


def _header(written: str) -> Header:
    channel, recipient = _CHANNEL.search(written), _RECIPIENT.search(written)
    name = recipient[1] if recipient is not None else None
    return Header(channel[1] if channel is not None else "commentary" if name else "final", name)
