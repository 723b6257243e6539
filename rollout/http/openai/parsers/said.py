"""The reasoning, content and calls that readers have found in an answer so far."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text of an object; `id` the one that the model gave, if its format has any."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(slots=True)
class Piece:
    """The additions of some text to a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class Said:
    """Readers add to it; `take` returns what was added since the last time.

    White space next to calls separates them, and is dropped.  `is_thinking`: more reasoning may come.
    """

    def __init__(self) -> None:
        self.is_thinking = False
        self.follows_call = False  # nothing but white space has come after a call
        self.has_content = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._held: list[str] = []  # dropped if a call follows

    def take(self) -> Piece:
        """Return what was added since the last time."""
        piece = Piece("".join(self._reasoning), "".join(self._content), self._calls)
        self._reasoning, self._content, self._calls = [], [], []
        return piece

    def think(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._reasoning.append(text)

    def speak(self, text: str) -> None:
        """Add content."""
        words = text.rstrip()
        if words:
            self._content += [*self._held, words]
            self._held = []
            self.follows_call, self.has_content = False, True
        self.hold(text[len(words) :])

    def hold(self, text: str) -> None:
        """Add content that is dropped if a call follows it."""
        if text:
            self._held.append(text)

    def drop_held(self) -> None:
        """Forget what `hold` was given."""
        self._held = []

    def call(self, call: ToolCall) -> None:
        """Add a call."""
        self._calls.append(call)
        self._held = []
        self.follows_call = True

    def close(self) -> None:
        """End the answer: what is held becomes content, apart from white space after the last call."""
        held = "".join(self._held)
        if not self.follows_call or held.strip():
            self._content.append(held)
        self._held = []
