"""`Text`: an answer as it comes, and the place up to which it is read.

Readers are generators.  They yield where the text has to go on before they can.  They never look at how it was cut:
what they decide depends on the text alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]

_DROP = 1 << 16
"""Characters that were taken are dropped in such stretches, as dropping copies the rest."""
_SPACE = re.compile(r"\s*")


class NotACall(Exception):
    """The text at `Text.at` does not go on as a call does.  `is_cut`: because the answer ends there."""

    def __init__(self, *, is_cut: bool = False) -> None:
        super().__init__()
        self.is_cut = is_cut


class Text:
    """Text as it comes: `begin` is the start of the part not taken yet, `at` the place up to which it is read.

    Positions are valid until the next `take`.  `barriers`: strings that text without quotes cannot hold.
    """

    def __init__(self) -> None:
        self.begin = 0
        self.at = 0
        self.has_ended = False
        self.barriers: tuple[str, ...] = ()
        self._text = ""

    def append(self, more: str) -> None:
        """Add what has come."""
        whole, self._text = self._text, ""
        whole += more  # in place, as nothing else refers to it
        self._text = whole

    def end(self) -> None:
        """Note that nothing more will come."""
        self.has_ended = True

    def take(self) -> str:
        """Return the text from `begin` to `at`, which begins at `at` from now on."""
        taken = self._text[self.begin : self.at]
        self.begin = self.at
        if self.begin > _DROP:
            self._text = self._text[self.begin :]
            self.begin = self.at = 0
        return taken

    def since(self, position: int, end: int | None = None) -> str:
        """Return the text from `position` to `end`, by default the place of reading."""
        return self._text[position : self.at if end is None else end]

    # Each of these waits for as much text as it takes to answer.

    def more(self) -> Reading[bool]:
        """Wait for more text; False where none comes."""
        if self.has_ended:
            return False
        yield
        return not self.has_ended

    def goes_on(self, *markers: str) -> Reading[str | None]:
        """Return which of `markers` is next, None if none is."""
        while True:
            for marker in markers:
                if self._text.startswith(marker, self.at):
                    return marker
            if not self._may_begin(markers) or not (yield from self.more()):
                return None

    def expect(self, *markers: str) -> Reading[str]:
        """Read one of `markers`.  Raises `NotACall` where none is next."""
        marker = yield from self.goes_on(*markers)
        if marker is None:
            raise NotACall(is_cut=self._may_begin(markers))
        self.at += len(marker)
        return marker

    def character(self) -> Reading[str]:
        """Return the next character.  Raises `NotACall` at the end."""
        yield from self.need(1)
        return self._text[self.at]

    def need(self, count: int) -> Reading[str]:
        """Return the next `count` characters.  Raises `NotACall` where fewer are left."""
        while len(self._text) < self.at + count:
            if not (yield from self.more()):
                raise NotACall(is_cut=True)
        return self._text[self.at : self.at + count]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read what matches `pattern`, a repetition of characters of one kind."""
        begin = self.at
        while True:
            match = pattern.match(self._text, self.at)
            self.at = match.end() if match is not None else self.at
            if self.at < len(self._text) or not (yield from self.more()):
                return self._text[begin : self.at]

    def space(self) -> Reading[str]:
        """Read white space."""
        return (yield from self.run(_SPACE))

    def find(self, *markers: str) -> Reading[str]:
        """Read up to the first of `markers`.  Raises `NotACall` where there is none."""
        while (marker := self.seek(markers)) is None:
            if not (yield from self.more()):
                self.rest()
                raise NotACall(is_cut=True)
        return marker

    # These do not wait.

    def seek(self, markers: tuple[str, ...]) -> str | None:
        """Read up to the first of `markers` that has come; else as far as none begins, and return None."""
        if not markers:
            self.rest()
            return None
        pattern, longest = _alternatives(markers)
        match = pattern.search(self._text, self.at)
        if match is not None:
            self.at = match.start()
            return match[0]
        self.at = max(self.at, len(self._text) - longest + 1)
        while self.at < len(self._text) and not self._may_begin(markers):
            self.at += 1
        return None

    @property
    def is_spent(self) -> bool:
        """True once all was read, and no more comes."""
        return self.has_ended and self.at == len(self._text)

    def rest(self) -> None:
        """Read all that has come."""
        self.at = len(self._text)

    def back_to(self, markers: tuple[str, ...], start: int) -> None:
        """Go back to the first of `markers` that was read from `start` on, if any."""
        match = _alternatives(markers)[0].search(self._text, start, self.at)
        self.at = match.start() if match is not None else self.at

    def back_behind(self, marker: str, start: int) -> None:
        """Go back behind the first `marker` that was read from `start` on, if any."""
        position = self._text.find(marker, start, self.at)
        self.at = position + len(marker) if position >= 0 else self.at

    def _may_begin(self, markers: tuple[str, ...]) -> bool:
        """Return whether one of `markers` may be next, with what is still to come."""
        rest = self._text[self.at : self.at + max(map(len, markers))]
        return any(marker.startswith(rest) for marker in markers)


@functools.cache
def _alternatives(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    return re.compile("|".join(map(re.escape, markers))), max(map(len, markers))
